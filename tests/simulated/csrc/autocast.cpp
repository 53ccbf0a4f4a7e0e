// What autocast casts on the device: torch's own lists, which are CUDA's too.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

using namespace at;  // torch's lists name its types so, and others from version to version

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define FOR_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FOR_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FOR_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define FOR_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(FOR_LOWER)
  AT_FORALL_FP32(FOR_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FOR_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(FOR_WIDEST)
  KERNEL_PRIVATEUSEONE(stack, promote)
  KERNEL_PRIVATEUSEONE(cat, promote)
}
