// From an update's formats and dtypes to the loop that serves them.
#pragma once

#include <type_traits>

#include "kernels/adam_loop.h"
#include "kernels/group_loop.h"

namespace stow {
namespace {

template <class V, class Weight, class G>
void exact_adam(const AdamArgs& args) {
  using Moments = WideMoments<V, Weight::kTies>;
  const bool l2 = args.hyper.l2 != 0.0f;
  if (args.amsgrad && l2) {
    AdamLoop<V, Weight, Moments, G, true, true>(args).run();
  } else if (args.amsgrad) {
    AdamLoop<V, Weight, Moments, G, true, false>(args).run();
  } else if (l2) {
    AdamLoop<V, Weight, Moments, G, false, true>(args).run();
  } else {
    AdamLoop<V, Weight, Moments, G, false, false>(args).run();
  }
}

template <class V, class Weight, class G>
void half_adam(const AdamArgs& args) {
  if (args.hyper.l2 != 0.0f) {
    AdamLoop<V, Weight, HalfMoments<V>, G, false, true>(args).run();
  } else {
    AdamLoop<V, Weight, HalfMoments<V>, G, false, false>(args).run();
  }
}

template <class V, class Weight, class G>
void byte_adam(const AdamArgs& args) {
  if (args.hyper.l2 != 0.0f) {
    GroupLoop<V, Weight, G, true>(args).run();
  } else {
    GroupLoop<V, Weight, G, false>(args).run();
  }
}

// `P`: of the parameter. `Bf16Weight`: how a bf16 parameter's master is kept.
template <class V, class P, class Bf16Weight>
using WeightOf = std::conditional_t<std::is_same_v<P, Bf16>, Bf16Weight, WideWeight<V, P>>;

template <class V, class P, class G>
void adam_of_types(const AdamArgs& args) {
  switch (args.format) {
    case StateFormat::fp32:
      return exact_adam<V, WideWeight<V, P>, G>(args);
    case StateFormat::split:
      return exact_adam<V, WeightOf<V, P, SplitWeight<V>>, G>(args);
    case StateFormat::bf16:
      return half_adam<V, WeightOf<V, P, SplitWeight<V>>, G>(args);
    case StateFormat::int8:
      return byte_adam<V, WeightOf<V, P, ByteWeight<V>>, G>(args);
  }
}

template <class V, class G>
void adam_of_grad(const AdamArgs& args) {
  switch (args.param_dtype) {
    case DType::f32:
      return adam_of_types<V, float, G>(args);
    case DType::bf16:
      return adam_of_types<V, Bf16, G>(args);
    case DType::f16:
      return adam_of_types<V, F16, G>(args);
  }
}

template <class V>
void adam_of(const AdamArgs& args) {
  switch (args.grad_dtype) {
    case DType::f32:
      return adam_of_grad<V, float>(args);
    case DType::bf16:
      return adam_of_grad<V, Bf16>(args);
    case DType::f16:
      return adam_of_grad<V, F16>(args);
  }
}

}  // namespace
}  // namespace stow
