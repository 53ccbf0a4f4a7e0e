// Sixteen lanes of AVX-512. No FMA: see [Note: The Adam rule].
#pragma once

// GCC's own header warns about itself (PR 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include "kernels/kernel_table.h"

namespace stow {
namespace {

struct Avx512I32 {
  using Mask = __mmask16;
  __m512i x;

  static Avx512I32 fill(std::uint32_t value) {
    return {_mm512_set1_epi32(static_cast<int>(value))};
  }
  static Avx512I32 ramp() {
    return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
  }
  static Avx512I32 load(const std::int8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Avx512I32 load(const std::uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Avx512I32 load(const std::int16_t* p) {
    return {_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  // The low bits of each lane.
  void store(std::int16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  void store(std::int8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  void store(std::uint8_t* p) const { store(reinterpret_cast<std::int8_t*>(p)); }

  friend Avx512I32 operator+(Avx512I32 a, Avx512I32 b) { return {_mm512_add_epi32(a.x, b.x)}; }
  friend Avx512I32 operator-(Avx512I32 a, Avx512I32 b) { return {_mm512_sub_epi32(a.x, b.x)}; }
  friend Avx512I32 operator*(Avx512I32 a, Avx512I32 b) { return {_mm512_mullo_epi32(a.x, b.x)}; }
  friend Avx512I32 operator&(Avx512I32 a, Avx512I32 b) { return {_mm512_and_si512(a.x, b.x)}; }
  friend Avx512I32 operator|(Avx512I32 a, Avx512I32 b) { return {_mm512_or_si512(a.x, b.x)}; }
  friend Avx512I32 operator^(Avx512I32 a, Avx512I32 b) { return {_mm512_xor_si512(a.x, b.x)}; }
  template <int kBits>
  Avx512I32 shl() const {
    return {_mm512_slli_epi32(x, kBits)};
  }
  template <int kBits>
  Avx512I32 shr() const {
    return {_mm512_srli_epi32(x, kBits)};
  }
  template <int kBits>
  Avx512I32 sar() const {
    return {_mm512_srai_epi32(x, kBits)};
  }
  static Mask above(Avx512I32 a, Avx512I32 b) {  // as signed numbers
    return _mm512_cmpgt_epi32_mask(a.x, b.x);
  }
  static Mask equal(Avx512I32 a, Avx512I32 b) { return _mm512_cmpeq_epi32_mask(a.x, b.x); }
  static Avx512I32 min(Avx512I32 a, Avx512I32 b) { return {_mm512_min_epi32(a.x, b.x)}; }
  static Avx512I32 max(Avx512I32 a, Avx512I32 b) { return {_mm512_max_epi32(a.x, b.x)}; }
  std::uint32_t most() const { return static_cast<std::uint32_t>(_mm512_reduce_max_epi32(x)); }
  static Avx512I32 choose(Mask first, Avx512I32 a, Avx512I32 b) {
    return {_mm512_mask_mov_epi32(b.x, first, a.x)};
  }
};

struct Avx512F32 {
  using I = Avx512I32;
  static constexpr int kLanes = 16;
  static constexpr bool kStreams = true;
  __m512 x;

  static Avx512F32 of(I bits) { return {_mm512_castsi512_ps(bits.x)}; }
  I bits() const { return {_mm512_castps_si512(x)}; }
  static Avx512F32 from(I n) { return {_mm512_cvtepi32_ps(n.x)}; }
  I truncate() const { return {_mm512_cvttps_epi32(x)}; }
  static I::Mask less(Avx512F32 a, Avx512F32 b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_LT_OQ); }
  // Rounded to bf16 and wide again.
  I high() const { return {_mm512_and_si512(rounded(), _mm512_set1_epi32(-0x10000))}; }

  static Avx512F32 fill(float value) { return {_mm512_set1_ps(value)}; }
  static Avx512F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Avx512F32 load(const Bf16* p) {
    const __m512i bits = _mm512_cvtepu16_epi32(load_half(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))};
  }
  static Avx512F32 load(const F16* p) { return {_mm512_cvtph_ps(load_half(p))}; }

  // The bf16 bits in the high half of each lane, by integers: the bf16 instruction of newer CPUs
  // flushes denormals.
  __m512i rounded() const {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_set1_epi32(0x00400000);
    return _mm512_mask_or_epi32(_mm512_add_epi32(bits, half), nan, bits, quiet);
  }
  __m256i narrow(Bf16) const { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(), 16)); }
  __m256i narrow(F16) const { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

  // The odd 16-bit lanes of a, then those of b.
  static __m512i narrow(Avx512F32 a, Avx512F32 b, Bf16) {
    const __m512i ramp =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                         31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(a.rounded(), ramp, b.rounded());
  }
  static __m512i narrow(Avx512F32 a, Avx512F32 b, F16) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(a.narrow(F16{})), b.narrow(F16{}), 1);
  }

  void store(float* p) const { _mm512_storeu_ps(p, x); }
  template <class P>
  void store(P* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(P{}));
  }
  // A whole line; where it streams past the caches, p is aligned to it.
  template <bool kStream, class P>
  static void store_pair(P* p, Avx512F32 a, Avx512F32 b) {
    if constexpr (kStream) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow(a, b, P{}));
    } else {
      _mm512_storeu_si512(p, narrow(a, b, P{}));
    }
  }
  static void fence() { _mm_sfence(); }

  friend Avx512F32 operator+(Avx512F32 a, Avx512F32 b) { return {_mm512_add_ps(a.x, b.x)}; }
  friend Avx512F32 operator-(Avx512F32 a, Avx512F32 b) { return {_mm512_sub_ps(a.x, b.x)}; }
  friend Avx512F32 operator*(Avx512F32 a, Avx512F32 b) { return {_mm512_mul_ps(a.x, b.x)}; }
  friend Avx512F32 operator/(Avx512F32 a, Avx512F32 b) { return {_mm512_div_ps(a.x, b.x)}; }
  // a * b + c, rounded once.
  static Avx512F32 fma(Avx512F32 a, Avx512F32 b, Avx512F32 c) {
    return {_mm512_fmadd_ps(a.x, b.x, c.x)};
  }
  static Avx512F32 sqrt(Avx512F32 a) { return {_mm512_sqrt_ps(a.x)}; }
  // The instruction returns b where either is NaN.
  static Avx512F32 max(Avx512F32 a, Avx512F32 b) {
    const __mmask16 ordered = _mm512_cmp_ps_mask(a.x, a.x, _CMP_ORD_Q);
    return {_mm512_mask_max_ps(a.x, ordered, a.x, b.x)};
  }
  static Avx512F32 choose(bool first, Avx512F32 a, Avx512F32 b) {
    return {_mm512_mask_mov_ps(b.x, static_cast<__mmask16>(first ? 0xffff : 0), a.x)};
  }

  class Squares {
   public:
    template <class G>
    void add(const G* p) {
      const __m512 both = load(p).x;
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(both));
      const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(both, 1));
      low_ = _mm512_add_pd(low_, _mm512_mul_pd(low, low));
      high_ = _mm512_add_pd(high_, _mm512_mul_pd(high, high));
    }
    void store(double* out) const {
      _mm512_storeu_pd(out, low_);
      _mm512_storeu_pd(out + 8, high_);
    }

   private:
    __m512d low_ = _mm512_setzero_pd();
    __m512d high_ = _mm512_setzero_pd();
  };

 private:
  static __m256i load_half(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
};

}  // namespace
}  // namespace stow
