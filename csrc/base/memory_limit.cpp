#include "base/memory_limit.h"

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "base/caching_allocator.h"

namespace stow {
namespace {

// Small blocks mostly take memory that is there: the kernel is asked once in so many bytes.
constexpr std::size_t kPace = std::size_t{4} << 20;
// Left free for small blocks until the kernel is asked again, and for huge pages that they begin.
constexpr std::size_t kSpare = kPace + 2 * CachingAllocator::kHugePage;

std::atomic<std::size_t> g_limit{0};
std::atomic<std::size_t> g_small{0};   // bytes since the kernel was asked
std::atomic<std::size_t> g_shared{0};  // bytes in files and shared memory at the limit's setting

struct ResidentBytes {
  std::size_t all;
  std::size_t shared;
};

ResidentBytes read_resident() {
  const int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  char text[128] = {};
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return {};
  char* at = text;
  std::strtoull(at, &at, 10);  // mapped pages
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t all = std::strtoull(at, &at, 10) * page;
  return {all, std::strtoull(at, nullptr, 10) * page};
}

bool fits(std::size_t fresh) {
  const std::size_t limit = g_limit;
  if (limit == 0) return true;
  const std::size_t resident = resident_bytes();
  return resident != 0 && resident + fresh + kSpare <= limit;
}

}  // namespace

void set_memory_limit(std::size_t bytes) {
  g_shared = read_resident().shared;
  g_limit = bytes;
}

std::size_t memory_limit() { return g_limit; }

std::size_t resident_bytes() {
  const ResidentBytes now = read_resident();
  if (now.all == 0 || g_limit == 0) return now.all;
  return now.all - now.shared + std::min<std::size_t>(now.shared, g_shared);
}

bool fits_limit(CachingAllocator& allocator, std::size_t bytes) {
  if (fits(bytes)) return true;
  allocator.empty_cache();
  malloc_trim(0);
  return fits(bytes);
}

bool large_fits_limit(CachingAllocator& allocator, std::size_t bytes) {
  if (g_limit == 0) return true;
  return fits(bytes - std::min(allocator.bytes().cached, bytes)) || fits_limit(allocator, bytes);
}

bool small_fits_limit(CachingAllocator& allocator, std::size_t bytes) {
  if (g_limit == 0 || g_small.fetch_add(bytes) + bytes < kPace) return true;
  g_small = 0;
  return fits_limit(allocator, bytes);
}

}  // namespace stow
