// [Note: The norm tree] over a vector type `V` (simd_*.h), and the bandwidth probes. Internal
// linkage, as in adam_loop.h.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"

namespace stow {
namespace {

template <class V, class G>
double squared_norm(const G* grad, std::int64_t n) {
  typename V::Squares squares;
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) squares.add(grad + i);
  // A lane is never negative, so the zeros that fill up the last group change no bit.
  G rest[16] = {};
  for (std::int64_t k = 0; k < n - i; ++k) rest[k] = grad[i + k];
  squares.add(rest);
  double lane[16];
  squares.store(lane);
  for (int half = 8; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lane[k] += lane[k + half];
  }
  return lane[0];
}

template <class V>
double squared_norm_of(const void* grad, DType dtype, std::int64_t n) {
  switch (dtype) {
    case DType::f32:
      return squared_norm<V>(static_cast<const float*>(grad), n);
    case DType::bf16:
      return squared_norm<V>(static_cast<const Bf16*>(grad), n);
    case DType::f16:
      return squared_norm<V>(static_cast<const F16*>(grad), n);
  }
  __builtin_unreachable();
}

template <class V>
void seven_streams_of(float* p, const float* g, float* m, float* v, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    const V x = V::load(g + i);
    (V::load(p + i) + x).store(p + i);
    (V::load(m + i) + x).store(m + i);
    (V::load(v + i) + x).store(v + i);
  }
  for (; i < n; ++i) {
    p[i] += g[i];
    m[i] += g[i];
    v[i] += g[i];
  }
}

// The probe leaves what does not fill a pair of vectors, and streams from where its caller aligned
// p16.
template <class V>
void mixed_streams_of(Bf16* p16, const Bf16* g16, float* w, float* m, float* v, std::int64_t n) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(p16) % 64 == 0;
  for (std::int64_t i = 0; i + 2 * V::kLanes <= n; i += 2 * V::kLanes) {
    V sum[2] = {V::load(w + i), V::load(w + i + V::kLanes)};
    for (int k = 0; k < 2; ++k) {
      const std::int64_t at = i + k * V::kLanes;
      const V x = V::load(g16 + at);
      sum[k] = sum[k] + x;
      sum[k].store(w + at);
      (V::load(m + at) + x).store(m + at);
      (V::load(v + at) + x).store(v + at);
    }
    if (aligned) {
      V::template store_pair<true>(p16 + i, sum[0], sum[1]);
    } else {
      V::template store_pair<false>(p16 + i, sum[0], sum[1]);
    }
  }
  V::fence();
}

}  // namespace
}  // namespace stow
