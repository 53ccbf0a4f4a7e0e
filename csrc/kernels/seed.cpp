// Masters set to their parameters' values. It happens once in a run: one copy for all instruction
// sets, and the update's loop stays free of it.
#include <cstring>

#include "kernels/kernel_table.h"
#include "kernels/simd_scalar.h"

namespace stow {
namespace {

template <class P>
void widen_all(const void* param, void* master, std::int64_t n) {
  const auto* from = static_cast<const P*>(param);
  auto* to = static_cast<float*>(master);
  for (std::int64_t i = 0; i < n; ++i) to[i] = widen(from[i]);
}

// Where masters are split, a set sign marks one half way to the weight below.
template <class T>
void clear_signs(void* v, std::int64_t n) {
  auto* bits = static_cast<T*>(v);
  constexpr T kRest = static_cast<T>(~T{0}) >> 1;
  for (std::int64_t i = 0; i < n; ++i) bits[i] &= kRest;
}

}  // namespace

void seed_master(const AdamArgs& args) {
  if (args.param_dtype == DType::f32) return;
  void* master = args.states[static_cast<int>(Stream::master)];
  void* v = args.states[static_cast<int>(Stream::v)];
  if (args.param_dtype == DType::f16) return widen_all<F16>(args.param, master, args.n);
  switch (args.format) {
    case StateFormat::fp32:
      return widen_all<Bf16>(args.param, master, args.n);
    case StateFormat::split:
      std::memset(master, 0, static_cast<std::size_t>(args.n) * 2);
      return clear_signs<std::uint32_t>(v, args.n);
    case StateFormat::bf16:
      std::memset(master, 0, static_cast<std::size_t>(args.n) * 2);
      return clear_signs<std::uint16_t>(v, args.n);
    case StateFormat::int8:
      std::memset(master, 0, static_cast<std::size_t>(args.n));
      return;
  }
}

}  // namespace stow
