// The one file that knows Python. Every call that can wait lets go of the GIL.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <tuple>

#include "base/affinity.h"
#include "base/checksum.h"
#include "base/metered.h"
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

StateFormat parse_format(const std::string& name) {
  if (name == "fp32") return StateFormat::fp32;
  if (name == "split") return StateFormat::split;
  if (name == "bf16") return StateFormat::bf16;
  if (name == "int8") return StateFormat::int8;
  throw std::invalid_argument("format " + name + ": one of fp32, split, bf16, int8");
}

using StreamTuple = std::tuple<std::string, int, int>;

std::vector<StreamTuple> stream_tuples(const std::string& dtype, const std::string& format,
                                       bool amsgrad) {
  constexpr const char* kNames[] = {"m", "v", "vmax", "master", "m_scale", "v_scale"};
  StreamSpec specs[kMaxStreams];
  const int count = streams_of(parse_dtype(dtype), parse_format(format), amsgrad, specs);
  std::vector<StreamTuple> tuples;
  for (int k = 0; k < count; ++k) {
    tuples.emplace_back(kNames[static_cast<int>(specs[k].stream)], specs[k].bytes, specs[k].per);
  }
  return tuples;
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

// The same arguments from element `from` on, a multiple of kGroup.
AdamArgs advanced(AdamArgs args, std::int64_t from, std::int64_t count) {
  args.param = static_cast<char*>(args.param) + from * (args.param_dtype == DType::f32 ? 4 : 2);
  args.grad = static_cast<const char*>(args.grad) + from * (args.grad_dtype == DType::f32 ? 4 : 2);
  StreamSpec specs[kMaxStreams];
  const int streams = streams_of(args.param_dtype, args.format, args.amsgrad, specs);
  for (int k = 0; k < streams; ++k) {
    void*& data = args.states[static_cast<int>(specs[k].stream)];
    data = static_cast<char*>(data) + from / specs[k].per * specs[k].bytes;
  }
  args.first += from;
  args.n = count;
  return args;
}

// Addresses in the order of Stream. amsgrad is on where there is a vmax.
void take_states(const std::vector<Address>& states, AdamArgs& args) {
  if (states.size() != kMaxStreams) {
    throw std::invalid_argument("states: six addresses, 0 for those that the format has not got");
  }
  for (int k = 0; k < kMaxStreams; ++k) args.states[k] = at<void>(states[k]);
  args.amsgrad = args.states[static_cast<int>(Stream::vmax)] != nullptr;
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
using PlaceTuple = std::tuple<int, std::int64_t>;
using Segments = std::vector<std::tuple<int, std::int64_t, std::int64_t, std::int64_t>>;

FailureTuple as_tuple(const Failure& f) {
  return {f.error, op_name(f.op), f.file, f.chunk, f.offset, f.length};
}

constexpr const char* kStates[] = {"resident", "blank",    "stored",  "reading",
                                   "ready",    "updating", "writing", "lost"};
constexpr const char* kLanes[] = {"read", "update", "write", "wait"};

Family parse_family(const std::string& dtype, const std::string& format, bool amsgrad) {
  return {parse_dtype(dtype), parse_format(format), amsgrad};
}

nb::bytes as_bytes(const std::vector<std::uint32_t>& words) {
  return nb::bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(words[0]));
}

std::vector<std::uint32_t> as_words(const nb::bytes& bytes) {
  std::vector<std::uint32_t> words(bytes.size() / sizeof(std::uint32_t));
  if (!words.empty()) std::memcpy(words.data(), bytes.c_str(), words.size() * sizeof(words[0]));
  return words;
}

std::vector<char*> as_pointers(const std::vector<Address>& addresses) {
  std::vector<char*> pointers;
  for (Address address : addresses) pointers.push_back(at<char>(address));
  return pointers;
}

// [Note: Owners] Every address comes with its owner, a Python object that keeps the memory: the
// storage, for a tensor's can be exchanged. Owners are let go of with the GIL, when the pipeline
// has said that it is done with their memory: gradients parameter by parameter, weights, which a
// commit also reads where no gradient comes, with the step; all of them behind its destructor. They
// are taken and let go of under the GIL, and a step begins without leaving it, so no thread can
// take another's step for one that is over.
struct PyPipeline {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Pipeline> pipeline;
  std::vector<StepParameter> parameters;
  std::vector<AdamHyper> hypers;
  std::vector<char> expected;
  std::vector<std::vector<int>> parameters_of;  // by chunk
  nb::object ring_owner;
  std::vector<nb::object> resident_owners;
  std::vector<nb::object> weight_owners;                 // of the step, by parameter
  std::vector<std::vector<nb::object>> gradient_owners;  // of the step, by parameter

  PyPipeline(const PyEngine& py_engine, const std::optional<std::string>& isa, bool alternate,
             std::pair<int, int> team)
      : engine(py_engine.engine) {
    const Order order = alternate ? Order::alternating : Order::given;
    auto made = std::make_unique<Pipeline>(py_engine.get(), parse_isa(isa), order,
                                           Team{team.first, team.second});
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

  int add_chunk(const std::tuple<std::string, std::string, bool>& family, const Segments& segments,
                std::int64_t elements, const PlaceTuple& place,
                const std::vector<std::pair<Address, nb::object>>& resident, bool blank,
                const std::tuple<nb::bytes, nb::bytes>& checksums) {
    ChunkSpec spec{};
    std::vector<int> numbers;
    spec.family = std::apply(parse_family, family);
    for (const auto& [parameter, from, to, count] : segments) {
      spec.segments.push_back({parameter, from, to, count});
      numbers.push_back(parameter);
    }
    spec.elements = elements;
    std::tie(spec.place.file, spec.place.offset) = place;
    if (!resident.empty() && static_cast<int>(resident.size()) != Layout(spec).streams) {
      throw std::invalid_argument("a resident chunk names one address per stream");
    }
    for (std::size_t k = 0; k < resident.size(); ++k)
      spec.resident[k] = at<char>(resident[k].first);
    const int number = get().add_chunk(std::move(spec), blank, as_words(std::get<0>(checksums)),
                                       as_words(std::get<1>(checksums)));
    for (const auto& [address, owner] : resident) resident_owners.push_back(owner);
    parameters_of.push_back(std::move(numbers));
    return number;
  }

  void own_gradient(int parameter, const nb::object& owner) {
    if (!owner.is_none()) gradient_owners.at(parameter).push_back(owner);
  }

  // Lets go of what the pipeline is done with, of these parameters or with the whole step.
  void let_go(const std::vector<int>& done) {
    if (get().is_over()) {
      weight_owners.clear();
      for (auto& owners : gradient_owners) owners.clear();
      return;
    }
    for (int parameter : done) {
      if (static_cast<std::size_t>(parameter) < gradient_owners.size() &&
          get().is_published(parameter)) {
        gradient_owners[parameter].clear();
      }
    }
  }

  template <class Wait>
  FailureTuple wait(Wait until, const std::vector<int>& done = {}) {
    Failure failure;
    {
      nb::gil_scoped_release release;
      failure = until(get());
    }
    let_go(done);
    return as_tuple(failure);
  }

  // Hands a step over and, unless it is open, goes on in the background or is updated outside,
  // waits until it is published: one call, so that no Python exception can come between its
  // beginning, after which the gradients are being read, and its end.
  FailureTuple begin(
      const nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows,
      Hypers table, std::vector<nb::object> weights, std::vector<nb::object> gradients, bool open,
      bool capture, bool background, bool home_first, bool outside) {
    if (rows.shape(1) != 7 || table.shape(1) != 9) {
      throw std::invalid_argument("begin: rows have seven columns and hypers nine");
    }
    if (weights.size() != rows.shape(0) || gradients.size() != rows.shape(0)) {
      throw std::invalid_argument("begin: an owner for each row's weight and gradient");
    }
    parameters.resize(rows.shape(0));
    expected.assign(rows.shape(0), 0);
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
      parameters[i] = {at<void>(static_cast<Address>(rows(i, 0))),
                       at<void>(static_cast<Address>(rows(i, 1))),
                       static_cast<DType>(rows(i, 2)),
                       rows(i, 3) != 0,
                       static_cast<std::int32_t>(rows(i, 4)),
                       static_cast<std::uint64_t>(rows(i, 5))};
      expected[i] = rows(i, 6) != 0;
    }
    hypers.resize(table.shape(0));
    for (std::size_t h = 0; h < hypers.size(); ++h) {
      hypers[h] = {table(h, 0), table(h, 1), table(h, 2), table(h, 3), table(h, 4),
                   table(h, 5), table(h, 6), table(h, 7), table(h, 8)};
    }
    get().begin(parameters, hypers, {open, capture, background, home_first, outside}, expected);
    weight_owners = std::move(weights);
    gradient_owners.assign(rows.shape(0), {});
    for (std::size_t i = 0; i < gradients.size(); ++i)
      own_gradient(static_cast<int>(i), gradients[i]);
    if (open || background || outside) return as_tuple(get().failure());
    return wait([](Pipeline& native) { return native.wait_published(); });
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
      "slow_down",
      [](double disk_bytes_per_s, double update_elements_per_s) {
        disk_lane.set(disk_bytes_per_s);
        update_lane.set(update_elements_per_s);
      },
      nb::kw_only(), "disk_bytes_per_s"_a = 0.0, "update_elements_per_s"_a = 0.0,
      "for tests: no faster than this, on backend threads; 0: as fast as it goes");
  m.def(
      "adam_update",
      [](Address param, Address grad, const std::vector<Address>& states, std::int64_t n,
         const std::string& param_dtype, const std::string& grad_dtype, const std::string& format,
         std::int64_t first, std::uint64_t key, bool seed_master, const Hyper& hyper,
         const std::optional<std::string>& isa, bool on_pool) {
        AdamArgs args{};
        args.param = at<void>(param);
        args.grad = at<void>(grad);
        take_states(states, args);
        args.n = n;
        args.first = first;
        args.key = key;
        args.param_dtype = parse_dtype(param_dtype);
        args.grad_dtype = parse_dtype(grad_dtype);
        args.format = parse_format(format);
        args.seed_master = seed_master;
        args.hyper = parse_hyper(hyper);
        const Isa chosen = parse_isa(isa);
        nb::gil_scoped_release release;
        run_adam(args, chosen, on_pool);
      },
      "param"_a, "grad"_a, "states"_a, "n"_a, "param_dtype"_a, "grad_dtype"_a, "format"_a,
      "first"_a, "key"_a, "seed_master"_a, "hyper"_a, "isa"_a.none(), "on_pool"_a,
      "`states`: addresses of m, v, vmax, master, m_scale, v_scale; 0 where there is none");
  m.def("streams_of", &stream_tuples, "dtype"_a, "format"_a, "amsgrad"_a,
        "(name, bytes, per) of each stream: `bytes` for every `per` elements");
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

void bind_checksum(nb::module_& m) {
  m.def(
      "checksum",
      [](Address data, std::int64_t nbytes, std::uint32_t seed) {
        return checksum(at<const char>(data), nbytes, seed);
      },
      nb::call_guard<nb::gil_scoped_release>(), "data"_a, "nbytes"_a, "seed"_a = 0);
}

void bind_io(nb::module_& m) {
  m.def("set_thread_cores", &set_thread_cores, "cores"_a,
        "Threads of ours that start from now on run there only; none: anywhere");
  m.def("thread_cores", &thread_cores);
  m.def(
      "prefer_node",
      [](Address address, std::size_t nbytes, int node) {
        return prefer_node(at<void>(address), nbytes, node);
      },
      "address"_a, "nbytes"_a, "node"_a, "errno, or 0");
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
      .def("log_writes", [](const PyEngine& self) { self.get().write_log().start(); })
      .def(
          "logged_writes",
          [](const PyEngine& self) {
            nb::list writes;
            for (const LoggedWrite& write : self.get().write_log().take()) {
              writes.append(nb::make_tuple(write.file, write.offset,
                                           nb::bytes(write.bytes.data(), write.bytes.size())));
            }
            return writes;
          },
          nb::sig("def logged_writes(self) -> list[tuple[int, int, bytes]]"))
      .def("clear_faults", [](const PyEngine& self) { self.get().faults().clear(); });
}

nb::list layout_rows(const std::tuple<std::string, std::string, bool>& family,
                     std::int64_t elements) {
  ChunkSpec spec{};
  spec.family = std::apply(parse_family, family);
  spec.elements = elements;
  const Layout layout(spec);
  nb::list rows;
  for (int k = 0; k <= layout.streams; ++k) {
    const Layout::Part& part = layout.parts[k];
    rows.append(nb::make_tuple(part.width, part.per, part.file_at, part.slot_at, part.bytes));
  }
  return rows;
}

void bind_waits(nb::class_<PyPipeline>& c) {
  c.def("wait_published",
        [](PyPipeline& self) {
          return self.wait([](Pipeline& native) { return native.wait_published(); });
        })
      .def(
          "wait_parameters",
          [](PyPipeline& self, const std::vector<int>& parameters) {
            return self.wait([&](Pipeline& native) { return native.wait_parameters(parameters); },
                             parameters);
          },
          "parameters"_a)
      .def("wait_chunk",
           [](PyPipeline& self, int chunk) {
             return self.wait([&](Pipeline& native) { return native.wait_chunk(chunk); },
                              self.parameters_of.at(chunk));
           })
      .def("wait_written",
           [](PyPipeline& self) {
             return self.wait([](Pipeline& native) { return native.wait_written(); });
           })
      .def("quiesce",
           [](PyPipeline& self) {
             return self.wait([](Pipeline& native) { return native.quiesce(); });
           })
      .def("failure", [](PyPipeline& self) { return as_tuple(self.get().failure()); });
}

void bind_chunks(nb::class_<PyPipeline>& c) {
  c.def("state", [](PyPipeline& self,
                    int chunk) { return kStates[static_cast<int>(self.get().state(chunk))]; })
      .def("place",
           [](PyPipeline& self, int chunk) {
             const Place place = self.get().place(chunk);
             return PlaceTuple{place.file, place.offset};
           })
      .def("captured", [](PyPipeline& self, int chunk) { return self.get().captured(chunk); })
      .def("forget_capture",
           [](PyPipeline& self, int parameter) { self.get().forget_capture(parameter); })
      .def("set_target", [](PyPipeline& self, int chunk, int file,
                            std::int64_t offset) { self.get().set_target(chunk, {file, offset}); })
      .def(
          "checksums",
          [](PyPipeline& self, int chunk) {
            const Marks& marks = self.get().marks(chunk);
            return nb::make_tuple(as_bytes(marks.states), as_bytes(marks.weights));
          },
          "chunk"_a, nb::sig("def checksums(self, chunk: int) -> tuple[bytes, bytes]"))
      .def("rewritten",
           [](PyPipeline& self, int chunk, const std::vector<Address>& streams) {
             self.get().rewritten(chunk, as_pointers(streams).data());
           })
      .def("intact",
           [](PyPipeline& self, int chunk, const std::vector<Address>& streams) {
             return self.get().intact(chunk, as_pointers(streams).data());
           })
      .def("publish", [](PyPipeline& self, int parameter,
                         Address weight) { self.get().publish(parameter, at<void>(weight)); })
      .def("unpublish", [](PyPipeline& self, int parameter) { self.get().unpublish(parameter); })
      .def("unchanged", [](PyPipeline& self, int parameter, Address weight) {
        return self.get().unchanged(parameter, at<void>(weight));
      });
}

void bind_pipeline(nb::module_& m) {
  m.def("chunk_layout", &layout_rows, "family"_a, "elements"_a,
        "(width, per, offset in a file, offset in a slot, bytes) of each stream and the weight",
        nb::sig("def chunk_layout(family: tuple[str, str, bool], elements: int) -> "
                "list[tuple[int, int, int, int, int]]"));
  m.attr("UPDATE_BLOCK") = kUpdateBlock;
  nb::class_<PyPipeline> c(m, "Pipeline");
  c.def(nb::init<const PyEngine&, const std::optional<std::string>&, bool, std::pair<int, int>>(),
        "engine"_a, "isa"_a.none(), "alternate"_a, "team"_a)
      .def(
          "set_ring",
          [](PyPipeline& self, Address base, int slots, std::int64_t slot_bytes, nb::object owner) {
            self.get().set_ring({at<char>(base), slots, slot_bytes});
            self.ring_owner = std::move(owner);
          },
          "base"_a, "slots"_a, "slot_bytes"_a, "owner"_a.none())
      .def("add_chunk", &PyPipeline::add_chunk, "family"_a, "segments"_a, "elements"_a, "place"_a,
           "resident"_a, "blank"_a, "checksums"_a)
      .def("set_order",
           [](PyPipeline& self, std::vector<int> order) { self.get().set_order(std::move(order)); })
      .def("set_outside",
           [](PyPipeline& self, const std::vector<int>& chunks) { self.get().set_outside(chunks); })
      .def("order", [](PyPipeline& self) { return self.get().order(); })
      .def("prefetch", [](PyPipeline& self) { self.get().prefetch(); })
      .def("begin", &PyPipeline::begin, "rows"_a, "hypers"_a, "weights"_a, "gradients"_a,
           nb::kw_only(), "open"_a, "capture"_a, "background"_a, "home_first"_a, "outside"_a,
           "`weights` and `gradients`: each row's owners, or None")
      .def(
          "land",
          [](PyPipeline& self, int parameter, Address grad, int dtype, const nb::object& owner) {
            self.get().land(parameter, at<void>(grad), static_cast<DType>(dtype));
            self.own_gradient(parameter, owner);
          },
          "parameter"_a, "grad"_a, "dtype"_a, "owner"_a.none())
      .def(
          "land_pieces",
          [](PyPipeline& self, int chunk,
             const std::vector<std::tuple<int, Address, int, nb::object>>& pieces) {
            std::vector<PieceGradient> gradients;
            for (const auto& [parameter, grad, dtype, owner] : pieces) {
              gradients.push_back({parameter, at<void>(grad), static_cast<DType>(dtype)});
            }
            self.get().land_pieces(chunk, gradients);
            for (const auto& [parameter, grad, dtype, owner] : pieces) {
              self.own_gradient(parameter, owner);
            }
          },
          "chunk"_a, "pieces"_a)
      .def(
          "next_outside",
          [](PyPipeline& self, bool wait) {
            nb::gil_scoped_release release;
            const Outside outside = self.get().next_outside(wait);
            return std::tuple(outside.chunk, outside.slot);
          },
          nb::kw_only(), "wait"_a, "(chunk, slot): -1 where there is none")
      .def("outside_done", [](PyPipeline& self, int chunk) { self.get().outside_done(chunk); })
      .def("is_updated",
           [](PyPipeline& self, int chunk) {
             const bool updated = self.get().is_updated(chunk);
             if (updated) self.let_go(self.parameters_of.at(chunk));
             return updated;
           })
      .def("close", [](PyPipeline& self) { self.get().close(); })
      .def("is_published",
           [](PyPipeline& self, int parameter) {
             const bool published = self.get().is_published(parameter);
             if (published) self.let_go({parameter});
             return published;
           })
      .def(
          "counters",
          [](PyPipeline& self) {
            const PipelineCounters c = self.get().counters();
            nb::dict d;
            d["bytes_read"] = c.bytes_read;
            d["bytes_written"] = c.bytes_written;
            d["bytes_spared"] = c.bytes_spared;
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
  bind_waits(c);
  bind_chunks(c);
}

}  // namespace
}  // namespace stow

NB_MODULE(_native, m) {
  m.doc() = "The native core of tensorstow: kernels, file I/O and the update pipeline.";
  // What is alive when the interpreter ends (a model in a global, say) is no fault to report.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(stow::translate_system_error);
  stow::bind_checksum(m);
  stow::bind_kernels(m);
  stow::bind_io(m);
  stow::bind_pipeline(m);
}
