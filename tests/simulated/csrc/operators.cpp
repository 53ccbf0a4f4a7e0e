// Operators: anything torch's CPU kernels can do, in the thread of the current stream.
//
// What an operator returns is found out on the meta device, so that its caller goes on at once.
// Where only the elements tell (nonzero, item), the caller waits.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "runtime.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

bool is_ours(const Tensor& t) { return t.defined() && t.device().type() == kDevice; }

Touch touch_of(const Tensor& t, bool writes) {
  if (!t.defined() || t.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return {begin, begin + (last + 1) * t.element_size(), writes};
}

// The same elements for work: a tensor of the CPU at the address that is mapped.
Tensor inner(const Tensor& t) {
  const auto options = t.options().device(at::kCPU).pinned_memory(false);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  Tensor seen = at::from_blob(inside(t.const_data_ptr()), t.sizes(), t.strides(), options);
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    seen.unsafeGetTensorImpl()->set_wrapped_number(true);
  return seen;
}

// As `inner`, of host memory; without a reference to it, as a device has none.
Tensor borrowed(const Tensor& t) {
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), t.options());
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(),
                       t.options().pinned_memory(false));
}

struct Silence {  // no autograd in here
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
};

// --- copies over the link ---

// Late, and the worst that memory can do: who changes the source under way finds poison.
void carry(const Tensor& to, const Tensor& from, const std::string& name, bool down) {
  Silence silence;
  const Tensor before = from.clone();
  const Tensor target = to.clone();
  busy(late(settings().copy_seconds));
  busy_link(down, from.nbytes());
  auto same = [](const Tensor& a, const Tensor& b) {
    const Tensor x = a.contiguous(), y = b.contiguous();
    return memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
  };
  const bool torn = !same(before, from);
  if (torn) hazard(name + ": its source changed before it was over");
  if (!same(target, to)) hazard(name + ": its target changed before it was over");
  to.copy_(before);
  if (torn && to.is_contiguous()) memset(to.data_ptr(), 0xFF, to.nbytes());
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  TORCH_CHECK(from.defined() && to.defined(), "a copy of nothing");
  if (to.numel() == 0) return to;
  if (from.sizes() != to.sizes()) return copy_from(from.expand_as(to), to, non_blocking);
  const int64_t stream = current_stream();
  if (is_ours(from) && is_ours(to)) {
    const Tensor a = inner(from), b = inner(to);
    submit(stream, "copy", {touch_of(from, false), touch_of(to, true)}, [a, b] {
      Silence silence;
      busy(late(settings().op_seconds));
      b.copy_(a);
    });
    return to;
  }
  const bool down = is_ours(from);
  const Tensor& host = down ? to : from;
  TORCH_CHECK(host.is_cpu(), "copies go between the simulated accelerator and the CPU");
  const bool pinned = is_pinned(host.const_data_ptr());
  const bool behind = non_blocking && pinned && host.is_non_overlapping_and_dense();
  count_link(down, to.nbytes());
  const std::string name = down ? "copy down" : "copy up";
  const Tensor a = down ? inner(from) : borrowed(from);
  const Tensor b = down ? borrowed(to) : inner(to);
  submit(stream, name, {touch_of(from, false), touch_of(to, true)},
         [a, b, name, down] { carry(b, a, name, down); });
  const auto over = record(stream);
  if (pinned) hold_pinned(host.const_data_ptr(), over);
  if (!behind) wait(over);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// --- memory and views ---

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout> layout, std::optional<c10::Device>, std::optional<bool> pin,
             std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "strided tensors alone");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device>, std::optional<bool> pin) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size,
                     std::optional<c10::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  const size_t end = (tensor->storage_offset() + tensor->numel()) * tensor->dtype().itemsize();
  if (tensor->numel() && end > tensor->storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor->storage(), end);
  return self;
}

Tensor& set_at(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
               c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset);
  if (stride.data()) {
    tensor->set_sizes_and_strides(size, stride);
  } else {
    tensor->set_sizes_contiguous(size);
  }
  const size_t end = at::detail::computeStorageNbytes(tensor->sizes(), tensor->strides(),
                                                      tensor->dtype().itemsize(), offset);
  if (end > tensor->storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor->storage(), end);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_at(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

void record_stream(Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr(), stream.id());
}

// torch tells no device of others that a CPU's tensor may become one, which Module.to relies on.
bool may_become(const Tensor&, const Tensor&) { return true; }

int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;  // in single operators
}

// The CPU's draws from the CPU's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor mask = at::empty_like(input, at::kBool);
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// --- everything else ---

using Swap = std::function<Tensor(const Tensor&)>;

IValue swapped(const IValue& value, const Swap& swap, c10::DeviceType device) {
  if (value.isTensor()) return value.toTensor().defined() ? swap(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(t.defined() ? swap(t) : t);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      made.push_back(t && t->defined() ? std::optional<Tensor>(swap(*t)) : t);
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) return c10::Device(device);
  return value;
}

void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  swapped(
      value,
      [&](const Tensor& t) {
        visit(t);
        return t;
      },
      c10::kCPU);
}

// What arguments are but for the elements of tensors, in bytes: equal ones have equal results on
// the meta device. Many of its operators are Python's, and take longer than the work itself.
class Signature {
 public:
  explicit Signature(const c10::OperatorHandle& op) {
    bytes_ = toString(op.operator_name());
    bytes_.push_back('\0');
  }

  // False: it is nothing that is known here.
  bool add(const IValue& value) {
    if (value.isNone()) return put('n');
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isBool()) return put('b') && put(value.toBool());
    if (value.isInt()) return put('i') && put(value.toInt());
    if (value.isDouble()) return put('d') && put(value.toDouble());
    if (value.isDevice()) return put('v') && put(value.toDevice().type());
    if (value.isString()) return put('s') && add_all(value.toStringRef());
    if (value.isIntList()) return put('I') && add_all(value.toIntVector());
    if (value.isDoubleList()) return put('D') && add_all(value.toDoubleVector());
    if (value.isGenerator()) return put('g');
    if (value.isTensorList()) {
      const auto tensors = value.toTensorVector();
      put('T') && put(tensors.size());
      return std::all_of(tensors.begin(), tensors.end(), [&](auto& t) { return add_tensor(t); });
    }
    if (value.isOptionalTensorList()) {
      const auto tensors = value.toOptionalTensorVector();
      put('O') && put(tensors.size());
      return std::all_of(tensors.begin(), tensors.end(),
                         [&](auto& t) { return add_tensor(t.value_or(Tensor())); });
    }
    return false;
  }

  const std::string& bytes() const { return bytes_; }

 private:
  template <typename T>
  bool put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return true;
  }

  template <typename T>
  bool add_all(const T& values) {
    put(values.size());
    for (const auto value : values) put(value);
    return true;
  }

  bool add_tensor(const Tensor& t) {
    if (!t.defined()) return put('u');
    const auto known = seen_.try_emplace(t.unsafeGetTensorImpl(), seen_.size());
    put('t') && put(known.first->second) && put(is_ours(t)) && put(t.scalar_type());
    put(t.unsafeGetTensorImpl()->is_wrapped_number());
    return add_all(t.sizes()) && add_all(t.strides());
  }

  std::string bytes_;
  std::unordered_map<c10::TensorImpl*, size_t> seen_;  // what is one stays one
};

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

struct Job {
  const c10::OperatorHandle& op;
  Stack given;
  std::string name;
  bool draws = false;

  Stack swap_all(const Swap& swap, c10::DeviceType device) const {
    std::unordered_map<c10::TensorImpl*, Tensor> known;  // what is one stays one
    Stack made;
    for (const IValue& value : given)
      made.push_back(swapped(
          value,
          [&](const Tensor& t) {
            Tensor& found = known[t.unsafeGetTensorImpl()];
            if (!found.defined()) found = swap(t);
            return found;
          },
          device));
    return made;
  }

  // Of what the CPU gives to the device, numbers alone travel with the call.
  void check_host(const Tensor& t) const {
    TORCH_CHECK(t.dim() == 0 || name.find("index") != std::string::npos,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                c10::Device(kDevice, 0), " and ", t.device(), " (", name, ")");
  }

  Stack for_work() const {
    const auto& arguments = op.schema().arguments();
    Stack made = swap_all(
        [&](const Tensor& t) {
          if (is_ours(t)) return inner(t);
          check_host(t);
          Tensor copy = t.clone();
          if (t.unsafeGetTensorImpl()->is_wrapped_number())
            copy.unsafeGetTensorImpl()->set_wrapped_number(true);
          return copy;
        },
        c10::kCPU);
    for (size_t i = 0; i < made.size(); ++i) {
      const auto type = arguments[i].type();
      const bool random = type->isSubtypeOf(*c10::GeneratorType::get()) ||
                          (type->kind() == c10::TypeKind::OptionalType &&
                           type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
                               c10::TypeKind::GeneratorType);
      if (random) made[i] = generator();
    }
    return made;
  }

  Stack on_meta() const {
    static std::mutex mutex;
    static std::unordered_map<std::string, Stack> known;
    constexpr size_t kMost = 1 << 15;  // numbers among the arguments may be new in each call
    Signature signature(op);
    const bool is_whole = std::all_of(given.begin(), given.end(),
                                      [&](const IValue& value) { return signature.add(value); });
    if (!is_whole) return made_on_meta();
    {
      std::lock_guard lock(mutex);
      const auto found = known.find(signature.bytes());
      if (found != known.end()) return found->second;
    }
    Stack made = made_on_meta();
    std::lock_guard lock(mutex);
    if (known.size() >= kMost) known.clear();
    known[signature.bytes()] = made;
    return made;
  }

  Stack made_on_meta() const {
    Stack made = swap_all(
        [&](const Tensor& t) {
          if (!is_ours(t)) {
            check_host(t);
            return t;
          }
          return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
        },
        c10::kMeta);
    Silence silence;
    op.callBoxed(made);
    return made;
  }

  std::vector<Touch> touched() const {
    std::vector<Touch> found;
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < given.size(); ++i)
      each_tensor(given[i], [&](const Tensor& t) {
        if (is_ours(t)) found.push_back(touch_of(t, writes(arguments[i])));
      });
    return found;
  }

  // The argument that a result is, where it is one.
  const IValue* argument_of(const c10::Argument& result) const {
    if (!result.alias_info()) return nullptr;
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].alias_info() &&
          arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return &given[i];
    return nullptr;
  }
};

Tensor like_on_device(const Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::Device(kDevice, 0)));
}

// The meta device foresees other devices' statistics of a 16-bit norm; the CPU's have its dtype.
void as_the_cpu(const Job& job, Stack& meta) {
  if (meta.empty()) return;
  static const std::unordered_set<std::string> norms = {
      "aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"};
  if (!norms.count(job.name)) return;
  auto dtype = job.given[0].toTensor().scalar_type();
  for (const IValue& value : job.given)
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() != dtype)
      dtype = at::kFloat;
  for (size_t i : {1, 2}) meta[i] = meta[i].toTensor().to(dtype);
}

// Seconds that the product of matrices takes which it is, if it is one.
double product_seconds(const Job& job) {
  static const std::unordered_map<std::string, size_t> products = {
      {"aten::mm", 0}, {"aten::bmm", 0}, {"aten::addmm", 1}, {"aten::baddbmm", 1}};
  const auto found = products.find(job.name);
  if (settings().seconds_per_flop == 0 || found == products.end()) return 0;
  const Tensor& left = job.given[found->second].toTensor();
  const Tensor& right = job.given[found->second + 1].toTensor();
  const double flops =
      2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
  return flops * settings().seconds_per_flop;
}

// Sends it away; what it returns is there already, but for its elements.
Stack run_behind(const Job& job) {
  const auto& returns = job.op.schema().returns();
  bool is_out = false;
  for (const auto& argument : job.op.schema().arguments()) is_out |= argument.is_out();
  bool makes = false;
  for (const auto& result : returns) makes |= !job.argument_of(result);
  Stack results;
  std::vector<Tensor> fresh;
  Stack meta = makes || is_out ? job.on_meta() : Stack();
  as_the_cpu(job, meta);
  for (size_t i = 0; i < returns.size(); ++i) {
    if (const IValue* argument = job.argument_of(returns[i])) {
      if (is_out && argument->isTensor() && is_ours(argument->toTensor()) &&
          argument->toTensor().sizes() != meta[i].toTensor().sizes())
        argument->toTensor().resize_(meta[i].toTensor().sizes());
      results.push_back(*argument);
      continue;
    }
    results.push_back(swapped(
        meta[i],
        [&](const Tensor& t) {
          fresh.push_back(like_on_device(t));
          return fresh.back();
        },
        kDevice));
  }
  auto touched = job.touched();
  std::vector<Tensor> targets;
  for (const Tensor& t : fresh) {
    touched.push_back(touch_of(t, true));
    targets.push_back(inner(t));
  }
  std::vector<bool> is_fresh;
  for (const auto& result : returns) is_fresh.push_back(!job.argument_of(result));
  submit(current_stream(), job.name, touched,
         [op = job.op, stack = job.for_work(), targets, is_fresh,
          seconds = product_seconds(job)]() mutable {
           Silence silence;
           busy(late(settings().op_seconds) + seconds);
           op.callBoxed(stack);
           size_t next = 0;
           for (size_t i = 0; i < is_fresh.size(); ++i)
             if (is_fresh[i])
               each_tensor(stack[i], [&](const Tensor& t) {
                 const Tensor& target = targets.at(next++);
                 TORCH_CHECK(t.sizes() == target.sizes() && t.dtype() == target.dtype(),
                             "the meta device foresaw ", target.dtype(), target.sizes(),
                             " and the CPU made ", t.dtype(), t.sizes());
                 target.copy_(t);
               });
         });
  return results;
}

// Waits for it: the elements tell what it returns.
Stack run_now(const Job& job) {
  auto results = std::make_shared<Stack>(job.for_work());
  submit(current_stream(), job.name, job.touched(), [op = job.op, results] {
    Silence silence;
    busy(late(settings().op_seconds));
    op.callBoxed(*results);
  });
  wait_stream(current_stream());
  Stack made;
  const auto& returns = job.op.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (const IValue* argument = job.argument_of(returns[i])) {
      made.push_back(*argument);
      continue;
    }
    made.push_back(swapped(
        results->at(i),
        [](const Tensor& t) {
          const Tensor there = like_on_device(t);
          if (t.numel() == 0) return there;
          submit(current_stream(), "result", {touch_of(there, true)}, [t, to = inner(there)] {
            Silence silence;
            to.copy_(t);
          });
          return there;
        },
        kDevice));
  }
  return made;
}

const std::unordered_set<std::string> by_elements = {"aten::nonzero",
                                                     "aten::masked_select",
                                                     "aten::_unique2",
                                                     "aten::unique_dim",
                                                     "aten::unique_consecutive",
                                                     "aten::bincount",
                                                     "aten::repeat_interleave",
                                                     "aten::histc"};

bool is_known_before(const Job& job) {
  if (job.draws || by_elements.count(job.op.schema().name())) return false;
  for (const auto& result : job.op.schema().returns()) {
    const auto& type = *result.type();
    const bool tensors =
        type.isSubtypeOf(*c10::TensorType::get()) || type.isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensors) return false;
  }
  for (const IValue& value : job.given)  // masks as indices
    if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte))
          return false;
  return job.op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Job job{op, {}, schema.name()};
  const auto given = torch::jit::last(*stack, schema.arguments().size());
  job.given.assign(given.begin(), given.end());
  job.draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (const auto& argument : schema.arguments()) job.draws |= argument.name() == "generator";
  Stack results = is_known_before(job) ? run_behind(job) : run_now(job);
  torch::jit::drop(*stack, schema.arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

}  // namespace
}  // namespace simulated

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", simulated::empty);
  m.impl("empty_strided", simulated::empty_strided);
  m.impl("resize_", simulated::resize);
  m.impl("set_.source_Storage_storage_offset", simulated::set_at);
  m.impl("set_.source_Storage", simulated::set_storage);
  m.impl("set_.source_Tensor", simulated::set_tensor);
  m.impl("as_strided", simulated::as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("_copy_from", simulated::copy_from);
  m.impl("_copy_from_and_resize", simulated::copy_from_and_resize);
  m.impl("record_stream", simulated::record_stream);
  m.impl("native_dropout", simulated::native_dropout);
  m.impl("_fused_sdp_choice", simulated::attention_choice);
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&simulated::run>());
  m.impl("_has_compatible_shallow_copy_type", simulated::may_become);
}
