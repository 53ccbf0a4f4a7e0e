// Allocates large blocks; the pages of freed blocks become those of the next.
//
// [Note: Pages that move] A training allocates several times its peak in each step. If every freed
// block goes back to the system, each step waits for as many new pages, which the kernel clears. If
// blocks stay in a heap, they leave gaps that the next ones do not fit in. Here a freed block is
// kept. The next one of its size takes it as it is; one of another size takes its pages, which the
// kernel moves to another address without a copy (mremap). New pages come only when no kept one is
// left, so all that is held is what was in use at once.
//
// What is held follows the use. A window ends after allocations of kWindow times what is held; what
// was not in use at once in it or the one before goes back then, which can be once in each window.
// So in the long run one page in kWindow of those allocated is new, at most.
//
// Blocks consist of whole huge pages, where the kernel has them: they are cleared, looked up and
// moved at once. What a caller has said of a block's pages (mlock, mbind) goes with them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace stow {

class CachingAllocator {
 public:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  static constexpr std::size_t kWindow = 8;

  // Returns nullptr where the system has no memory left. Blocks begin at a huge page.
  void* allocate(std::size_t bytes);
  // Returns false where the block is of another allocator.
  bool free(void* block);
  // Returns kept blocks to the system, so many bytes of them rounded up to huge pages, or all.
  void empty_cache(std::size_t bytes = SIZE_MAX);

  struct BlockBytes {
    std::size_t used;
    std::size_t cached;  // of freed blocks that are kept
    std::size_t fresh;   // of all pages that came from the system so far
  };
  BlockBytes bytes() const;

  // A fork copies the lock as it is: it is held meanwhile.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  // Returns what is cached: else the parent would copy each page that it uses again.
  void unlock_in_child();

 private:
  // A range that the kernel has as one mapping, so that it can be moved by one call.
  struct Mapping {
    char* begin;
    std::size_t size;
  };
  struct MappedBlock {
    char* begin;
    std::size_t size;
    std::vector<Mapping> mappings;
  };
  using Age = std::uint64_t;

  MappedBlock take_same_size(std::size_t size);
  MappedBlock map(std::size_t size);
  char* reserve(std::size_t size);
  bool move_cached(MappedBlock& block, char*& to);
  void cache(MappedBlock block);
  void drop_cached(std::size_t bytes);
  Mapping cut_oldest(std::size_t most);
  void end_window();

  mutable std::mutex mutex_;
  std::unordered_map<void*, MappedBlock> used_;
  std::map<Age, MappedBlock> cached_;
  std::set<std::pair<std::size_t, Age>> by_size_;  // of cached blocks
  Age next_age_ = 0;
  std::size_t mappings_ = 0;
  BlockBytes bytes_{};
  std::size_t in_window_ = 0;  // bytes allocated
  std::size_t most_used_ = 0;  // in this window
  std::size_t most_used_before_ = 0;
  // Every block ever is between the two: most frees of others need no lock.
  std::atomic<std::uintptr_t> lowest_{UINTPTR_MAX};
  std::atomic<std::uintptr_t> highest_{0};
};

// Lets a shared library that is loaded ("libc10.so") get its large blocks from one allocator of the
// process, which lives as long as it: those that whole huge pages enlarge by a third at most, by
// posix_memalign. Returns false where that cannot be: the library is not loaded, does not import
// both functions, or gets them from another allocator than the C library's, the user's choice.
bool cache_blocks_of(const char* library);
// Returns nullptr where `cache_blocks_of` has replaced nothing.
CachingAllocator* installed_allocator();

}  // namespace stow
