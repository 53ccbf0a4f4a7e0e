#include <cfenv>
#include <stdexcept>
#include <string>

#include "kernels/kernel_table.h"
#include "kernels/kernels.h"

#ifdef STOW_X86
#include <cpuid.h>
#endif

namespace stow {
namespace {

// The caller's thread may round otherwise or flush denormals (torch.set_flush_denormal, a library
// built with -ffast-math), the pool's threads do not: the same bits need the same environment.
class DefaultRounding {
 public:
  DefaultRounding() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultRounding() { std::fesetenv(&saved_); }
  DefaultRounding(const DefaultRounding&) = delete;
  DefaultRounding& operator=(const DefaultRounding&) = delete;

 private:
  std::fenv_t saved_;
};

const KernelTable& table(Isa isa) {
  if (!isa_supported(isa)) {
    throw std::invalid_argument(std::string("this machine has no ") + isa_name(isa) +
                                "; use one of supported_isas()");
  }
#ifdef STOW_X86
  if (isa == Isa::avx512) return kAvx512Kernels;
  if (isa == Isa::avx2) return kAvx2Kernels;
#endif
#ifdef STOW_NEON
  if (isa == Isa::neon) return kNeonKernels;
#endif
  return kScalarKernels;
}

#ifdef STOW_X86
// Not a name that every compiler's __builtin_cpu_supports has. Queried once: on a virtual
// machine CPUID costs microseconds, as much as a block of work.
bool has_f16c() {
  static const bool answer = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  }();
  return answer;
}
#endif

void check(const AdamArgs& args) {
  StreamSpec streams[kMaxStreams];
  streams_of(args.param_dtype, args.format, args.amsgrad, args.ema, streams);
  if (args.format == StateFormat::int8 && args.first % kGroup != 0) {
    throw std::invalid_argument("an int8 range begins at a multiple of 32 elements");
  }
}

}  // namespace

bool isa_supported(Isa isa) {
#ifdef STOW_X86
  switch (isa) {
    case Isa::scalar:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_f16c();
    case Isa::neon:
      return false;
  }
#endif
#ifdef STOW_NEON
  if (isa == Isa::neon) return true;
#endif
  return isa == Isa::scalar;
}

Isa best_isa() {
  if (isa_supported(Isa::avx512)) return Isa::avx512;
  if (isa_supported(Isa::avx2)) return Isa::avx2;
  return isa_supported(Isa::neon) ? Isa::neon : Isa::scalar;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::neon:
      return "neon";
  }
  return "unknown";
}

void adam_update(const AdamArgs& args, Isa isa) {
  const KernelTable& kernels = table(isa);
  check(args);
  const DefaultRounding rounding;
  if (args.seed_master) seed_master(args);
  kernels.adam_update(args);
  if (!args.ema) return;
  const bool is_wide = args.param_dtype == DType::f32;
  const void* weight = is_wide ? args.param : args.states[static_cast<int>(Stream::master)];
  kernels.average(static_cast<float*>(args.states[static_cast<int>(Stream::ema)]),
                  static_cast<const float*>(weight), args.n, args.hyper.ema_weight);
}

double squared_norm_block(const void* grad, DType dtype, std::int64_t n, Isa isa) {
  const KernelTable& kernels = table(isa);
  const DefaultRounding rounding;
  return kernels.squared_norm_block(grad, dtype, n);
}

void seven_streams(float* p, const float* g, float* m, float* v, std::int64_t n, Isa isa) {
  table(isa).seven_streams(p, g, m, v, n);
}

void mixed_streams(std::uint16_t* p16, const std::uint16_t* g16, float* w, float* m, float* v,
                   std::int64_t n, Isa isa) {
  table(isa).mixed_streams(reinterpret_cast<Bf16*>(p16), reinterpret_cast<const Bf16*>(g16), w, m,
                           v, n);
}

}  // namespace stow
