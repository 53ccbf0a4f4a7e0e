// Files: I/O engines, transfers that are waited for, where threads run and memory lies.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <stdexcept>

#include "base/affinity.h"
#include "base/trace.h"
#include "bindings/bindings.h"
#include "io/direct.h"

namespace stow {

const char* op_name(Op op) { return op == Op::read ? "read" : "write"; }

PyEngine::PyEngine(const std::string& backend, int depth, std::int64_t block_bytes, int drives) {
  if (depth < 1 || drives < 1 || block_bytes < 4096 || block_bytes % 4096 != 0) {
    throw std::invalid_argument(
        "depth and drives must be at least 1, block_bytes a multiple of 4096");
  }
  const EngineOptions options{depth, block_bytes, drives};
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

Engine& PyEngine::get() const {
  if (!engine->in_owner())
    throw std::runtime_error("an I/O engine does not live on in a forked process");
  return *engine;
}

namespace {

Op parse_op(const std::string& name) {
  if (name == "read") return Op::read;
  if (name == "write") return Op::write;
  throw std::invalid_argument("operation " + name + ": one of read, write");
}

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

}  // namespace

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
      .def(nb::init<const std::string&, int, std::int64_t, int>(), "backend"_a, "depth"_a = 32,
           "block_bytes"_a = 1 << 20, "drives"_a = 1)
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

}  // namespace stow
