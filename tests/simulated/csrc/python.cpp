// What Python sees; and collectives: gloo, in the thread of a stream, on the device's own bytes.

#include <torch/extension.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "runtime.h"

namespace simulated {
namespace {

using at::Tensor;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensor bytes_of(const Tensor& t) {
  TORCH_CHECK(t.device().type() == kDevice && t.is_contiguous(),
              "contiguous tensors of the device");
  const auto options = t.options().device(at::kCPU);
  if (t.numel() == 0) return at::empty(t.sizes(), options);
  return at::from_blob(inside(t.const_data_ptr()), t.sizes(), options);
}

Touch touch_of(const Tensor& t, bool writes) {
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return {begin, begin + t.nbytes(), writes};
}

struct Done final : c10d::Work {
  MomentPtr over;
  std::vector<Tensor> tensors;
  Done(MomentPtr m, std::vector<Tensor> t) : over(std::move(m)), tensors(std::move(t)) {}
  bool isCompleted() override { return query(over); }
  bool isSuccess() const override { return true; }
  void synchronize() override { block(current_stream(), over); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  std::vector<Tensor> result() override { return tensors; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::ofTensors(), std::vector<c10::Device>{c10::Device(kDevice, 0)});
    synchronize();
    future->markCompleted(at::IValue(tensors));
    return future;
  }
};

class Collectives final : public c10d::Backend {
 public:
  Collectives(BackendPtr gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)), stream_(next_stream()) {}

  const std::string getBackendName() const override { return "simulated_gloo"; }

  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& how) override {
    return send("broadcast", {}, tensors,
                [gloo = gloo_, how](auto&, auto& out) { gloo->broadcast(out, how)->wait(); });
  }

  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& how) override {
    auto sum = how;
    const bool mean = how.reduceOp == c10d::ReduceOp::AVG;
    if (mean) sum.reduceOp = c10d::ReduceOp::SUM;
    return send("allreduce", {}, tensors, [gloo = gloo_, sum, mean, n = size_](auto&, auto& out) {
      gloo->allreduce(out, sum)->wait();
      if (mean) out[0].div_(n);
    });
  }

  WorkPtr _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& how) override {
    return send("allgather", {from}, {to}, [gloo = gloo_, how, n = size_](auto& in, auto& out) {
      std::vector<std::vector<Tensor>> each{out[0].view(-1).chunk(n)};
      std::vector<Tensor> given{in[0].reshape(-1).clone()};
      if (given[0].numel()) gloo->allgather(each, given, how)->wait();
    });
  }

  WorkPtr allgather(std::vector<std::vector<Tensor>>& to, std::vector<Tensor>& from,
                    const c10d::AllgatherOptions& how) override {
    return send("allgather", from, to[0], [gloo = gloo_, how](auto& in, auto& out) {
      std::vector<std::vector<Tensor>> each{out};
      gloo->allgather(each, in, how)->wait();
    });
  }

  WorkPtr _reduce_scatter_base(Tensor& to, Tensor& from,
                               const c10d::ReduceScatterOptions& how) override {
    c10d::AllreduceOptions sum;
    const bool mean = how.reduceOp == c10d::ReduceOp::AVG;
    sum.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : how.reduceOp;
    return send("reduce_scatter", {from}, {to},
                [gloo = gloo_, sum, mean, n = size_, i = rank_](auto& in, auto& out) {
                  std::vector<Tensor> whole{in[0].reshape(-1).clone()};
                  if (!whole[0].numel()) return;
                  gloo->allreduce(whole, sum)->wait();
                  if (mean) whole[0].div_(n);
                  out[0].view(-1).copy_(whole[0].chunk(n)[i]);
                });
  }

  WorkPtr alltoall_base(Tensor& to, Tensor& from, std::vector<int64_t>& to_sizes,
                        std::vector<int64_t>& from_sizes,
                        const c10d::AllToAllOptions& how) override {
    return send("alltoall", {from}, {to},
                [gloo = gloo_, to_sizes, from_sizes, how](auto& in, auto& out) mutable {
                  gloo->alltoall_base(out[0], in[0], to_sizes, from_sizes, how)->wait();
                });
  }

  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& to, std::vector<Tensor>& from,
                                          const c10d::AllgatherOptions& how) override {
    for (size_t i = 0; i + 1 < to.size(); ++i) _allgather_base(to[i], from[i], how);
    return _allgather_base(to.back(), from.back(), how);  // behind the others
  }

  WorkPtr reduce_scatter_tensor_coalesced(std::vector<Tensor>& to, std::vector<Tensor>& from,
                                          const c10d::ReduceScatterOptions& how) override {
    for (size_t i = 0; i + 1 < to.size(); ++i) _reduce_scatter_base(to[i], from[i], how);
    return _reduce_scatter_base(to.back(), from.back(), how);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    wait_stream(current_stream());
    gloo_->barrier()->wait();
    return c10::make_intrusive<Done>(nullptr, std::vector<Tensor>());
  }

 private:
  template <class Op>
  WorkPtr send(const char* name, const std::vector<Tensor>& from, const std::vector<Tensor>& to,
               Op op) {
    std::vector<Touch> touched;
    std::vector<Tensor> in, out;
    for (const Tensor& t : from) in.push_back(bytes_of(t)), touched.push_back(touch_of(t, false));
    for (const Tensor& t : to) out.push_back(bytes_of(t)), touched.push_back(touch_of(t, true));
    // In the order of the host, which is that of all ranks.
    block(stream_, record(current_stream()));
    submit(stream_, name, touched, [op, in, out]() mutable {
      at::NoGradGuard no_grad;
      busy(settings().copy_seconds);
      op(in, out);
    });
    for (const auto* tensors : {&from, &to})
      for (const Tensor& t : *tensors) record_use(t.storage().data_ptr(), stream_);
    return c10::make_intrusive<Done>(record(stream_), to);
  }

  BackendPtr gloo_;
  int64_t stream_;
};

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  py::module_::import("torch.distributed");
  initialize();
  m.def("take_hazards", &take_hazards);
  m.def("busy", [](double seconds) {  // work of the current stream that takes so long
    submit(current_stream(), "busy", {}, [seconds] { busy(seconds); });
  });
  py::class_<Hold, std::shared_ptr<Hold>>(m, "Hold").def("release", &Hold::release);
  m.def("hold", [](double most_seconds) {  // the current stream
    auto hold = std::make_shared<Hold>(most_seconds);
    submit(current_stream(), "hold", {}, [hold] { hold->block(); });
    return hold;
  });
  m.def("set_delays", [](double copy_seconds, double copy_bytes_per_s, double op_seconds) {
    settings().copy_seconds = copy_seconds;
    settings().copy_bytes_per_s = copy_bytes_per_s;
    settings().op_seconds = op_seconds;
  });
  m.def("set_compute",
        [](double seconds_per_flop) { settings().seconds_per_flop = seconds_per_flop; });
  m.def("start_trace", [] { trace(true); });
  m.def("take_trace", [] {
    py::list made;
    for (const Span& span : take_trace())
      made.append(py::make_tuple(span.stream, span.name, span.start, span.stop, span.bytes));
    return made;
  });
  m.def("set_memory_limit", [](size_t bytes) { settings().memory_bytes = bytes; });
  m.def("set_pinned_limit", [](size_t bytes) { settings().pinned_bytes = bytes; });
  m.def("register_host",
        [](uintptr_t address, size_t nbytes, int) { return register_host(address, nbytes); });
  m.def("unregister_host", &unregister_host);
  m.def("registered_bytes", &registered_bytes);
  m.def("take_counts", [] {
    const Counts counts = take_counts();
    py::dict made;
    made["bytes_down"] = counts.bytes_down;
    made["bytes_up"] = counts.bytes_up;
    made["host_waits"] = counts.host_waits;
    return made;
  });
  m.def("default_generator", [] { return device_generator(); });
  m.def("is_in_bad_fork", &forked);
  m.def("synchronize", &wait_device, py::call_guard<py::gil_scoped_release>());
  py::class_<Collectives, c10::intrusive_ptr<Collectives>, c10d::Backend>(m, "Collectives")
      .def(py::init([](BackendPtr gloo, int rank, int size) {
        return c10::make_intrusive<Collectives>(std::move(gloo), rank, size);
      }));
}
