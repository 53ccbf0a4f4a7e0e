// Shared by the files of this folder. They alone use Python; every call that can wait releases the
// GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>

#include "io/engine.h"
#include "kernels/kernels.h"

namespace stow {

namespace nb = nanobind;
using namespace nb::literals;

// What Python has of a tensor's memory.
using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Raise ValueError for names that there are not.
DType parse_dtype(const std::string& name);
Isa parse_isa(const std::optional<std::string>& name);  // none: the best one
StateFormat parse_format(const std::string& name);

// Engines and pipelines own threads. In a forked child those do not exist, so the child lets the
// object be.
template <typename T>
struct LeaveInChild {
  void operator()(T* object) const {
    if (object->in_owner()) delete object;
  }
};

// An I/O engine as Python holds it.
struct PyEngine {
  std::shared_ptr<Engine> engine;

  PyEngine(const std::string& backend, int depth, std::int64_t block_bytes, int drives);
  // Raises RuntimeError in a forked process.
  Engine& get() const;
};

const char* op_name(Op op);

void bind_kernels(nb::module_& m);
void bind_io(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_pipeline(nb::module_& m);

}  // namespace stow
