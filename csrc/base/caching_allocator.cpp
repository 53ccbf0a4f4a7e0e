#include "base/caching_allocator.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/imports.h"
#include "base/memory_limit.h"

namespace stow {
namespace {

// Of 65,530 mappings that a process may have by default. Beyond, pages are returned and not moved.
constexpr std::size_t kMostMappings = 16384;
constexpr std::size_t kHugePage = CachingAllocator::kHugePage;

std::size_t round_up(std::size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

// Where the process has as many mappings as it may, a part of one cannot be unmapped: its addresses
// stay, and its pages go back all the same.
void unmap(char* begin, std::size_t size) {
  if (size > 0 && munmap(begin, size) != 0) madvise(begin, size, MADV_DONTNEED);
}

}  // namespace

void* CachingAllocator::allocate(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  const std::size_t size = round_up(std::max<std::size_t>(bytes, 1));
  const std::lock_guard guard(mutex_);
  MappedBlock block = take_same_size(size);
  if (block.begin == nullptr) block = map(size);
  if (block.begin == nullptr) return nullptr;

  bytes_.used += size;
  most_used_ = std::max(most_used_, bytes_.used);
  in_window_ += size;
  if (in_window_ > kWindow * (bytes_.used + bytes_.cached)) end_window();

  void* begin = block.begin;
  if (number(begin) < lowest_) lowest_ = number(begin);
  if (number(begin) > highest_) highest_ = number(begin);
  used_.emplace(begin, std::move(block));
  return begin;
}

bool CachingAllocator::free(void* block) {
  const std::uintptr_t address = number(block);
  if (address % kHugePage != 0 || address < lowest_ || address > highest_) return false;
  const std::lock_guard guard(mutex_);
  const auto found = used_.find(block);
  if (found == used_.end()) return false;
  bytes_.used -= found->second.size;
  cache(std::move(found->second));
  used_.erase(found);
  return true;
}

void CachingAllocator::unlock_in_child() {
  drop_cached(bytes_.cached);
  mutex_.unlock();
}

void CachingAllocator::empty_cache(std::size_t bytes) {
  const std::lock_guard guard(mutex_);
  drop_cached(bytes < bytes_.cached ? round_up(bytes) : bytes_.cached);
}

CachingAllocator::BlockBytes CachingAllocator::bytes() const {
  const std::lock_guard guard(mutex_);
  return bytes_;
}

// The one that was freed last: its pages are the likeliest to be in the processor's caches.
CachingAllocator::MappedBlock CachingAllocator::take_same_size(std::size_t size) {
  auto found = by_size_.upper_bound({size, UINT64_MAX});
  if (found == by_size_.begin() || std::prev(found)->first != size) return {};
  --found;
  auto node = cached_.extract(found->second);
  by_size_.erase(found);
  bytes_.cached -= size;
  return std::move(node.mapped());
}

CachingAllocator::MappedBlock CachingAllocator::map(std::size_t size) {
  for (;;) {
    MappedBlock block{reserve(size), size, {}};
    if (block.begin == nullptr) return {};
    char* to = block.begin;
    if (!move_cached(block, to)) continue;  // with less cached
    const auto rest = static_cast<std::size_t>(block.begin + size - to);
    if (rest == 0) return block;
    if (mprotect(to, rest, PROT_READ | PROT_WRITE) != 0) {
      mappings_ -= block.mappings.size();
      unmap(block.begin, size);
      return {};
    }
    madvise(to, rest, MADV_HUGEPAGE);  // refused where there are none: small ones do
    block.mappings.push_back({to, rest});
    ++mappings_;
    bytes_.fresh += rest;
    return block;
  }
}

// Addresses without memory. Where a limit of addresses is reached, kept blocks give theirs.
char* CachingAllocator::reserve(std::size_t size) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  const std::size_t around = size + kHugePage;  // some range in it begins at a huge page
  void* reserved = mmap(nullptr, around, PROT_NONE, kFlags, -1, 0);
  if (reserved == MAP_FAILED) {
    drop_cached(bytes_.cached);
    reserved = mmap(nullptr, around, PROT_NONE, kFlags, -1, 0);
  }
  if (reserved == MAP_FAILED) return nullptr;
  char* const start = static_cast<char*>(reserved);
  const std::size_t before = round_up(number(start)) - number(start);
  unmap(start, before);
  unmap(start + before + size, kHugePage - before);
  return start + before;
}

// Takes as many cached bytes as the block has, and advances `to` past those whose pages were moved.
// Returns false if the kernel has refused a move; the block is gone then.
bool CachingAllocator::move_cached(MappedBlock& block, char*& to) {
  for (std::size_t left = block.size; left > 0 && bytes_.cached > 0;) {
    const Mapping from = cut_oldest(left);
    left -= from.size;
    if (mappings_ >= kMostMappings) {
      unmap(from.begin, from.size);
      continue;
    }
    if (mremap(from.begin, from.size, from.size, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) {
      // A caller has locked or bound a part of it, say. Older kernels have unmapped the target
      // before they refuse: it may be another thread's by now, and is left alone.
      unmap(from.begin, from.size);
      unmap(block.begin, static_cast<std::size_t>(to - block.begin));
      char* const behind = to + from.size;
      unmap(behind, static_cast<std::size_t>(block.begin + block.size - behind));
      mappings_ -= block.mappings.size();
      return false;
    }
    block.mappings.push_back({to, from.size});
    ++mappings_;
    to += from.size;
  }
  return true;
}

void CachingAllocator::cache(MappedBlock block) {
  bytes_.cached += block.size;
  by_size_.emplace(block.size, next_age_);
  cached_.emplace(next_age_, std::move(block));
  ++next_age_;
}

void CachingAllocator::drop_cached(std::size_t bytes) {
  for (std::size_t left = bytes; left > 0 && bytes_.cached > 0;) {
    const Mapping from = cut_oldest(left);
    left -= from.size;
    unmap(from.begin, from.size);
  }
}

// Cuts a mapping, or the end of one, off the block that has been cached longest.
CachingAllocator::Mapping CachingAllocator::cut_oldest(std::size_t most) {
  const auto oldest = cached_.begin();
  const auto [age, block] = std::pair{oldest->first, &oldest->second};
  by_size_.erase({block->size, age});

  Mapping& last = block->mappings.back();
  const std::size_t size = std::min(last.size, most);
  last.size -= size;
  const Mapping cut{last.begin + last.size, size};
  block->size -= size;
  bytes_.cached -= size;
  if (last.size == 0) {
    block->mappings.pop_back();
    --mappings_;
  }
  if (block->mappings.empty()) {
    cached_.erase(oldest);
  } else {
    by_size_.emplace(block->size, age);
  }
  return cut;
}

void CachingAllocator::end_window() {
  const std::size_t held = bytes_.used + bytes_.cached;
  const std::size_t most = std::max(most_used_, most_used_before_);
  if (held > most) drop_cached(held - most);
  most_used_before_ = most_used_;
  most_used_ = bytes_.used;
  in_window_ = 0;
}

namespace {

std::atomic<CachingAllocator*> g_allocator{nullptr};  // never deleted: tensors outlive statics
std::mutex g_below_limit;  // of allocations while there is a limit of memory; before an allocator's

// Blocks that whole huge pages would enlarge by more than a third stay with the C library.
bool is_large(std::size_t bytes) { return round_up(bytes) - bytes <= bytes / 3; }

int allocate_unlimited(void** block, std::size_t alignment, std::size_t bytes) {
  CachingAllocator& allocator = *installed_allocator();
  if (is_large(bytes) && alignment <= kHugePage) {
    if (void* begin = allocator.allocate(bytes); begin != nullptr) {
      *block = begin;
      return 0;
    }
  }
  const int error = posix_memalign(block, alignment, bytes);
  if (error != ENOMEM) return error;
  allocator.empty_cache();  // which may have had what is missing
  return posix_memalign(block, alignment, bytes);
}

// Fills in the pages that have no memory yet.
void touch_pages(char* block, std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE: Linux 5.14
  if (bytes < kPage) return;
  if (number(block) % kPage == 0 && madvise(block, bytes, kPopulateWrite) == 0) return;
  for (std::size_t at = 0; at < bytes; at += kPage) *static_cast<volatile char*>(block + at) = 0;
}

int allocate_aligned(void** block, std::size_t alignment, std::size_t bytes) {
  if (memory_limit() == 0) return allocate_unlimited(block, alignment, bytes);
  // What is asked for is touched before anybody else asks: the kernel counts what was touched.
  const std::lock_guard guard(g_below_limit);
  CachingAllocator& allocator = *installed_allocator();
  const bool large = is_large(bytes) && alignment <= kHugePage;
  const bool fits =
      large ? large_fits_limit(allocator, round_up(bytes)) : small_fits_limit(allocator, bytes);
  if (!fits) return ENOMEM;
  const int error = allocate_unlimited(block, alignment, bytes);
  if (error == 0) touch_pages(static_cast<char*>(*block), bytes);
  return error;
}

void free_block(void* block) {
  if (!installed_allocator()->free(block)) std::free(block);
}

// The C library keeps freed memory for blocks up to the largest that it has seen freed. It sees
// none of ours, and would return what smaller ones share to the system, over and over.
void raise_threshold_of_c_library() {
  constexpr std::size_t kLargest = (std::size_t{32} << 20) - (std::size_t{64} << 10);
  void* volatile block = std::malloc(kLargest);
  std::free(block);
}

const char* library_of(const void* function) {
  Dl_info info{};
  const bool found = dladdr(function, &info) != 0 && info.dli_fname != nullptr;
  return found ? info.dli_fname : "";
}

// A slot has the C library's function, or leads to the loader, which looks it up at the first call.
bool is_of_c_library(const char* function, const std::vector<Import>& imports,
                     const char* library) {
  const auto is_c = [](const void* address) {
    return std::strstr(library_of(address), "/libc.so") != nullptr;
  };
  return is_c(dlsym(RTLD_DEFAULT, function)) &&
         std::all_of(imports.begin(), imports.end(), [&](const Import& import) {
           return is_c(*import.slot) || std::strstr(library_of(*import.slot), library) != nullptr;
         });
}

}  // namespace

CachingAllocator* installed_allocator() { return g_allocator.load(std::memory_order_acquire); }

bool cache_blocks_of(const char* library) {
  static std::mutex mutex;
  static bool done = false;
  const std::lock_guard guard(mutex);
  if (done) return true;
  const auto frees = imports_of(library, "free");
  const auto allocations = imports_of(library, "posix_memalign");
  if (frees.empty() || allocations.empty()) return false;
  if (!is_of_c_library("free", frees, library)) return false;
  if (!is_of_c_library("posix_memalign", allocations, library)) return false;

  if (installed_allocator() == nullptr) {
    g_allocator.store(new CachingAllocator, std::memory_order_release);
    pthread_atfork(
        [] {
          g_below_limit.lock();
          installed_allocator()->lock();
        },
        [] {
          installed_allocator()->unlock();
          g_below_limit.unlock();
        },
        [] {
          installed_allocator()->unlock_in_child();
          g_below_limit.unlock();
        });
  }
  // `free` first: a block that is allocated in between is the C library's.
  for (const Import& import : frees) {
    if (!replace_import(import, reinterpret_cast<void*>(free_block))) return false;
  }
  for (const Import& import : allocations) {
    if (!replace_import(import, reinterpret_cast<void*>(allocate_aligned))) return false;
  }
  raise_threshold_of_c_library();
  done = true;
  return true;
}

}  // namespace stow
