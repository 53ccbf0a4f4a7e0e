// [Note: The Adam rule] over a vector type `V` (simd_*.h). Here and in the files that include this
// one everything has internal linkage: each instruction set compiles a copy of its own.
#pragma once

#include "kernels/kernel_table.h"

namespace stow {
namespace {

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
  V denominator(V root) const { return root * denom_scale + eps; }

  bool near_grad;
  V pull, beta2, beta2_weight, decay, l2, step_size, denom_scale, eps, grad_factor;
};

}  // namespace
}  // namespace stow
