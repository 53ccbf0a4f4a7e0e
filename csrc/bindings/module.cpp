// The module: what its parts bind, and how native errors are raised.
#include <system_error>

#include "bindings/bindings.h"

namespace stow {
namespace {

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

}  // namespace
}  // namespace stow

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.doc() = "The native core of tensorstow: kernels, file I/O and the update pipeline.";
  // What is alive when the interpreter ends (a model in a global, say) is no fault to report.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(stow::translate_system_error);
  stow::bind_kernels(m);
  stow::bind_io(m);
  stow::bind_memory(m);
  stow::bind_pipeline(m);
}
