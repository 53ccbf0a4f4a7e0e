// Where the fp32 weight of an element comes from and goes to, over a vector type `V`:
//   load          the weight; `ties` is the vector's second moments as they were kept
//   save          all but the 16-bit parameter; returns sign bits to keep with the second moments
//   store_weight  the 16-bit parameter
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/kernel_table.h"

namespace stow {
namespace {

template <class T>
T* stream_at(const AdamArgs& args, Stream stream) {
  return static_cast<T*>(args.states[static_cast<int>(stream)]);
}

// A fp32 master beside a 16-bit parameter, or a fp32 parameter, which is its own.
template <class V, class P>
class WideWeight {
 public:
  using Param = P;
  using I = typename V::I;
  static constexpr bool kHalf = !std::is_same_v<P, float>;
  static constexpr bool kTies = false;
  // The parameter is only written, so streaming it past the caches spares the read of its lines.
  static constexpr bool kStreams = kHalf && V::kStreams;

  explicit WideWeight(const AdamArgs& args) : param_(static_cast<P*>(args.param)) {
    if constexpr (kHalf) {
      master_ = stream_at<float>(args, Stream::master);
    } else {
      master_ = param_;
    }
  }

  V load(std::int64_t i, I /*ties*/) const { return V::load(master_ + i); }
  I save(std::int64_t i, V w) const {
    w.store(master_ + i);
    return I::fill(0);
  }
  void store_weight(std::int64_t i, V w) const {
    if constexpr (kHalf) w.store(param_ + i);
  }
  template <bool kStream>
  void store_weight_pair(std::int64_t i, V a, V b) const {
    if constexpr (kHalf) V::template store_pair<kStream>(param_ + i, a, b);
  }

 private:
  P* param_;
  float* master_;
};

// [Note: Split masters] A bf16 weight is its master rounded to nearest even, and `low` the master's
// low 16 bits. Below 0x8000 the master was rounded down, above it up, so its high half is the
// weight's bits, or those less one: together, the weight's bits with `low` added as a signed
// number. At 0x8000 exactly it was rounded to even, up or down, and one bit more must be kept:
// the sign of the second moment, which is never negative, is set where it was rounded up.
template <class V>
class SplitWeight {
 public:
  using Param = Bf16;
  using I = typename V::I;
  static constexpr bool kTies = true;
  static constexpr bool kStreams = false;  // the parameter's lines were just read

  explicit SplitWeight(const AdamArgs& args)
      : param_(static_cast<Bf16*>(args.param)),
        low_(stream_at<std::int16_t>(args, Stream::master)) {}

  V load(std::int64_t i, I ties) const {
    const I low = I::load(low_ + i);
    const I rounded_down = (ties ^ I::fill(~0u)).template shr<31>().template shl<16>();
    const I tied = I::choose(I::equal(low, I::fill(0xffff8000u)), rounded_down, I::fill(0));
    return V::of(V::load(param_ + i).bits() + low + tied);
  }
  I save(std::int64_t i, V w) const {
    w.bits().store(low_ + i);
    const I end = w.bits() & I::fill(0x1ffffu);
    return I::choose(I::equal(end, I::fill(0x18000u)), I::fill(0x80000000u), I::fill(0));
  }
  void store_weight(std::int64_t i, V w) const { w.store(param_ + i); }
  template <bool kStream>
  void store_weight_pair(std::int64_t i, V a, V b) const {
    V::template store_pair<false>(param_ + i, a, b);
  }

 private:
  Bf16* param_;
  std::int16_t* low_;
};

// [Note: 24-bit masters] The master rounded to nearest even after 8 more bits than the weight has;
// kept is their distance, a signed byte between -127 and 127. At 128 of either sign the master is
// half way to another weight and might be taken for that one's: it is kept one nearer, off by one
// in the last of 24 bits. The weight is the master's rounded before all that, the nearest there is.
template <class V>
class ByteWeight {
 public:
  using Param = Bf16;
  using I = typename V::I;

  explicit ByteWeight(const AdamArgs& args)
      : param_(static_cast<Bf16*>(args.param)),
        low_(stream_at<std::int8_t>(args, Stream::master)) {}

  V load(std::int64_t i, I /*ties*/) const {
    return V::of(V::load(param_ + i).bits() + I::load(low_ + i).template shl<8>());
  }
  I save(std::int64_t i, V w) const {
    const I distance = w.bits() - w.high();
    const I even = distance.template shr<8>() & I::fill(1);
    const I bytes = (distance + I::fill(0x7f) + even).template sar<8>();
    I::max(I::min(bytes, I::fill(0x7f)), I::fill(0u - 0x7fu)).store(low_ + i);
    return I::fill(0);
  }
  void store_weight(std::int64_t i, V w) const { w.store(param_ + i); }

 private:
  Bf16* param_;
  std::int8_t* low_;
};

}  // namespace
}  // namespace stow
