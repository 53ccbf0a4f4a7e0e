// Where the moments of an element come from and go to, over a vector type `V`:
//   kept_v    the second moments as they were kept: their signs may be taken ([Note: Split
//   masters]) v         from those, the value round     what to keep; the first moments are saved
//   at once save_v    the second moments, with their signs
#pragma once

#include <cstdint>

#include "kernels/random_bits.h"
#include "kernels/weights.h"

namespace stow {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffffu;

template <class V, bool kTies>
class WideMoments {
 public:
  using I = typename V::I;

  explicit WideMoments(const AdamArgs& args)
      : m_(stream_at<float>(args, Stream::m)), v_(stream_at<float>(args, Stream::v)) {}

  V m(std::int64_t i) const { return V::load(m_ + i); }
  I kept_v(std::int64_t i) const { return V::load(v_ + i).bits(); }
  V v(I kept) const { return V::of(unsigned_v(kept)); }
  I round(std::int64_t i, V m, V v) const {
    m.store(m_ + i);
    return unsigned_v(v.bits());
  }
  void save_v(std::int64_t i, I kept) const { V::of(kept).store(v_ + i); }

 private:
  // NaN may come out of an operation with its sign set.
  static I unsigned_v(I bits) {
    if constexpr (kTies) return bits & I::fill(kMagnitude);
    return bits;
  }

  float* m_;
  float* v_;
};

// [Note: Stochastic rounding] To bf16, up or down by chance, so that the mean is the value: rounded
// to nearest, a second moment with beta2 = 0.999 would not move, for a step changes it by less than
// half a place. 16 random bits are added below the last place, and what is below it is dropped.
// From the last finite value on, where that could make an infinity, the nearest is taken, a tie
// upwards (which is to even there). The bits wanted are the high half.
template <class V>
typename V::I round_by_chance(typename V::I bits, typename V::I chance) {
  using I = typename V::I;
  const I magnitude = bits & I::fill(kMagnitude);
  const auto last = I::above(magnitude, I::fill(0x7f7effffu));
  const auto nan = I::above(magnitude, I::fill(0x7f800000u));
  const I rounded = bits + I::choose(last, I::fill(0x8000u), chance);
  return I::choose(nan, bits | I::fill(0x00400000u), rounded);
}

template <class V>
class HalfMoments {
 public:
  using I = typename V::I;

  explicit HalfMoments(const AdamArgs& args)
      : m_(stream_at<std::int16_t>(args, Stream::m)),
        v_(stream_at<std::int16_t>(args, Stream::v)),
        first_(args.first),
        random_bits_(args.key) {}

  V m(std::int64_t i) const { return V::of(I::load(m_ + i).template shl<16>()); }
  I kept_v(std::int64_t i) const { return I::load(v_ + i).template shl<16>(); }
  V v(I kept) const { return V::of(kept & I::fill(kMagnitude)); }
  I round(std::int64_t i, V m, V v) const {
    const I chance = random_bits_.at(first_ + i);
    const I kept_m = round_by_chance<V>(m.bits(), chance & I::fill(0xffffu));
    kept_m.template shr<16>().store(m_ + i);
    return round_by_chance<V>(v.bits() & I::fill(kMagnitude), chance.template shr<16>());
  }
  void save_v(std::int64_t i, I kept) const { kept.template shr<16>().store(v_ + i); }

 private:
  std::int16_t* m_;
  std::int16_t* v_;
  std::int64_t first_;
  RandomBits<V> random_bits_;
};

}  // namespace
}  // namespace stow
