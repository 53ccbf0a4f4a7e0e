// One lane, any architecture.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/kernel_table.h"

namespace stow {
namespace {

inline float widen(Bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

inline float widen(F16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero and denormals: an exact integer times 2^-24
    const float value = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  const std::uint32_t rebias = magnitude < 0x7c00u ? (127u - 15u) << 23 : (255u - 31u) << 23;
  return std::bit_cast<float>(sign | ((magnitude << 13) + rebias));
}

// Adding half of the last kept bit, less one where that bit is even, carries exactly when
// nearest-even rounds up.
inline std::uint32_t round_off(std::uint32_t bits, int dropped) {
  return (bits + ((1u << (dropped - 1)) - 1u) + ((bits >> dropped) & 1u)) >> dropped;
}

inline Bf16 narrow(float x, Bf16) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return {static_cast<std::uint16_t>((bits >> 16) | 0x0040u)};
  return {static_cast<std::uint16_t>(round_off(bits, 16))};
}

inline F16 narrow(float x, F16) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  } else if (magnitude >= 0x47800000u) {  // 2^16 and more; what rounds up to it carries below
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14: normal
    half = round_off(magnitude - ((127u - 15u) << 23), 13);
  } else {  // adding 0.5 leaves units of 2^-24 in the last bits, rounded by the addition itself
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    half = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5f);
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

struct ScalarI32 {
  using Mask = bool;
  std::uint32_t x;

  static ScalarI32 fill(std::uint32_t value) { return {value}; }
  static ScalarI32 ramp() { return {0}; }
  static ScalarI32 load(const std::int8_t* p) { return {static_cast<std::uint32_t>(*p)}; }
  static ScalarI32 load(const std::uint8_t* p) { return {*p}; }
  static ScalarI32 load(const std::int16_t* p) { return {static_cast<std::uint32_t>(*p)}; }
  // The low bits of each lane.
  template <class T>
  void store(T* p) const {
    *p = static_cast<T>(x);
  }

  friend ScalarI32 operator+(ScalarI32 a, ScalarI32 b) { return {a.x + b.x}; }
  friend ScalarI32 operator-(ScalarI32 a, ScalarI32 b) { return {a.x - b.x}; }
  friend ScalarI32 operator*(ScalarI32 a, ScalarI32 b) { return {a.x * b.x}; }
  friend ScalarI32 operator&(ScalarI32 a, ScalarI32 b) { return {a.x & b.x}; }
  friend ScalarI32 operator|(ScalarI32 a, ScalarI32 b) { return {a.x | b.x}; }
  friend ScalarI32 operator^(ScalarI32 a, ScalarI32 b) { return {a.x ^ b.x}; }
  template <int kBits>
  ScalarI32 shl() const {
    return {x << kBits};
  }
  template <int kBits>
  ScalarI32 shr() const {
    return {x >> kBits};
  }
  template <int kBits>
  ScalarI32 sar() const {
    return {static_cast<std::uint32_t>(static_cast<std::int32_t>(x) >> kBits)};
  }
  static Mask equal(ScalarI32 a, ScalarI32 b) { return a.x == b.x; }
  static Mask above(ScalarI32 a, ScalarI32 b) {  // as signed numbers
    return static_cast<std::int32_t>(a.x) > static_cast<std::int32_t>(b.x);
  }
  static ScalarI32 min(ScalarI32 a, ScalarI32 b) { return above(a, b) ? b : a; }
  static ScalarI32 max(ScalarI32 a, ScalarI32 b) { return above(a, b) ? a : b; }
  std::uint32_t most() const { return x; }
  static ScalarI32 choose(Mask first, ScalarI32 a, ScalarI32 b) { return first ? a : b; }
};

struct ScalarF32 {
  using I = ScalarI32;
  static constexpr int kLanes = 1;
  static constexpr bool kStreams = false;
  float x;

  static ScalarF32 of(I bits) { return {std::bit_cast<float>(bits.x)}; }
  I bits() const { return {std::bit_cast<std::uint32_t>(x)}; }
  static ScalarF32 from(I n) { return {static_cast<float>(static_cast<std::int32_t>(n.x))}; }
  I truncate() const { return {static_cast<std::uint32_t>(static_cast<std::int32_t>(x))}; }
  static I::Mask less(ScalarF32 a, ScalarF32 b) { return a.x < b.x; }
  // Rounded to bf16 and wide again.
  I high() const { return {static_cast<std::uint32_t>(narrow(x, Bf16{}).bits) << 16}; }

  static ScalarF32 fill(float value) { return {value}; }
  static ScalarF32 load(const float* p) { return {*p}; }
  static ScalarF32 load(const Bf16* p) { return {widen(*p)}; }
  static ScalarF32 load(const F16* p) { return {widen(*p)}; }
  void store(float* p) const { *p = x; }
  void store(Bf16* p) const { *p = narrow(x, Bf16{}); }
  void store(F16* p) const { *p = narrow(x, F16{}); }
  template <bool kStream, class P>
  static void store_pair(P* p, ScalarF32 a, ScalarF32 b) {
    a.store(p);
    b.store(p + 1);
  }
  static void fence() {}

  friend ScalarF32 operator+(ScalarF32 a, ScalarF32 b) { return {a.x + b.x}; }
  friend ScalarF32 operator-(ScalarF32 a, ScalarF32 b) { return {a.x - b.x}; }
  friend ScalarF32 operator*(ScalarF32 a, ScalarF32 b) { return {a.x * b.x}; }
  friend ScalarF32 operator/(ScalarF32 a, ScalarF32 b) { return {a.x / b.x}; }
  // a * b + c, rounded once.
  static ScalarF32 fma(ScalarF32 a, ScalarF32 b, ScalarF32 c) {
    return {__builtin_fmaf(a.x, b.x, c.x)};
  }
  static ScalarF32 sqrt(ScalarF32 a) { return {__builtin_sqrtf(a.x)}; }
  static ScalarF32 max(ScalarF32 a, ScalarF32 b) { return a.x > b.x || a.x != a.x ? a : b; }
  static ScalarF32 choose(bool first, ScalarF32 a, ScalarF32 b) { return first ? a : b; }

  struct Squares {
    double lane[16] = {};

    template <class G>
    void add(const G* p) {
      for (int k = 0; k < 16; ++k) {
        const double wide = load(p + k).x;
        lane[k] += wide * wide;
      }
    }
    void store(double* out) const {
      for (int k = 0; k < 16; ++k) out[k] = lane[k];
    }
  };
};

}  // namespace
}  // namespace stow
