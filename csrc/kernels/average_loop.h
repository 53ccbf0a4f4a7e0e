// The average of weights in [Note: The Adam rule], in a pass of its own over a block whose new
// weights are still in the core's cache: a template parameter of the update would double its
// instances.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/kernel_table.h"

namespace stow {
namespace {

template <class V>
void average_of(float* average, const float* weight, std::int64_t n, float by) {
  if (by == 1.0f) {
    std::memcpy(average, weight, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  const bool near_weight = by >= 0.5f;
  const V pull = V::fill(near_weight ? by - 1.0f : by);
  const auto move = [&](float* a, const float* w) {
    const V from = V::load(a);
    const V to = V::load(w);
    V::fma(pull, to - from, V::choose(near_weight, to, from)).store(a);
  };
  std::int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) move(average + i, weight + i);
  if (i == n) return;
  float a[V::kLanes] = {};
  float w[V::kLanes] = {};
  const auto bytes = static_cast<std::size_t>(n - i) * sizeof(float);
  std::memcpy(a, average + i, bytes);
  std::memcpy(w, weight + i, bytes);
  move(a, w);
  std::memcpy(average + i, a, bytes);
}

}  // namespace
}  // namespace stow
