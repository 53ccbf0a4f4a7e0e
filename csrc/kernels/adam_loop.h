// [Note: The Adam rule] over arrays, for formats whose elements are independent of each other.
#pragma once

#include <cstdint>

#include "kernels/adam_rule.h"
#include "kernels/moments.h"
#include "kernels/padding.h"
#include "kernels/weights.h"

namespace stow {
namespace {

constexpr std::int64_t kLine = 64;

template <class V, class Weight, class Moments, class G, bool kAmsgrad, bool kL2>
class AdamLoop {
 public:
  explicit AdamLoop(const AdamArgs& args)
      : rule_(args.hyper),
        weight_(args),
        moments_(args),
        grad_(static_cast<const G*>(args.grad)),
        vmax_(stream_at<float>(args, Stream::vmax)),
        args_(args) {}

  void run() const {
    const std::int64_t n = args_.n;
    std::int64_t i = 0;
    if (Weight::kStreams && (reinterpret_cast<std::uintptr_t>(args_.param) & 1) == 0) {
      i = elements_to_line();
      partial(0, i);
      for (; i + 4 * V::kLanes <= n; i += 4 * V::kLanes) four<true>(i);
      V::fence();
    } else {
      for (; i + 4 * V::kLanes <= n; i += 4 * V::kLanes) four<false>(i);
    }
    partial(i, n);
  }

 private:
  using I = typename V::I;

  struct Pending {
    V decayed, step, u;
    I v;  // as it will be kept, but for its sign
  };

  // Both moments; what is left is one division per element.
  Pending moments(std::int64_t i) const {
    const I kept = moments_.kept_v(i);
    const V w = weight_.load(i, kept);
    const V g = rule_.scaled_grad(V::load(grad_ + i), w);
    const V m = rule_.first_moment(g, moments_.m(i));
    const V v = rule_.second_moment(g, moments_.v(kept));
    const I rounded = moments_.round(i, m, v);
    if constexpr (!Weight::kTies) moments_.save_v(i, rounded);
    V u = v;
    if constexpr (kAmsgrad) {
      u = V::max(V::load(vmax_ + i), v);
      u.store(vmax_ + i);
    }
    return {w * rule_.decay, rule_.step_size * m, u, rounded};
  }

  void save(std::int64_t i, V w, I v) const {
    const I signs = weight_.save(i, w);
    if constexpr (Weight::kTies) moments_.save_v(i, v | signs);
  }

  // Phase by phase, so that four square roots and four divisions are in flight; and four vectors of
  // a 16-bit parameter are one or two whole lines.
  template <bool kStream>
  void four(std::int64_t i) const {
    Pending pending[4];
    for (int k = 0; k < 4; ++k) pending[k] = moments(i + k * V::kLanes);
    V w[4];
    for (int k = 0; k < 4; ++k) w[k] = rule_.denominator(V::sqrt(pending[k].u));
    for (int k = 0; k < 4; ++k) w[k] = pending[k].decayed - pending[k].step / w[k];
    for (int k = 0; k < 4; ++k) save(i + k * V::kLanes, w[k], pending[k].v);
    for (int k = 0; k < 4; k += 2) {
      weight_.template store_weight_pair<kStream>(i + k * V::kLanes, w[k], w[k + 1]);
    }
  }

  void single(std::int64_t i) const {
    const Pending pending = moments(i);
    const V w = pending.decayed - pending.step / rule_.denominator(V::sqrt(pending.u));
    save(i, w, pending.v);
    weight_.store_weight(i, w);
  }

  std::int64_t elements_to_line() const {
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(args_.param));
    const auto size = static_cast<std::int64_t>(sizeof(typename Weight::Param));
    const std::int64_t count = (-address & (kLine - 1)) / size;
    return count < args_.n ? count : args_.n;
  }

  void partial(std::int64_t begin, std::int64_t end) const {
    for (; begin + V::kLanes <= end; begin += V::kLanes) single(begin);
    if (begin == end) return;
    const Padding<V::kLanes> padding(args_, begin, end - begin);
    AdamLoop(padding.args()).single(0);
    padding.copy_back();
  }

  AdamRule<V, kL2> rule_;
  Weight weight_;
  Moments moments_;
  const G* grad_;
  float* vmax_;
  const AdamArgs& args_;
};

}  // namespace
}  // namespace stow
