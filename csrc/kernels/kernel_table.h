// What each instruction set provides to dispatch.cpp. Included by files that are compiled for
// different instruction sets, so it holds no code: an inline function compiled for AVX-512 must
// never be the copy that the linker keeps.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace stow {

// The storage of 16-bit floats: types of their own, so that loads and stores overload on them.
struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

struct KernelTable {
  void (*adam_update)(const AdamArgs& args);
  void (*average)(float* average, const float* weight, std::int64_t n, float by);
  double (*squared_norm_block)(const void* grad, DType dtype, std::int64_t n);
  void (*seven_streams)(float* p, const float* g, float* m, float* v, std::int64_t n);
  void (*mixed_streams)(Bf16* p16, const Bf16* g16, float* w, float* m, float* v, std::int64_t n);
};

void seed_master(const AdamArgs& args);

extern const KernelTable kScalarKernels;
#ifdef STOW_X86
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif
#ifdef STOW_NEON
extern const KernelTable kNeonKernels;
#endif

}  // namespace stow
