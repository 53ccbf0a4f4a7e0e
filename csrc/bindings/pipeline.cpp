// The update pipeline.
#include "pipeline/pipeline.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/step_rows.h"

namespace stow {
namespace {

using Ints = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FailureTuple = std::tuple<int, std::string, int, int, std::int64_t, std::int64_t>;
using HyperTuple = std::tuple<float, float, float, float, float, float, float, float, float, float>;
using FamilyTuple = std::tuple<std::string, std::string, bool, bool>;
using PlaceTuple = std::tuple<int, std::int64_t>;
using Segments = std::vector<std::tuple<int, std::int64_t, std::int64_t, std::int64_t>>;

FailureTuple as_tuple(const Failure& f) {
  return {f.error, op_name(f.op), f.file, f.chunk, f.offset, f.length};
}

constexpr const char* kStates[] = {"resident", "blank",    "stored",  "reading",
                                   "ready",    "updating", "writing", "failed"};
constexpr const char* kLanes[] = {"read", "update", "write", "wait"};

Caller parse_caller(const std::string& name) {
  if (name == "waits") return Caller::waits;
  if (name == "computes") return Caller::computes;
  if (name == "helps") return Caller::helps;
  if (name == "launches") return Caller::launches;
  if (name == "updates") return Caller::updates;
  throw std::invalid_argument("caller " + name +
                              ": one of waits, computes, helps, launches, updates");
}

Family parse_family(const std::string& dtype, const std::string& format, bool amsgrad, bool ema) {
  return {parse_dtype(dtype), parse_format(format), amsgrad, ema};
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
// storage, as a tensor's can be replaced. Owners are released when the pipeline has finished with
// their memory: gradients parameter by parameter; weights, which a commit also reads without a
// gradient, with the step; all of them after its destructor. They are taken and released under the
// GIL, and a step begins without leaving it, so no thread can mistake a new step for one that is
// over.
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
             std::tuple<int, int, int> team)
      : engine(py_engine.engine) {
    const Order order = alternate ? Order::alternating : Order::given;
    const auto [whole, few, most] = team;
    auto made =
        std::make_unique<Pipeline>(py_engine.get(), parse_isa(isa), order, Team{whole, few, most});
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

  int add_chunk(const FamilyTuple& family, const Segments& segments, std::int64_t elements,
                const PlaceTuple& place,
                const std::vector<std::pair<Address, nb::object>>& resident, bool blank,
                const std::tuple<nb::bytes, nb::bytes>& checksums, bool is_small) {
    ChunkSpec spec{};
    spec.is_small = is_small;
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

  // Releases owners of memory that the pipeline has finished with: these parameters' or all.
  void release_owners(const std::vector<int>& done) {
    if (get().progress().is_over()) {
      weight_owners.clear();
      for (auto& owners : gradient_owners) owners.clear();
      return;
    }
    for (int parameter : done) {
      if (static_cast<std::size_t>(parameter) < gradient_owners.size() &&
          get().progress().is_published(parameter)) {
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
    release_owners(done);
    return as_tuple(failure);
  }

  // Hands a step over and, unless it is open, goes on in the background or leaves chunks,
  // waits until it is published: one call, so that no Python exception can come between its
  // beginning, after which the gradients are being read, and its end.
  FailureTuple begin(
      const nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows,
      const std::vector<HyperTuple>& table, std::vector<nb::object> weights,
      std::vector<nb::object> gradients, bool open, bool capture, bool resident_first,
      bool newest_first, bool undoable, const std::string& caller) {
    if (rows.shape(1) != 9) throw std::invalid_argument("begin: rows have nine columns");
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
                       static_cast<std::uint64_t>(rows(i, 5)),
                       at<void>(static_cast<Address>(rows(i, 8))),
                       rows(i, 7) != 0};
      expected[i] = rows(i, 6) != 0;
    }
    set_hypers(table);
    const StepSpec step{.open = open,
                        .capture = capture,
                        .resident_first = resident_first,
                        .newest_first = newest_first,
                        .undoable = undoable,
                        .caller = parse_caller(caller)};
    const bool goes_on = open || step.caller != Caller::waits;
    get().begin(parameters, hypers, step, expected, goes_on);
    weight_owners = std::move(weights);
    gradient_owners.assign(rows.shape(0), {});
    for (std::size_t i = 0; i < gradients.size(); ++i)
      own_gradient(static_cast<int>(i), gradients[i]);
    return goes_on ? as_tuple(get().progress().failure()) : run();
  }

  // A whole step by rows that were gathered; returns when it is published.
  FailureTuple step(StepRows& rows, const std::vector<HyperTuple>& table) {
    set_hypers(table);
    get().begin(rows.parameters(), hypers, StepSpec{}, {}, false);
    weight_owners = rows.take_weights();
    gradient_owners = rows.take_gradients();
    return run();
  }

  void set_hypers(const std::vector<HyperTuple>& table) {
    hypers.clear();
    for (const HyperTuple& row : table) {
      hypers.push_back(std::apply([](auto... values) { return AdamHyper{values...}; }, row));
    }
  }

  FailureTuple run() {
    return wait([](Pipeline& native) { return native.run(); });
  }
};

nb::list layout_rows(const FamilyTuple& family, std::int64_t elements, bool is_small) {
  ChunkSpec spec{};
  spec.is_small = is_small;
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
          return self.wait([](Pipeline& native) { return native.progress().wait_published(); });
        })
      .def(
          "wait_parameters",
          [](PyPipeline& self, const std::vector<int>& parameters) {
            return self.wait(
                [&](Pipeline& native) { return native.progress().wait_parameters(parameters); },
                parameters);
          },
          "parameters"_a)
      .def("wait_chunk",
           [](PyPipeline& self, int chunk) {
             return self.wait([&](Pipeline& native) { return native.progress().wait_chunk(chunk); },
                              self.parameters_of.at(chunk));
           })
      .def("help",
           [](PyPipeline& self) {
             nb::gil_scoped_release release;
             self.get().help();
           })
      .def("changes", [](PyPipeline& self) { return self.get().progress().changes(); })
      .def(
          "wait_change",
          [](PyPipeline& self, std::int64_t seen) {
            return self.wait([&](Pipeline& native) { return native.progress().wait_change(seen); });
          })
      .def("signal",
           [](PyPipeline& self) {
             nb::gil_scoped_release release;
             self.get().progress().signal();
           })
      .def("wait_written",
           [](PyPipeline& self) {
             return self.wait([](Pipeline& native) { return native.progress().wait_written(); });
           })
      .def("quiesce",
           [](PyPipeline& self) {
             return self.wait([](Pipeline& native) { return native.quiesce(); });
           })
      .def("failure", [](PyPipeline& self) { return as_tuple(self.get().progress().failure()); });
}

void bind_chunks(nb::class_<PyPipeline>& c) {
  c.def("state",
        [](PyPipeline& self, int chunk) {
          return kStates[static_cast<int>(self.get().ledger().state(chunk))];
        })
      .def("place",
           [](PyPipeline& self, int chunk) {
             const DiskPosition place = self.get().ledger().place(chunk);
             return PlaceTuple{place.file, place.offset};
           })
      .def("captured",
           [](PyPipeline& self, int chunk) { return self.get().ledger().captured(chunk); })
      .def("forget_capture",
           [](PyPipeline& self, int parameter) { self.get().ledger().forget_capture(parameter); })
      .def("target",
           [](PyPipeline& self, int chunk) {
             const DiskPosition target = self.get().ledger().target(chunk);
             return PlaceTuple{target.file, target.offset};
           })
      .def("set_spare",
           [](PyPipeline& self, int chunk, int file, std::int64_t offset) {
             self.get().ledger().set_spare(chunk, {file, offset});
           })
      .def("set_target",
           [](PyPipeline& self, int chunk, int file, std::int64_t offset) {
             self.get().ledger().set_target(chunk, {file, offset});
           })
      .def(
          "checksums",
          [](PyPipeline& self, int chunk) {
            const ChunkChecksums& checksums = self.get().ledger().checksums(chunk);
            return nb::make_tuple(as_bytes(checksums.states), as_bytes(checksums.weights));
          },
          "chunk"_a, nb::sig("def checksums(self, chunk: int) -> tuple[bytes, bytes]"))
      .def("rewritten",
           [](PyPipeline& self, int chunk, const std::vector<Address>& streams) {
             self.get().ledger().rewritten(chunk, as_pointers(streams).data());
           })
      .def("intact",
           [](PyPipeline& self, int chunk, const std::vector<Address>& streams) {
             return self.get().ledger().intact(chunk, as_pointers(streams).data());
           })
      .def("record_weight",
           [](PyPipeline& self, int parameter, Address weight) {
             self.get().ledger().record_weight(parameter, at<void>(weight));
           })
      .def("forget_weight",
           [](PyPipeline& self, int parameter) { self.get().ledger().forget_weight(parameter); })
      .def("unchanged", [](PyPipeline& self, int parameter, Address weight) {
        return self.get().ledger().unchanged(parameter, at<void>(weight));
      });
}

}  // namespace

void bind_pipeline(nb::module_& m) {
  m.def(
      "chunk_layout", &layout_rows, "family"_a, "elements"_a, "is_small"_a,
      "(width, per, offset in a file, offset in a slot, bytes) of each stream and the weight",
      nb::sig(
          "def chunk_layout(family: tuple[str, str, bool, bool], elements: int, is_small: bool) -> "
          "list[tuple[int, int, int, int, int]]"));
  m.attr("UPDATE_BLOCK") = kUpdateBlock;
  bind_step_rows(m);
  nb::class_<PyPipeline> c(m, "Pipeline");
  c.def(nb::init<const PyEngine&, const std::optional<std::string>&, bool,
                 std::tuple<int, int, int>>(),
        "engine"_a, "isa"_a.none(), "alternate"_a, "team"_a)
      .def(
          "set_ring",
          [](PyPipeline& self, Address base, std::pair<int, std::int64_t> slots,
             std::pair<int, std::int64_t> small, nb::object owner) {
            self.get().set_ring(
                {at<char>(base), slots.first, slots.second, small.first, small.second});
            self.ring_owner = std::move(owner);
          },
          "base"_a, "slots"_a, "small_slots"_a, "owner"_a.none())
      .def("add_chunk", &PyPipeline::add_chunk, "family"_a, "segments"_a, "elements"_a, "place"_a,
           "resident"_a, "blank"_a, "checksums"_a, "is_small"_a)
      .def("set_order",
           [](PyPipeline& self, std::vector<int> order) { self.get().set_order(std::move(order)); })
      .def("set_deferring", [](PyPipeline& self, const std::vector<int>& chunks,
                               bool defers) { self.get().ledger().set_deferring(chunks, defers); })
      .def("want", [](PyPipeline& self,
                      const std::vector<int>& chunks) { self.get().ledger().want(chunks); })
      .def("lagging",
           [](PyPipeline& self, int parameter) { return self.get().ledger().lagging(parameter); })
      .def("set_caller_chunks",
           [](PyPipeline& self, const std::vector<int>& chunks) {
             self.get().set_caller_chunks(chunks);
           })
      .def("order", [](PyPipeline& self) { return self.get().order(); })
      .def("prefetch", [](PyPipeline& self) { self.get().prefetch(); })
      .def("begin", &PyPipeline::begin, "rows"_a, "hypers"_a, "weights"_a, "gradients"_a,
           nb::kw_only(), "open"_a, "capture"_a, "resident_first"_a, "newest_first"_a, "undoable"_a,
           "caller"_a, "`weights` and `gradients`: each row's owners, or None")
      .def("step", &PyPipeline::step, "rows"_a, "hypers"_a)
      .def(
          "add_gradient",
          [](PyPipeline& self, int parameter, Address grad, int dtype, const nb::object& owner) {
            self.get().add_gradient(parameter, at<void>(grad), static_cast<DType>(dtype));
            self.own_gradient(parameter, owner);
          },
          "parameter"_a, "grad"_a, "dtype"_a, "owner"_a.none())
      .def(
          "add_chunk_gradients",
          [](PyPipeline& self, int chunk,
             const std::vector<std::tuple<int, Address, int, nb::object>>& pieces) {
            std::vector<PieceGradient> gradients;
            for (const auto& [parameter, grad, dtype, owner] : pieces) {
              gradients.push_back({parameter, at<void>(grad), static_cast<DType>(dtype)});
            }
            self.get().add_chunk_gradients(chunk, gradients);
            for (const auto& [parameter, grad, dtype, owner] : pieces) {
              self.own_gradient(parameter, owner);
            }
          },
          "chunk"_a, "pieces"_a)
      .def(
          "acquire_chunk",
          [](PyPipeline& self, bool wait) {
            nb::gil_scoped_release release;
            const AcquiredChunk acquired = self.get().acquire_chunk(wait);
            return std::tuple(acquired.chunk, acquired.slot);
          },
          nb::kw_only(), "wait"_a, "(chunk, slot): -1 where there is none")
      .def("release_chunk", [](PyPipeline& self, int chunk) { self.get().release_chunk(chunk); })
      .def("is_updated",
           [](PyPipeline& self, int chunk) {
             const bool updated = self.get().progress().is_updated(chunk);
             if (updated) self.release_owners(self.parameters_of.at(chunk));
             return updated;
           })
      .def("close", [](PyPipeline& self) { self.get().close(); })
      .def("confirm", [](PyPipeline& self) { self.get().undoing().confirm(); })
      .def("undo",
           [](PyPipeline& self) {
             return self.wait([](Pipeline& native) { return native.undoing().undo(); });
           })
      .def("is_published",
           [](PyPipeline& self, int parameter) {
             const bool published = self.get().progress().is_published(parameter);
             if (published) self.release_owners({parameter});
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
            d["small_high_water"] = c.small_high_water;
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

}  // namespace stow
