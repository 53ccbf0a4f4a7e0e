// Python's view of the allocator of large blocks.
#include "base/caching_allocator.h"
#include "base/memory_limit.h"
#include "bindings/bindings.h"

namespace stow {

void bind_memory(nb::module_& m) {
  m.def("cache_blocks_of", &cache_blocks_of, "library"_a,
        "let a loaded library allocate large blocks from a cache of freed ones; False where that"
        " cannot be");
  m.def(
      "allocator_bytes",
      [] {
        const CachingAllocator* allocator = installed_allocator();
        const auto bytes = allocator ? allocator->bytes() : CachingAllocator::BlockBytes{};
        return std::tuple{bytes.used, bytes.cached, bytes.fresh};
      },
      "(used, cached, fresh): of blocks in use, of freed ones, and of all that came from the"
      " system so far");
  m.def(
      "empty_cache",
      [](std::optional<std::size_t> bytes) {
        CachingAllocator* allocator = installed_allocator();
        if (allocator != nullptr) allocator->empty_cache(bytes.value_or(SIZE_MAX));
      },
      "bytes"_a = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
      "return freed blocks to the system: so many bytes of them, or all");
  m.def("set_memory_limit", &set_memory_limit, "bytes"_a,
        "refuse blocks with which the process would have more bytes in memory; 0: no limit");
  m.def("memory_limit", &memory_limit, "most bytes of the process in memory; 0: no limit");
  m.def("resident_bytes", &resident_bytes, "bytes of the process in memory now");
  m.def(
      "fits_memory_limit",
      [](std::size_t bytes) {
        CachingAllocator* allocator = installed_allocator();
        return allocator == nullptr || fits_limit(*allocator, bytes);
      },
      "bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
      "whether so many new bytes fit below the limit, after freed memory went back if need be");
}

}  // namespace stow
