// [Note: The Adam rule] over arrays whose moments are bytes. The scheme is FlashOptim's
// (Databricks, arXiv 2602.23349); differences are described below.
//
// [Note: Byte moments] A group is kGroup elements, aligned in the parameter. Each group keeps two
// scales in bf16: the largest magnitude of its first moments, and the largest root of its second
// moments, both rounded up. (FlashOptim's scales are fp16, whose least number, 6e-8, is more than
// many gradients; bf16 reaches as far as fp32.) With a group's scale s:
//
// clang-format off
//   m = s * n / (254 - |n|)     n in [-127, 127]; |n| = 254 |m| / (s + |m|), which is softsign
//   v = (n * (s / 255))^2       n in [0, 255]; n = 255 sqrt(v) / s
// clang-format on
//
// n is rounded up or down by chance, with the probability that makes the decoded moment's mean the
// moment (FlashOptim rounds to nearest; then v with beta2 = 0.999 would not decay). A v that is not
// zero keeps an n of at least 1, so that no update is divided by eps alone. Where a moment of a
// group is not finite, its scale is NaN, and so is all that is decoded.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/adam_rule.h"
#include "kernels/moments.h"
#include "kernels/padding.h"
#include "kernels/random_bits.h"
#include "kernels/weights.h"

namespace stow {
namespace {

// The largest scales, bf16 bits: of roots, that whose square is still finite.
constexpr std::uint32_t kMostOfM = 0x7f7f;
constexpr std::uint32_t kMostOfRoots = 0x5f7f;

// bf16 bits of the least scale that is not below the magnitude with bits `top`, or of the largest.
inline std::uint16_t scale_above(std::uint32_t top, std::uint32_t most) {
  if (top >= 0x7f800000u) return 0x7fc0u;
  const std::uint32_t up = (top + 0xffffu) >> 16;
  return static_cast<std::uint16_t>(up < most ? up : most);
}

inline float widen_scale(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

template <class V, class Weight, class G, bool kL2>
class GroupLoop {
 public:
  explicit GroupLoop(const AdamArgs& args)
      : rule_(args.hyper),
        weight_(args),
        grad_(static_cast<const G*>(args.grad)),
        m_(stream_at<std::int8_t>(args, Stream::m)),
        v_(stream_at<std::uint8_t>(args, Stream::v)),
        m_scale_(stream_at<std::uint16_t>(args, Stream::m_scale)),
        v_scale_(stream_at<std::uint16_t>(args, Stream::v_scale)),
        random_bits_(args.key),
        args_(args) {}

  void run() const {
    std::int64_t i = 0;
    for (; i + kGroup <= args_.n; i += kGroup) group(i);
    if (i == args_.n) return;
    const Padding<kGroup> padding(args_, i, args_.n - i);
    GroupLoop(padding.args()).group(0);
    padding.copy_back();
  }

 private:
  using I = typename V::I;
  static constexpr int kVectors = kGroup / V::kLanes;

  struct Moments {
    V m[kVectors];
    V root[kVectors];  // of v
  };

  void group(std::int64_t i) const {
    Moments moments;
    update(i, moments);
    const std::int64_t at = i / kGroup;
    const std::uint16_t m_scale = scale_above(top(moments.m), kMostOfM);
    const std::uint16_t v_scale = scale_above(top(moments.root), kMostOfRoots);
    m_scale_[at] = m_scale;
    v_scale_[at] = v_scale;
    I chance[kVectors];
    for (int k = 0; k < kVectors; ++k) chance[k] = random_bits_.at(args_.first + i + k * V::kLanes);
    encode_m(m_ + i, moments.m, m_scale, chance);
    encode_v(v_ + i, moments.root, v_scale, chance);
  }

  void update(std::int64_t i, Moments& moments) const {
    const V m_scale = V::fill(widen_scale(m_scale_[i / kGroup]));
    const V v_step = V::fill(widen_scale(v_scale_[i / kGroup]) * (1.0f / 255.0f));
    V w[kVectors], step[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      const std::int64_t at = i + k * V::kLanes;
      w[k] = weight_.load(at, I::fill(0));
      const V g = rule_.scaled_grad(V::load(grad_ + at), w[k]);
      const V root = V::from(I::load(v_ + at)) * v_step;
      moments.m[k] = rule_.first_moment(g, decoded_m(I::load(m_ + at), m_scale));
      moments.root[k] = V::sqrt(rule_.second_moment(g, root * root));
      w[k] = w[k] * rule_.decay;
      step[k] = rule_.step_size * moments.m[k];
    }
    for (int k = 0; k < kVectors; ++k) {
      w[k] = w[k] - step[k] / rule_.denominator(moments.root[k]);
      weight_.save(i + k * V::kLanes, w[k]);
      weight_.store_weight(i + k * V::kLanes, w[k]);
    }
  }

  static V magnitude(V x) { return V::of(x.bits() & I::fill(kMagnitude)); }
  static V decoded_m(I n, V scale) {
    const V x = V::from(n);
    return x / (V::fill(254.0f) - magnitude(x)) * scale;
  }

  // The largest magnitude's bits: as integers, infinities and NaN are above all numbers.
  static std::uint32_t top(const V* x) {
    I most = I::fill(0);
    for (int k = 0; k < kVectors; ++k) most = I::max(most, x[k].bits() & I::fill(kMagnitude));
    return most.most();
  }

  // Between 0 and 1, both excluded.
  static V uniform(I chance) { return (V::from(chance) + V::fill(0.5f)) * V::fill(0x1p-16f); }

  void encode_m(std::int8_t* out, const V* m, std::uint16_t scale, const I* chance) const {
    if (scale > kMostOfM) return static_cast<void>(std::memset(out, 0, kGroup));
    const V half = V::fill(0.5f);  // of everything: s + |m| may be more than fp32 holds
    const V half_scale = V::fill(0.5f * widen_scale(scale));
    for (int k = 0; k < kVectors; ++k) {
      const V part = half * magnitude(m[k]);
      const V whole = V::max(part + half_scale, V::fill(0x1p-149f));  // all zero: 0 / it
      const V t = part / whole * V::fill(254.0f);
      const I low = t.truncate();
      const V n = V::from(low);
      const V u = uniform(chance[k] & I::fill(0xffffu));
      const auto up = V::less(u * (V::fill(254.0f) - t), (t - n) * (V::fill(253.0f) - n));
      const I rounded = I::min(low + I::choose(up, I::fill(1), I::fill(0)), I::fill(127));
      const I sign = m[k].bits().template sar<31>();
      ((rounded ^ sign) - sign).store(out + k * V::kLanes);
    }
  }

  void encode_v(std::uint8_t* out, const V* root, std::uint16_t scale, const I* chance) const {
    if (scale > kMostOfRoots) return static_cast<void>(std::memset(out, 0, kGroup));
    const float wide = widen_scale(scale);
    const V per_scale = V::fill(255.0f / (wide > 0x1p-100f ? wide : 0x1p-100f));
    for (int k = 0; k < kVectors; ++k) {
      const V t = root[k] * per_scale;
      const I low = t.truncate();
      const V n = V::from(low);
      const V u = uniform(chance[k].template shr<16>());
      const auto up = V::less(u * (n + n + V::fill(1.0f)), (t - n) * (t + n));
      const I rounded = I::min(low + I::choose(up, I::fill(1), I::fill(0)), I::fill(255));
      const I least = I::min(root[k].bits(), I::fill(1));
      I::max(rounded, least).store(out + k * V::kLanes);
    }
  }

  AdamRule<V, kL2> rule_;
  Weight weight_;
  const G* grad_;
  std::int8_t* m_;
  std::uint8_t* v_;
  std::uint16_t* m_scale_;
  std::uint16_t* v_scale_;
  RandomBits<V> random_bits_;
  const AdamArgs& args_;
};

}  // namespace
}  // namespace stow
