// [Note: The Adam rule] over a vector type `V` (simd_*.h). Everything here has internal linkage:
// each instruction set compiles a copy of its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/kernel_table.h"

namespace stow {
namespace {

constexpr std::int64_t kLine = 64;

// The scalars, one per lane.
template <class V, bool kL2>
struct AdamRule {
  explicit AdamRule(const AdamHyper& h)
      : near_grad(h.beta1_weight >= 0.5f),
        pull(V::fill(near_grad ? h.beta1_weight - 1.0f : h.beta1_weight)),
        beta2(V::fill(h.beta2)),
        beta2_weight(V::fill(h.beta2_weight)),
        decay(V::fill(h.decay)),
        l2(V::fill(h.l2)),
        step_size(V::fill(h.step_size)),
        denom_scale(V::fill(h.denom_scale)),
        eps(V::fill(h.eps)),
        grad_factor(V::fill(h.grad_factor)) {}

  V scaled_grad(V g, V w) const {
    g = grad_factor * g;
    if constexpr (kL2) g = g + l2 * w;
    return g;
  }
  // One multiply by a signed weight serves both forms of the rule, for negation is exact.
  V first_moment(V g, V m) const { return V::choose(near_grad, g, m) + pull * (g - m); }
  V second_moment(V g, V v) const { return v * beta2 + (beta2_weight * g) * g; }
  V denominator(V u) const { return V::sqrt(u) * denom_scale + eps; }

  bool near_grad;
  V pull, beta2, beta2_weight, decay, l2, step_size, denom_scale, eps, grad_factor;
};

template <class P, class G>
struct AdamArrays {
  P* param;
  const G* grad;
  float* master;  // the parameter itself where that is fp32
  float* m;
  float* v;
  float* vmax;
};

template <class P, class G>
AdamArrays<P, G> arrays_of(const AdamArgs& args) {
  auto* param = static_cast<P*>(args.param);
  const auto* grad = static_cast<const G*>(args.grad);
  if constexpr (std::is_same_v<P, float>) {
    return {param, grad, param, args.m, args.v, args.vmax};
  } else {
    return {param, grad, args.master, args.m, args.v, args.vmax};
  }
}

template <class V, class P, class G, bool kAmsgrad, bool kL2>
class AdamLoop {
 public:
  explicit AdamLoop(const AdamArgs& args)
      : rule_(args.hyper), at_(arrays_of<P, G>(args)), n_(args.n) {}

  void run() const {
    std::int64_t i = 0;
    if (kHalf && V::kStreams && (reinterpret_cast<std::uintptr_t>(at_.param) & 1) == 0) {
      i = elements_to_line();
      partial(0, i);
      for (; i + 4 * V::kLanes <= n_; i += 4 * V::kLanes) four<true>(i);
      V::fence();
    } else {
      for (; i + 4 * V::kLanes <= n_; i += 4 * V::kLanes) four<false>(i);
    }
    partial(i, n_);
  }

 private:
  static constexpr bool kHalf = !std::is_same_v<P, float>;
  using Arrays = AdamArrays<P, G>;

  struct Pending {
    V decayed, step, u;
  };

  // Both moments; what is left is one division per element.
  Pending moments(const Arrays& at, std::int64_t i) const {
    const V w = V::load(at.master + i);
    const V g = rule_.scaled_grad(V::load(at.grad + i), w);
    const V m = rule_.first_moment(g, V::load(at.m + i));
    const V v = rule_.second_moment(g, V::load(at.v + i));
    m.store(at.m + i);
    v.store(at.v + i);
    V u = v;
    if constexpr (kAmsgrad) {
      u = V::max(V::load(at.vmax + i), v);
      u.store(at.vmax + i);
    }
    return {w * rule_.decay, rule_.step_size * m, u};
  }

  // Phase by phase, so that four square roots and four divisions are in flight; and four vectors of
  // a 16-bit parameter are one or two whole lines. Where there is a master the parameter is only
  // written, so streaming it spares the read of its lines.
  template <bool kStream>
  void four(std::int64_t i) const {
    Pending pending[4];
    for (int k = 0; k < 4; ++k) pending[k] = moments(at_, i + k * V::kLanes);
    V w[4];
    for (int k = 0; k < 4; ++k) w[k] = rule_.denominator(pending[k].u);
    for (int k = 0; k < 4; ++k) w[k] = pending[k].decayed - pending[k].step / w[k];
    for (int k = 0; k < 4; ++k) w[k].store(at_.master + i + k * V::kLanes);
    if constexpr (kHalf) {
      for (int k = 0; k < 4; k += 2) {
        V::template store_pair<kStream>(at_.param + i + k * V::kLanes, w[k], w[k + 1]);
      }
    }
  }

  void single(const Arrays& at, std::int64_t i) const {
    const Pending pending = moments(at, i);
    const V w = pending.decayed - pending.step / rule_.denominator(pending.u);
    w.store(at.master + i);
    if constexpr (kHalf) w.store(at.param + i);
  }

  std::int64_t elements_to_line() const {
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at_.param));
    const std::int64_t count = (-address & (kLine - 1)) / static_cast<std::int64_t>(sizeof(P));
    return count < n_ ? count : n_;
  }

  // [begin, end) by whole vectors, the rest of a vector on padded copies: every element goes
  // through the same instructions wherever a range is cut.
  void partial(std::int64_t begin, std::int64_t end) const {
    for (; begin + V::kLanes <= end; begin += V::kLanes) single(at_, begin);
    if (begin == end) return;
    P param[V::kLanes] = {};
    G grad[V::kLanes] = {};
    float state[4][V::kLanes] = {};
    float* master = state[0];
    if constexpr (!kHalf) master = param;
    const std::int64_t count = end - begin;
    for (std::int64_t k = 0; k < count; ++k) {
      grad[k] = at_.grad[begin + k];
      master[k] = at_.master[begin + k];
      state[1][k] = at_.m[begin + k];
      state[2][k] = at_.v[begin + k];
      if constexpr (kAmsgrad) state[3][k] = at_.vmax[begin + k];
    }
    single({param, grad, master, state[1], state[2], state[3]}, 0);
    for (std::int64_t k = 0; k < count; ++k) {
      at_.param[begin + k] = param[k];
      at_.master[begin + k] = master[k];
      at_.m[begin + k] = state[1][k];
      at_.v[begin + k] = state[2][k];
      if constexpr (kAmsgrad) at_.vmax[begin + k] = state[3][k];
    }
  }

  AdamRule<V, kL2> rule_;
  Arrays at_;
  std::int64_t n_;
};

// A pass of its own: it happens once in a run, and the update's loop stays free of it. A master
// that rounds to the parameter's bits has more of the truth than the parameter and is kept.
template <class V, class P>
void seed_master(const P* param, float* master, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += V::kLanes) {
    const std::int64_t count = n - i < V::kLanes ? n - i : V::kLanes;
    P given[V::kLanes] = {};
    P rounded[V::kLanes];
    float kept[V::kLanes] = {};
    float wide[V::kLanes];
    for (std::int64_t k = 0; k < count; ++k) given[k] = param[i + k];
    for (std::int64_t k = 0; k < count; ++k) kept[k] = master[i + k];
    V::load(kept).store(rounded);
    V::load(given).store(wide);
    for (std::int64_t k = 0; k < count; ++k) {
      if (std::memcmp(&rounded[k], &given[k], sizeof(P)) != 0) master[i + k] = wide[k];
    }
  }
}

template <class V, class P, class G>
void adam_of_types(const AdamArgs& args) {
  if constexpr (!std::is_same_v<P, float>) {
    if (args.seed_master) seed_master<V>(static_cast<const P*>(args.param), args.master, args.n);
  }
  const bool amsgrad = args.vmax != nullptr;
  const bool l2 = args.hyper.l2 != 0.0f;
  if (amsgrad && l2) {
    AdamLoop<V, P, G, true, true>(args).run();
  } else if (amsgrad) {
    AdamLoop<V, P, G, true, false>(args).run();
  } else if (l2) {
    AdamLoop<V, P, G, false, true>(args).run();
  } else {
    AdamLoop<V, P, G, false, false>(args).run();
  }
}

template <class V, class P>
void adam_of_param(const AdamArgs& args) {
  switch (args.grad_dtype) {
    case DType::f32:
      return adam_of_types<V, P, float>(args);
    case DType::bf16:
      return adam_of_types<V, P, Bf16>(args);
    case DType::f16:
      return adam_of_types<V, P, F16>(args);
  }
}

template <class V>
void adam_of(const AdamArgs& args) {
  switch (args.param_dtype) {
    case DType::f32:
      return adam_of_param<V, float>(args);
    case DType::bf16:
      return adam_of_param<V, Bf16>(args);
    case DType::f16:
      return adam_of_param<V, F16>(args);
  }
}

}  // namespace
}  // namespace stow
