// Four lanes of NEON, as every aarch64 processor has them. No FMA: see [Note: The Adam rule].
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "kernels/kernel_table.h"

namespace stow {
namespace {

struct NeonI32 {
  using Mask = uint32x4_t;
  uint32x4_t x;

  static NeonI32 fill(std::uint32_t value) { return {vdupq_n_u32(value)}; }
  static NeonI32 ramp() {
    const std::uint32_t numbers[4] = {0, 1, 2, 3};
    return {vld1q_u32(numbers)};
  }
  static NeonI32 load(const std::int8_t* p) {
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(four_bytes(p)));
    return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(wide)))};
  }
  static NeonI32 load(const std::uint8_t* p) {
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(four_bytes(p)));
    return {vmovl_u16(vget_low_u16(wide))};
  }
  static NeonI32 load(const std::int16_t* p) {
    return {vreinterpretq_u32_s32(vmovl_s16(vld1_s16(p)))};
  }
  // The low bits of each lane.
  void store(std::int16_t* p) const { vst1_s16(p, vreinterpret_s16_u16(vmovn_u32(x))); }
  void store(std::uint8_t* p) const {
    const uint16x4_t halves = vmovn_u32(x);
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
    const std::uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    std::memcpy(p, &four, sizeof(four));
  }
  void store(std::int8_t* p) const { store(reinterpret_cast<std::uint8_t*>(p)); }

  friend NeonI32 operator+(NeonI32 a, NeonI32 b) { return {vaddq_u32(a.x, b.x)}; }
  friend NeonI32 operator-(NeonI32 a, NeonI32 b) { return {vsubq_u32(a.x, b.x)}; }
  friend NeonI32 operator*(NeonI32 a, NeonI32 b) { return {vmulq_u32(a.x, b.x)}; }
  friend NeonI32 operator&(NeonI32 a, NeonI32 b) { return {vandq_u32(a.x, b.x)}; }
  friend NeonI32 operator|(NeonI32 a, NeonI32 b) { return {vorrq_u32(a.x, b.x)}; }
  friend NeonI32 operator^(NeonI32 a, NeonI32 b) { return {veorq_u32(a.x, b.x)}; }
  template <int kBits>
  NeonI32 shl() const {
    return {vshlq_n_u32(x, kBits)};
  }
  template <int kBits>
  NeonI32 shr() const {
    return {vshrq_n_u32(x, kBits)};
  }
  template <int kBits>
  NeonI32 sar() const {
    return {vreinterpretq_u32_s32(vshrq_n_s32(as_signed(), kBits))};
  }
  static Mask above(NeonI32 a, NeonI32 b) { return vcgtq_s32(a.as_signed(), b.as_signed()); }
  static Mask equal(NeonI32 a, NeonI32 b) { return vceqq_u32(a.x, b.x); }
  static NeonI32 min(NeonI32 a, NeonI32 b) {
    return {vreinterpretq_u32_s32(vminq_s32(a.as_signed(), b.as_signed()))};
  }
  static NeonI32 max(NeonI32 a, NeonI32 b) {
    return {vreinterpretq_u32_s32(vmaxq_s32(a.as_signed(), b.as_signed()))};
  }
  std::uint32_t most() const { return static_cast<std::uint32_t>(vmaxvq_s32(as_signed())); }
  static NeonI32 choose(Mask first, NeonI32 a, NeonI32 b) { return {vbslq_u32(first, a.x, b.x)}; }

  int32x4_t as_signed() const { return vreinterpretq_s32_u32(x); }

 private:
  static uint32x2_t four_bytes(const void* p) {
    std::uint32_t four;
    std::memcpy(&four, p, sizeof(four));
    return vdup_n_u32(four);
  }
};

struct NeonF32 {
  using I = NeonI32;
  static constexpr int kLanes = 4;
  static constexpr bool kStreams = false;
  float32x4_t x;

  static NeonF32 of(I bits) { return {vreinterpretq_f32_u32(bits.x)}; }
  I bits() const { return {vreinterpretq_u32_f32(x)}; }
  static NeonF32 from(I n) { return {vcvtq_f32_s32(n.as_signed())}; }
  I truncate() const { return {vreinterpretq_u32_s32(vcvtq_s32_f32(x))}; }
  static I::Mask less(NeonF32 a, NeonF32 b) { return vcltq_f32(a.x, b.x); }
  // Rounded to bf16 and wide again.
  I high() const { return {vandq_u32(rounded(), vdupq_n_u32(0xffff0000u))}; }

  static NeonF32 fill(float value) { return {vdupq_n_f32(value)}; }
  static NeonF32 load(const float* p) { return {vld1q_f32(p)}; }
  static NeonF32 load(const Bf16* p) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16))};
  }
  static NeonF32 load(const F16* p) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))};
  }

  void store(float* p) const { vst1q_f32(p, x); }
  void store(Bf16* p) const { vst1_u16(&p->bits, vshrn_n_u32(rounded(), 16)); }
  void store(F16* p) const { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
  template <bool kStream, class P>
  static void store_pair(P* p, NeonF32 a, NeonF32 b) {
    a.store(p);
    b.store(p + kLanes);
  }
  static void fence() {}

  friend NeonF32 operator+(NeonF32 a, NeonF32 b) { return {vaddq_f32(a.x, b.x)}; }
  friend NeonF32 operator-(NeonF32 a, NeonF32 b) { return {vsubq_f32(a.x, b.x)}; }
  friend NeonF32 operator*(NeonF32 a, NeonF32 b) { return {vmulq_f32(a.x, b.x)}; }
  friend NeonF32 operator/(NeonF32 a, NeonF32 b) { return {vdivq_f32(a.x, b.x)}; }
  // a * b + c, rounded once.
  static NeonF32 fma(NeonF32 a, NeonF32 b, NeonF32 c) { return {vfmaq_f32(c.x, a.x, b.x)}; }
  static NeonF32 sqrt(NeonF32 a) { return {vsqrtq_f32(a.x)}; }
  // The instruction returns NaN where either is; here b does not decide.
  static NeonF32 max(NeonF32 a, NeonF32 b) {
    return {vbslq_f32(vorrq_u32(vcgtq_f32(a.x, b.x), a.is_nan()), a.x, b.x)};
  }
  static NeonF32 choose(bool first, NeonF32 a, NeonF32 b) { return first ? a : b; }

  class Squares {
   public:
    template <class G>
    void add(const G* p) {
      for (int k = 0; k < 4; ++k) {
        const float32x4_t four = load(p + kLanes * k).x;
        add_two(2 * k, vcvt_f64_f32(vget_low_f32(four)));
        add_two(2 * k + 1, vcvt_high_f64_f32(four));
      }
    }
    void store(double* out) const {
      for (int k = 0; k < 8; ++k) vst1q_f64(out + 2 * k, sum_[k]);
    }

   private:
    void add_two(int k, float64x2_t wide) { sum_[k] = vaddq_f64(sum_[k], vmulq_f64(wide, wide)); }
    float64x2_t sum_[8] = {};
  };

 private:
  uint32x4_t is_nan() const { return vmvnq_u32(vceqq_f32(x, x)); }
  // The bf16 bits in the high half of each lane.
  uint32x4_t rounded() const {
    const uint32x4_t all = bits().x;
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(all, 16), vdupq_n_u32(1));
    const uint32x4_t half = vaddq_u32(odd, vdupq_n_u32(0x7fff));
    const uint32x4_t quiet = vorrq_u32(all, vdupq_n_u32(0x00400000));
    return vbslq_u32(is_nan(), quiet, vaddq_u32(all, half));
  }
};

}  // namespace
}  // namespace stow
