// The one file that knows Python. Every call that can wait lets go of the GIL.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <stdexcept>
#include <system_error>

#include "base/pool.h"
#include "io/direct.h"
#include "io/engine.h"
#include "kernels/kernels.h"
#include "pipeline/pipeline.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace stow {
namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  throw std::invalid_argument("dtype " + name + ": one of float32, bfloat16, float16");
}

Isa parse_isa(const std::optional<std::string>& name) {
  if (!name) return best_isa();
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (*name == isa_name(isa)) {
      if (!isa_supported(isa)) throw std::invalid_argument("this CPU does not run " + *name);
      return isa;
    }
  }
  throw std::invalid_argument("isa " + *name + ": one of scalar, avx2, avx512");
}

Op parse_op(const std::string& name) {
  if (name == "read") return Op::read;
  if (name == "write") return Op::write;
  throw std::invalid_argument("operation " + name + ": one of read, write");
}

const char* op_name(Op op) { return op == Op::read ? "read" : "write"; }

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (isa_supported(isa)) names.emplace_back(isa_name(isa));
  }
  return names;
}

using Hyper = std::tuple<float, float, float, float, float, float, float, float, float>;

AdamHyper parse_hyper(const Hyper& h) {
  return {std::get<0>(h), std::get<1>(h), std::get<2>(h), std::get<3>(h), std::get<4>(h),
          std::get<5>(h), std::get<6>(h), std::get<7>(h), std::get<8>(h)};
}

// The same arguments from element `from` on.
AdamArgs advanced(AdamArgs args, std::int64_t from, std::int64_t count) {
  args.param = static_cast<char*>(args.param) + from * (args.param_dtype == DType::f32 ? 4 : 2);
  args.grad = static_cast<const char*>(args.grad) + from * (args.grad_dtype == DType::f32 ? 4 : 2);
  if (args.master != nullptr) args.master += from;
  args.m += from;
  args.v += from;
  if (args.vmax != nullptr) args.vmax += from;
  args.n = count;
  return args;
}

void run_adam(const AdamArgs& args, Isa isa, bool on_pool) {
  if (!on_pool) return adam_update(args, isa);
  const std::int64_t blocks = (args.n + kUpdateBlock - 1) / kUpdateBlock;
  pool().run(blocks, [&](std::int64_t b) {
    const std::int64_t from = b * kUpdateBlock;
    adam_update(advanced(args, from, std::min(kUpdateBlock, args.n - from)), isa);
  });
}

double squared_norm(const char* grad, std::int64_t n, DType dtype, Isa isa) {
  const std::int64_t blocks = (n + kNormBlock - 1) / kNormBlock;
  std::vector<double> partial(static_cast<std::size_t>(blocks));
  pool().run(blocks, [&](std::int64_t b) {
    const std::int64_t from = b * kNormBlock;
    const char* start = grad + from * (dtype == DType::f32 ? 4 : 2);
    partial[static_cast<std::size_t>(b)] =
        squared_norm_block(start, dtype, std::min(kNormBlock, n - from), isa);
  });
  double sum = 0;
  for (double value : partial) sum += value;
  return sum;
}

// Engines and pipelines own threads. In a forked child those do not exist, so the child lets the
// object be.
template <typename T>
struct LeaveInChild {
  void operator()(T* object) const {
    if (object->in_owner()) delete object;
  }
};

struct PyEngine {
  std::shared_ptr<Engine> engine;

  PyEngine(const std::string& backend, int depth, std::int64_t block_bytes) {
    if (depth < 1 || block_bytes < 4096 || block_bytes % 4096 != 0) {
      throw std::invalid_argument("depth must be at least 1 and block_bytes a multiple of 4096");
    }
    const EngineOptions options{depth, block_bytes};
    std::unique_ptr<Engine> made;
    if (backend == "uring") {
      made = make_uring_engine(options);
    } else if (backend == "threads") {
      made = make_threads_engine(options);
    } else {
      throw std::invalid_argument("backend " + backend + ": one of uring, threads");
    }
    engine = std::shared_ptr<Engine>(made.release(), LeaveInChild<Engine>{});
  }

  Engine& get() const {
    if (!engine->in_owner())
      throw std::runtime_error("an I/O engine does not live on in a forked process");
    return *engine;
  }
};

// One transfer that Python waits for. Its memory is in use until it is over, so the destructor
// waits.
class Ticket {
 public:
  Ticket(std::shared_ptr<Engine> engine, const Transfer& transfer)
      : engine_(std::move(engine)), transfer_(transfer) {
    transfer_.context = this;
    transfer_.done = [](Transfer* t) { static_cast<Ticket*>(t->context)->finish(); };
    engine_->submit(&transfer_);
  }

  ~Ticket() {
    if (!engine_->in_owner()) return;
    nb::gil_scoped_release release;
    wait_for(-1);
  }

  bool wait_for(double seconds) {
    std::unique_lock lock(mutex_);
    if (seconds < 0) {
      over_.wait(lock, [this] { return done_; });
      return true;
    }
    return over_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done_; });
  }

  // In slices, so that Ctrl-C is heard.
  bool wait(std::optional<double> timeout) {
    check_owner();
    constexpr double kSlice = 0.1;
    const double deadline = timeout ? now() + *timeout : 0;
    for (;;) {
      double slice = kSlice;
      if (timeout) slice = std::clamp(deadline - now(), 0.0, kSlice);
      {
        nb::gil_scoped_release release;
        if (wait_for(slice)) return true;
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (timeout && now() >= deadline) return false;
    }
  }

  bool done() {
    check_owner();
    std::lock_guard lock(mutex_);
    return done_;
  }

  std::tuple<int, std::int64_t, std::int64_t> error() const {
    return {transfer_.error, transfer_.error_offset, transfer_.error_length};
  }

 private:
  // A fork may have copied the lock while it was held.
  void check_owner() const {
    if (!engine_->in_owner())
      throw std::runtime_error("a transfer does not live on in a forked process");
  }

  void finish() {
    std::lock_guard lock(mutex_);
    done_ = true;
    over_.notify_all();
  }

  std::shared_ptr<Engine> engine_;
  Transfer transfer_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool done_ = false;
};

Ticket* start(const PyEngine& self, Op op, int file, Address data, std::int64_t length,
              std::int64_t offset) {
  self.get();
  Transfer transfer;
  transfer.file = file;
  transfer.op = op;
  transfer.data = at<char>(data);
  transfer.length = length;
  transfer.offset = offset;
  return new Ticket(self.engine, transfer);  // Python's from here on
}

using Ints = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Hypers = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FailureTuple = std::tuple<int, std::string, int, int, std::int64_t, std::int64_t>;

FailureTuple as_tuple(const Failure& f) {
  return {f.error, op_name(f.op), f.file, f.chunk, f.offset, f.length};
}

constexpr const char* kStates[] = {"resident", "blank",    "stored",  "reading",
                                   "ready",    "updating", "writing", "lost"};
constexpr const char* kLanes[] = {"read", "update", "write", "wait"};

struct PyPipeline {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Pipeline> pipeline;
  std::vector<StepParameter> parameters;
  std::vector<AdamHyper> hypers;

  PyPipeline(const PyEngine& py_engine, Address base, int slots, std::int64_t slot_bytes,
             std::int64_t stream_stride, const std::optional<std::string>& isa)
      : engine(py_engine.engine) {
    const RingSpec ring{at<char>(base), slots, slot_bytes, stream_stride};
    auto made = std::make_unique<Pipeline>(py_engine.get(), ring, parse_isa(isa));
    pipeline = std::shared_ptr<Pipeline>(made.release(), LeaveInChild<Pipeline>{});
  }

  ~PyPipeline() {
    nb::gil_scoped_release release;
    pipeline.reset();
  }

  Pipeline& get() const {
    if (!pipeline->in_owner())
      throw std::runtime_error("an update pipeline does not live on in a forked process");
    return *pipeline;
  }

  int add_chunk(
      const std::string& dtype, bool amsgrad,
      const std::vector<std::tuple<int, std::int64_t, std::int64_t, std::int64_t>>& segments,
      std::int64_t elements, const std::tuple<int, std::int64_t, std::int64_t>& place,
      const std::vector<Address>& resident, bool stored) {
    ChunkSpec spec{};
    spec.family = {parse_dtype(dtype), amsgrad};
    for (const auto& [parameter, from, to, count] : segments)
      spec.segments.push_back({parameter, from, to, count});
    spec.elements = elements;
    std::tie(spec.file, spec.offset, spec.stream_bytes) = place;
    if (spec.file < 0 && static_cast<int>(resident.size()) != spec.family.streams()) {
      throw std::invalid_argument("a resident chunk names one address per stream");
    }
    for (std::size_t k = 0; k < resident.size(); ++k) spec.resident[k] = at<char>(resident[k]);
    const ChunkState state = spec.file < 0 ? ChunkState::resident
                             : stored      ? ChunkState::stored
                                           : ChunkState::blank;
    return get().add_chunk(std::move(spec), state);
  }

  // One call, so that no Python exception can come between the beginning of a step, after which the
  // gradients are being read, and its end.
  FailureTuple step(Ints params, Ints grads, Ints grad_dtypes, Ints seeds, Ints hyper_index,
                    Hypers table) {
    const std::size_t n = params.shape(0);
    if (grads.shape(0) != n || grad_dtypes.shape(0) != n || seeds.shape(0) != n ||
        hyper_index.shape(0) != n || table.shape(1) != 9) {
      throw std::invalid_argument("step: the arrays must have one length and hypers nine columns");
    }
    parameters.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      parameters[i] = {at<void>(static_cast<Address>(params(i))),
                       at<void>(static_cast<Address>(grads(i))), static_cast<DType>(grad_dtypes(i)),
                       seeds(i) != 0, static_cast<std::int32_t>(hyper_index(i))};
    }
    hypers.resize(table.shape(0));
    for (std::size_t h = 0; h < hypers.size(); ++h) {
      hypers[h] = {table(h, 0), table(h, 1), table(h, 2), table(h, 3), table(h, 4),
                   table(h, 5), table(h, 6), table(h, 7), table(h, 8)};
    }
    nb::gil_scoped_release release;
    get().begin(parameters, hypers);
    return as_tuple(get().wait_published());
  }
};

// The C library's message for an errno comes with the exception; Python's OSError wants the number
// too.
void translate_system_error(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const std::system_error& e) {
    nb::object args = nb::make_tuple(e.code().value(), e.what());
    PyErr_SetObject(PyExc_OSError, args.ptr());
  }
}

void bind_kernels(nb::module_& m) {
  m.def("supported_isas", &supported_isas);
  m.def("best_isa", [] { return std::string(isa_name(best_isa())); });
  m.def("set_pool_threads", &set_pool_threads, "threads"_a);
  m.def("pool_threads", [] { return pool().threads(); });
  m.def(
      "adam_update",
      [](Address param, Address grad, Address master, Address m_, Address v, Address vmax,
         std::int64_t n, const std::string& param_dtype, const std::string& grad_dtype,
         bool seed_master, const Hyper& hyper, const std::optional<std::string>& isa,
         bool on_pool) {
        const AdamArgs args{at<void>(param),
                            at<void>(grad),
                            at<float>(master),
                            at<float>(m_),
                            at<float>(v),
                            at<float>(vmax),
                            n,
                            parse_dtype(param_dtype),
                            parse_dtype(grad_dtype),
                            seed_master,
                            parse_hyper(hyper)};
        const Isa chosen = parse_isa(isa);
        nb::gil_scoped_release release;
        run_adam(args, chosen, on_pool);
      },
      "param"_a, "grad"_a, "master"_a, "m"_a, "v"_a, "vmax"_a, "n"_a, "param_dtype"_a,
      "grad_dtype"_a, "seed_master"_a, "hyper"_a, "isa"_a.none(), "on_pool"_a);
  m.def(
      "squared_norm",
      [](Address grad, std::int64_t n, const std::string& dtype,
         const std::optional<std::string>& isa) {
        const DType parsed = parse_dtype(dtype);
        const Isa chosen = parse_isa(isa);
        nb::gil_scoped_release release;
        return squared_norm(at<const char>(grad), n, parsed, chosen);
      },
      "grad"_a, "n"_a, "dtype"_a, "isa"_a.none());
  m.def(
      "seven_streams",
      [](Address p, Address g, Address m_, Address v, std::int64_t n) {
        nb::gil_scoped_release release;
        pool().run((n + kUpdateBlock - 1) / kUpdateBlock, [&](std::int64_t b) {
          const std::int64_t from = b * kUpdateBlock;
          seven_streams(at<float>(p) + from, at<float>(g) + from, at<float>(m_) + from,
                        at<float>(v) + from, std::min(kUpdateBlock, n - from), best_isa());
        });
      },
      "p"_a, "g"_a, "m"_a, "v"_a, "n"_a);
  m.def(
      "mixed_streams",
      [](Address p16, Address g16, Address w, Address m_, Address v, std::int64_t n) {
        nb::gil_scoped_release release;
        pool().run((n + kUpdateBlock - 1) / kUpdateBlock, [&](std::int64_t b) {
          const std::int64_t from = b * kUpdateBlock;
          mixed_streams(at<std::uint16_t>(p16) + from, at<std::uint16_t>(g16) + from,
                        at<float>(w) + from, at<float>(m_) + from, at<float>(v) + from,
                        std::min(kUpdateBlock, n - from), best_isa());
        });
      },
      "p16"_a, "g16"_a, "w"_a, "m"_a, "v"_a, "n"_a);
}

void bind_io(nb::module_& m) {
  m.def("direct_alignment", &direct_alignment, "fd"_a, "bytes; 0 where it is not told");
  // The system call itself: the C library's posix_fallocate writes zeros where the filesystem
  // cannot reserve.
  m.def(
      "fallocate",
      [](int fd, std::int64_t length) { return ::fallocate(fd, 0, 0, length) == 0 ? 0 : errno; },
      nb::call_guard<nb::gil_scoped_release>(), "fd"_a, "length"_a, "errno, or 0");
  nb::class_<Ticket>(m, "Ticket")
      .def("wait", &Ticket::wait, "timeout"_a.none() = nb::none())
      .def("done", &Ticket::done)
      .def("error", &Ticket::error, "(errno, offset, length); errno 0 where all bytes moved");

  nb::class_<PyEngine>(m, "Engine")
      .def(nb::init<const std::string&, int, std::int64_t>(), "backend"_a, "depth"_a = 32,
           "block_bytes"_a = 1 << 20)
      .def_prop_ro("backend",
                   [](const PyEngine& self) { return std::string(self.engine->backend()); })
      .def_prop_ro("depth", [](const PyEngine& self) { return self.engine->options().depth; })
      .def_prop_ro("block_bytes",
                   [](const PyEngine& self) { return self.engine->options().block_bytes; })
      .def(
          "add_file",
          [](const PyEngine& self, int fd, std::int64_t align, bool drop_cache) {
            return self.get().add_file({fd, align, drop_cache});
          },
          "fd"_a, "align"_a, "drop_cache"_a)
      .def(
          "read",
          [](const PyEngine& self, int file, Address data, std::int64_t length, std::int64_t offset,
             nb::object) { return start(self, Op::read, file, data, length, offset); },
          "file"_a, "data"_a, "length"_a, "offset"_a, "owner"_a.none(), nb::keep_alive<0, 6>())
      .def(
          "write",
          [](const PyEngine& self, int file, Address data, std::int64_t length, std::int64_t offset,
             nb::object) { return start(self, Op::write, file, data, length, offset); },
          "file"_a, "data"_a, "length"_a, "offset"_a, "owner"_a.none(), nb::keep_alive<0, 6>())
      .def(
          "drain", [](const PyEngine& self) { self.get().drain(); },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "counters",
          [](const PyEngine& self) {
            const EngineCounters c = self.get().counters();
            nb::dict d;
            d["bytes_read"] = c.bytes_read;
            d["bytes_written"] = c.bytes_written;
            d["blocks"] = c.blocks;
            d["resubmitted"] = c.resubmitted;
            d["bounced"] = c.bounced;
            return d;
          },
          nb::sig("def counters(self) -> dict[str, int]"))
      .def(
          "inject_fault",
          [](const PyEngine& self, const std::string& op, std::int64_t after, std::int64_t times,
             int error, std::int64_t max_bytes, std::int64_t delay_us) {
            self.get().faults().add({parse_op(op), after, times, error, max_bytes, delay_us});
          },
          "operation"_a, nb::kw_only(), "after"_a = 0, "times"_a = 1, "error"_a = 0,
          "max_bytes"_a = 0, "delay_us"_a = 0)
      .def("clear_faults", [](const PyEngine& self) { self.get().faults().clear(); });
}

void bind_pipeline(nb::module_& m) {
  nb::class_<PyPipeline>(m, "Pipeline")
      .def(nb::init<const PyEngine&, Address, int, std::int64_t, std::int64_t,
                    const std::optional<std::string>&>(),
           "engine"_a, "base"_a, "slots"_a, "slot_bytes"_a, "stream_stride"_a, "isa"_a.none())
      .def("add_chunk", &PyPipeline::add_chunk, "param_dtype"_a, "amsgrad"_a, "segments"_a,
           "elements"_a, "place"_a, "resident"_a, "stored"_a)
      .def("prefetch", [](PyPipeline& self) { self.get().prefetch(); })
      .def("step", &PyPipeline::step, "params"_a, "grads"_a, "grad_dtypes"_a, "seeds"_a,
           "hyper_index"_a, "hypers"_a)
      .def("quiesce",
           [](PyPipeline& self) {
             nb::gil_scoped_release release;
             return as_tuple(self.get().quiesce());
           })
      .def("failure", [](PyPipeline& self) { return as_tuple(self.get().failure()); })
      .def("state", [](PyPipeline& self,
                       int chunk) { return kStates[static_cast<int>(self.get().state(chunk))]; })
      .def("mark_stored", [](PyPipeline& self, int chunk) { self.get().mark_stored(chunk); })
      .def(
          "counters",
          [](PyPipeline& self) {
            const PipelineCounters c = self.get().counters();
            nb::dict d;
            d["bytes_read"] = c.bytes_read;
            d["bytes_written"] = c.bytes_written;
            d["chunks_updated"] = c.chunks_updated;
            d["slots_in_use"] = c.slots_in_use;
            d["slots_high_water"] = c.slots_high_water;
            d["wait_seconds"] = c.wait_seconds;
            return d;
          },
          nb::sig("def counters(self) -> dict[str, float]"))
      .def("start_trace",
           [](PyPipeline& self, std::size_t capacity) { self.get().trace().start(capacity); })
      .def(
          "trace",
          [](PyPipeline& self) {
            nb::list rows;
            for (const Event& e : self.get().trace().events()) {
              rows.append(nb::make_tuple(kLanes[static_cast<int>(e.lane)], e.start, e.stop, e.chunk,
                                         e.bytes));
            }
            return rows;
          },
          nb::sig("def trace(self) -> list[tuple[str, float, float, int, int]]"));
}

}  // namespace
}  // namespace stow

NB_MODULE(_native, m) {
  m.doc() = "The native core of tensorstow: kernels, file I/O and the update pipeline.";
  nb::register_exception_translator(stow::translate_system_error);
  stow::bind_kernels(m);
  stow::bind_io(m);
  stow::bind_pipeline(m);
}
