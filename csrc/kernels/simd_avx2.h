// Eight lanes of AVX2 and F16C. No FMA: see [Note: The Adam rule].
#pragma once

#include <immintrin.h>

#include "kernels/kernel_table.h"

namespace stow {
namespace {

struct Avx2I32 {
  using Mask = __m256i;
  __m256i x;

  static Avx2I32 fill(std::uint32_t value) { return {_mm256_set1_epi32(static_cast<int>(value))}; }
  static Avx2I32 ramp() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
  static Avx2I32 load(const std::int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
  static Avx2I32 load(const std::uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
  static Avx2I32 load(const std::int16_t* p) {
    return {_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  // The low bits of each lane.
  void store(std::int16_t* p) const {
    const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(both));
  }
  void store(std::int8_t* p) const {
    const __m256i first = _mm256_set1_epi32(0x0c080400);
    const __m256i bytes = _mm256_shuffle_epi8(x, first);
    const __m128i both =
        _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), both);
  }
  void store(std::uint8_t* p) const { store(reinterpret_cast<std::int8_t*>(p)); }

  friend Avx2I32 operator+(Avx2I32 a, Avx2I32 b) { return {_mm256_add_epi32(a.x, b.x)}; }
  friend Avx2I32 operator-(Avx2I32 a, Avx2I32 b) { return {_mm256_sub_epi32(a.x, b.x)}; }
  friend Avx2I32 operator*(Avx2I32 a, Avx2I32 b) { return {_mm256_mullo_epi32(a.x, b.x)}; }
  friend Avx2I32 operator&(Avx2I32 a, Avx2I32 b) { return {_mm256_and_si256(a.x, b.x)}; }
  friend Avx2I32 operator|(Avx2I32 a, Avx2I32 b) { return {_mm256_or_si256(a.x, b.x)}; }
  friend Avx2I32 operator^(Avx2I32 a, Avx2I32 b) { return {_mm256_xor_si256(a.x, b.x)}; }
  template <int kBits>
  Avx2I32 shl() const {
    return {_mm256_slli_epi32(x, kBits)};
  }
  template <int kBits>
  Avx2I32 shr() const {
    return {_mm256_srli_epi32(x, kBits)};
  }
  template <int kBits>
  Avx2I32 sar() const {
    return {_mm256_srai_epi32(x, kBits)};
  }
  static Mask above(Avx2I32 a, Avx2I32 b) { return _mm256_cmpgt_epi32(a.x, b.x); }  // signed
  static Mask equal(Avx2I32 a, Avx2I32 b) { return _mm256_cmpeq_epi32(a.x, b.x); }
  static Avx2I32 min(Avx2I32 a, Avx2I32 b) { return {_mm256_min_epi32(a.x, b.x)}; }
  static Avx2I32 max(Avx2I32 a, Avx2I32 b) { return {_mm256_max_epi32(a.x, b.x)}; }
  std::uint32_t most() const {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
  }
  static Avx2I32 choose(Mask first, Avx2I32 a, Avx2I32 b) {
    return {_mm256_blendv_epi8(b.x, a.x, first)};
  }
};

struct Avx2F32 {
  using I = Avx2I32;
  static constexpr int kLanes = 8;
  static constexpr bool kStreams = true;
  __m256 x;

  static Avx2F32 of(I bits) { return {_mm256_castsi256_ps(bits.x)}; }
  I bits() const { return {_mm256_castps_si256(x)}; }
  static Avx2F32 from(I n) { return {_mm256_cvtepi32_ps(n.x)}; }
  I truncate() const { return {_mm256_cvttps_epi32(x)}; }
  static I::Mask less(Avx2F32 a, Avx2F32 b) {
    return _mm256_castps_si256(_mm256_cmp_ps(a.x, b.x, _CMP_LT_OQ));
  }
  // Rounded to bf16 and wide again.
  I high() const { return {_mm256_and_si256(rounded(), _mm256_set1_epi32(-0x10000))}; }

  static Avx2F32 fill(float value) { return {_mm256_set1_ps(value)}; }
  static Avx2F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Avx2F32 load(const Bf16* p) {
    const __m256i bits =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))};
  }
  static Avx2F32 load(const F16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }

  // The bf16 bits in the high half of each lane, by integers: the bf16 instruction of newer CPUs
  // flushes denormals.
  __m256i rounded() const {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_add_epi32(bits, half), quiet, nan);
  }
  static __m256i narrow(Avx2F32 a, Avx2F32 b, Bf16) {
    const __m256i low = _mm256_srli_epi32(a.rounded(), 16);
    const __m256i high = _mm256_srli_epi32(b.rounded(), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), _MM_SHUFFLE(3, 1, 2, 0));
  }
  static __m256i narrow(Avx2F32 a, Avx2F32 b, F16) {
    return _mm256_set_m128i(_mm256_cvtps_ph(b.x, _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT));
  }

  void store(float* p) const { _mm256_storeu_ps(p, x); }
  template <class P>
  void store(P* p) const {
    const __m128i low = _mm256_castsi256_si128(narrow(*this, *this, P{}));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), low);
  }
  // Half a line; where it streams past the caches, p is aligned to it.
  template <bool kStream, class P>
  static void store_pair(P* p, Avx2F32 a, Avx2F32 b) {
    auto* to = reinterpret_cast<__m256i*>(p);
    if constexpr (kStream) {
      _mm256_stream_si256(to, narrow(a, b, P{}));
    } else {
      _mm256_storeu_si256(to, narrow(a, b, P{}));
    }
  }
  static void fence() { _mm_sfence(); }

  friend Avx2F32 operator+(Avx2F32 a, Avx2F32 b) { return {_mm256_add_ps(a.x, b.x)}; }
  friend Avx2F32 operator-(Avx2F32 a, Avx2F32 b) { return {_mm256_sub_ps(a.x, b.x)}; }
  friend Avx2F32 operator*(Avx2F32 a, Avx2F32 b) { return {_mm256_mul_ps(a.x, b.x)}; }
  friend Avx2F32 operator/(Avx2F32 a, Avx2F32 b) { return {_mm256_div_ps(a.x, b.x)}; }
  // a * b + c, rounded once.
  static Avx2F32 fma(Avx2F32 a, Avx2F32 b, Avx2F32 c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
  static Avx2F32 sqrt(Avx2F32 a) { return {_mm256_sqrt_ps(a.x)}; }
  // The instruction returns b where either is NaN.
  static Avx2F32 max(Avx2F32 a, Avx2F32 b) {
    const __m256 nan = _mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q);
    return {_mm256_blendv_ps(_mm256_max_ps(a.x, b.x), a.x, nan)};
  }
  static Avx2F32 choose(bool first, Avx2F32 a, Avx2F32 b) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(first ? -1 : 0));
    return {_mm256_blendv_ps(b.x, a.x, mask)};
  }

  class Squares {
   public:
    template <class G>
    void add(const G* p) {
      const __m256 low = load(p).x;
      const __m256 high = load(p + 8).x;
      add_four(0, _mm256_castps256_ps128(low));
      add_four(1, _mm256_extractf128_ps(low, 1));
      add_four(2, _mm256_castps256_ps128(high));
      add_four(3, _mm256_extractf128_ps(high, 1));
    }
    void store(double* out) const {
      for (int k = 0; k < 4; ++k) _mm256_storeu_pd(out + 4 * k, sum_[k]);
    }

   private:
    void add_four(int k, __m128 narrow) {
      const __m256d wide = _mm256_cvtps_pd(narrow);
      sum_[k] = _mm256_add_pd(sum_[k], _mm256_mul_pd(wide, wide));
    }
    __m256d sum_[4] = {};
  };
};

}  // namespace
}  // namespace stow
