// The update kernels: one pass over memory, the same bits on every instruction set.
//
// [Note: The Adam rule] Every operation below is one IEEE-754 binary32 operation, rounded to
// nearest even; nothing but the average is fused (FMA), nothing is reassociated. With the scalars
// of `AdamHyper` (computed in binary64 by the caller, rounded once to binary32) and w = master, or
// the fp32 parameter itself:
//
// clang-format off
//   g = grad_factor * float(grad)          unscales and clips in one; negative when maximizing
//   g = g + l2 * w                         only where l2 != 0 (Adam's L2 penalty)
//   w = w * decay                          1 unless AdamW's decoupled decay
//   m = m + beta1_weight * (g - m)         where beta1_weight < 0.5, else, as torch.lerp,
//   m = g - (1 - beta1_weight) * (g - m)   so that beta1 = 0 makes m exactly g
//   v = v * beta2 + (beta2_weight * g) * g
//   u = amsgrad ? max(vmax, v) : v         stored to vmax; vmax where it is greater or NaN, else v
//   w = w - (step_size * m) / (sqrt(u) * denom_scale + eps)
//   param = round_to_nearest_even(w)       where the parameter is 16-bit
//   a = fma(ema_weight, w - a, a)          where ema_weight < 0.5, else, as torch.lerp,
//   a = fma(ema_weight - 1, w - a, w)      and w itself where ema_weight = 1
// clang-format on
//
// The average `a` alone is fused, as torch.lerp is on every CPU with FMA, so that it has the bits
// of torch.optim.swa_utils.AveragedModel (docs/adr/0062).
//
// Order and operands follow torch.optim.AdamW(foreach=False, fused=False), except that dividing by
// sqrt(bias_correction2) is multiplying by its reciprocal. NaN stays NaN; which NaN is not
// specified. The caller's rounding mode and flushing of denormals are set aside while a kernel
// runs.
#pragma once

#include <cstdint>

namespace stow {

enum class DType : std::uint8_t { f32, bf16, f16 };
enum class Isa : std::uint8_t { scalar, avx2, avx512, neon };
constexpr Isa kIsas[] = {Isa::scalar, Isa::avx2, Isa::avx512, Isa::neon};

struct AdamHyper {
  float beta1_weight;  // 1 - beta1
  float beta2;
  float beta2_weight;  // 1 - beta2
  float decay;         // 1 - lr * weight_decay for AdamW, else 1
  float l2;            // weight_decay for Adam, else 0
  float step_size;     // lr / (1 - beta1^t)
  float denom_scale;   // 1 / sqrt(1 - beta2^t)
  float eps;
  float grad_factor;
  float ema_weight = 1.0f;  // 1 - decay of the average; 1 copies the weight
};

// [Note: State formats] How the states of a parameter are kept between steps. Every format runs the
// rule above in fp32; they differ in what they load and save.
//
//   fp32   m, v, vmax and, for a 16-bit parameter, its master.
//   split  for a bf16 parameter the weight is the rounded high half of its master, so only the low
//          half is kept ([Note: Split masters]); otherwise fp32. The same bits as fp32.
//
//   bf16   m and v in bf16, rounded by chance ([Note: Stochastic rounding], [Note: Random bits]);
//          a bf16 parameter's master split, a fp16 one's in fp32. Not exact.
//   int8   m and v in a byte ([Note: Byte moments]); a bf16 parameter's master in 24 bits
//          ([Note: 24-bit masters]), a fp16 one's in fp32. Not exact.
//
// amsgrad is possible with the first two. An average is kept in fp32, of the fp32 weight: where a
// bf16 parameter's master is not stored as it is, there is none. Where signs of v are used, |v| is
// the moment.
enum class StateFormat : std::uint8_t { fp32, split, bf16, int8 };
inline constexpr int kGroup = 32;  // elements that share a scale; aligned in the parameter

// `master` is the fp32 master, or its low bits.
enum class Stream : std::uint8_t { m, v, vmax, master, m_scale, v_scale, ema };
inline constexpr int kMaxStreams = 7;

struct StreamSpec {
  Stream stream;
  int bytes;  // for each `per` elements
  int per;
};

// The streams of a format, in the order of the enum; returns their number. Throws
// std::invalid_argument for amsgrad with an inexact format, and for an average (`ema`) of masters
// that are not stored in fp32.
int streams_of(DType param, StateFormat format, bool amsgrad, bool ema,
               StreamSpec out[kMaxStreams]);

// Arrays of n elements; all distinct. `seed_master` first makes the parameter's value the master of
// all n elements: someone else wrote the parameter, or the master is new.
struct AdamArgs {
  void* param;
  const void* grad;
  void* states[kMaxStreams];  // indexed by Stream; null where the format has none
  std::int64_t n;
  std::int64_t first;  // index in the parameter of element 0: the random bits depend on it
  std::uint64_t key;   // of the random bits: differs between parameters and between steps
  DType param_dtype;
  DType grad_dtype;
  StateFormat format;
  bool amsgrad;
  bool ema;
  bool seed_master;
  AdamHyper hyper;
};

Isa best_isa();  // what this CPU runs; TENSORSTOW_ISA is not read here
bool isa_supported(Isa isa);
const char* isa_name(Isa isa);

// Runs on the calling thread. Cutting a range into several calls changes no bit. Throws
// std::invalid_argument where this CPU has not got `isa`, the format has no amsgrad or no average,
// or an int8 range begins inside a group: those are cut at multiples of kGroup alone.
void adam_update(const AdamArgs& args, Isa isa);

// [Note: The norm tree] Sum of squares in binary64. A parameter is cut into blocks of kNormBlock
// elements from its start; inside a block, element i goes to lane i % 16, each lane adds in order
// (square exact in binary64, then one add), lanes are added as a fixed binary tree (0+8, 1+9, ...
// then 0+4 ... then 0+2, 1+3, then 0+1); blocks are added in order. So the result depends neither
// on the instruction set nor on threads. It is finite exactly when every element is.
inline constexpr std::int64_t kNormBlock = 1 << 16;
double squared_norm_block(const void* grad, DType dtype, std::int64_t n,
                          Isa isa);  // n <= kNormBlock

// The bandwidth probe: the four reads and three writes of a fp32 Adam with almost no arithmetic.
// p += g; m += g; v += g (28 bytes per element).
void seven_streams(float* p, const float* g, float* m, float* v, std::int64_t n, Isa isa);
// The same for bf16 gradients and weights: reads g(2) w m v, writes w m v and p16(2): 28 bytes per
// element.
void mixed_streams(std::uint16_t* p16, const std::uint16_t* g16, float* w, float* m, float* v,
                   std::int64_t n, Isa isa);

}  // namespace stow
