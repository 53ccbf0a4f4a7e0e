// The allocator of large blocks: what is in use keeps its bytes, and freed pages are used again.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/caching_allocator.h"
#include "base/imports.h"
#include "check.h"

// Sanitizers replace malloc, and need addresses and mappings of the process themselves.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STOW_SANITIZED
#endif

namespace {

// Moves to refuse, as kernels before 6.17 do: the target is unmapped first, and another thread's
// block can be there at once.
int g_to_refuse = 0;
std::vector<std::pair<char*, std::size_t>> g_of_others;

}  // namespace

extern "C" {
void* __real_mremap(void* old, std::size_t old_size, std::size_t size, int flags, void* to);

void* __wrap_mremap(void* old, std::size_t old_size, std::size_t size, int flags, void* to) {
  if (g_to_refuse == 0) return __real_mremap(old, old_size, size, flags, to);
  --g_to_refuse;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  char* other = static_cast<char*>(mmap(to, size, PROT_READ | PROT_WRITE, kFlags, -1, 0));
  std::memset(other, 42, size);
  g_of_others.emplace_back(other, size);
  errno = EFAULT;
  return MAP_FAILED;
}
}

namespace stow {
namespace {

constexpr std::size_t kHuge = CachingAllocator::kHugePage;

// A block whose words are all its own number.
struct Filled {
  std::uint64_t* words;
  std::size_t count;
  std::uint64_t number;

  bool is_whole() const {
    for (std::size_t k = 0; k < count; k += 64) {
      if (words[k] != number + k) return false;
    }
    return true;
  }
};

Filled fill(CachingAllocator& allocator, std::size_t bytes, std::uint64_t number) {
  auto* words = static_cast<std::uint64_t*>(allocator.allocate(bytes));
  const Filled block{words, bytes / 8, number};
  for (std::size_t k = 0; k < block.count; k += 64) words[k] = number + k;
  return block;
}

std::size_t held(const CachingAllocator& allocator) {
  const auto bytes = allocator.bytes();
  return bytes.used + bytes.cached;
}

void test_the_next_of_a_size_takes_the_last() {
  CachingAllocator allocator;
  void* first = allocator.allocate(3 * kHuge);
  void* second = allocator.allocate(3 * kHuge);
  CHECK(first != second);
  CHECK(reinterpret_cast<std::uintptr_t>(first) % kHuge == 0);
  CHECK(allocator.free(first));
  CHECK(allocator.free(second));
  CHECK(allocator.allocate(3 * kHuge - 5) == second);
  CHECK(allocator.allocate(3 * kHuge) == first);
  CHECK(allocator.bytes().fresh == 6 * kHuge);
}

void test_pages_move_to_blocks_of_other_sizes() {
  CachingAllocator allocator;
  std::vector<void*> blocks;
  for (std::size_t k = 0; k < 8; ++k) blocks.push_back(fill(allocator, 2 * kHuge, k).words);
  for (void* block : blocks) CHECK(allocator.free(block));
  CHECK(held(allocator) == 16 * kHuge);

  const Filled large = fill(allocator, 5 * kHuge, 77);  // of three others
  const Filled small = fill(allocator, kHuge, 78);
  const Filled rest = fill(allocator, 10 * kHuge, 79);
  CHECK(large.is_whole() && small.is_whole() && rest.is_whole());
  CHECK(allocator.bytes().fresh == 16 * kHuge);
  CHECK(allocator.bytes().cached == 0);

  fill(allocator, kHuge, 80);
  CHECK(allocator.bytes().fresh == 17 * kHuge);
}

void test_blocks_of_others_are_not_freed() {
  CachingAllocator allocator;
  void* foreign = aligned_alloc(kHuge, kHuge);
  int local = 0;
  CHECK(!allocator.free(nullptr));
  CHECK(!allocator.free(&local));
  CHECK(!allocator.free(foreign));
  void* block = allocator.allocate(2 * kHuge);
  CHECK(!allocator.free(foreign));
  CHECK(!allocator.free(static_cast<char*>(block) + kHuge));
  CHECK(allocator.free(block));
  CHECK(!allocator.free(block));
  std::free(foreign);
}

void test_the_cache_is_emptied() {
  CachingAllocator allocator;
  const Filled kept = fill(allocator, 3 * kHuge, 1);
  CHECK(allocator.free(fill(allocator, 3 * kHuge, 2).words));
  allocator.empty_cache();
  CHECK(allocator.bytes().cached == 0);
  CHECK(held(allocator) == 3 * kHuge);
  CHECK(kept.is_whole());
}

// What was needed once goes back, and what each round needs stays.
void test_what_is_held_follows_the_use() {
  CachingAllocator allocator;
  CHECK(allocator.free(allocator.allocate(100 * kHuge)));
  CHECK(held(allocator) == 100 * kHuge);
  for (int k = 0; k < 4000 && held(allocator) > 4 * kHuge; ++k) {
    void* first = allocator.allocate(kHuge);
    CHECK(allocator.free(allocator.allocate(3 * kHuge)));
    CHECK(allocator.free(first));
  }
  CHECK(held(allocator) == 4 * kHuge);
  const std::size_t fresh = allocator.bytes().fresh;
  for (int k = 0; k < 1000; ++k) {
    void* first = allocator.allocate(kHuge);
    CHECK(allocator.free(allocator.allocate(3 * kHuge)));
    CHECK(allocator.free(first));
  }
  CHECK(allocator.bytes().fresh == fresh);
}

// Returns how many blocks had other bytes, or were not freed.
int wrong_of_drawn_blocks(unsigned seed, CachingAllocator& allocator) {
  int wrong = 0;
  std::mt19937 random(seed);
  std::vector<Filled> blocks;
  const auto give_back = [&](std::size_t at) {
    wrong += !blocks[at].is_whole() || !allocator.free(blocks[at].words);
    blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(at));
  };
  for (std::uint64_t k = 0; k < 2000; ++k) {
    if (blocks.size() < 12 && random() % 5 < 3) {
      const std::size_t bytes = 1 + random() % (6 * kHuge);
      blocks.push_back(fill(allocator, bytes, std::uint64_t{seed} << 48 | k << 24));
    } else if (!blocks.empty()) {
      give_back(random() % blocks.size());
    }
  }
  while (!blocks.empty()) give_back(blocks.size() - 1);
  return wrong;
}

void test_threads_share_it() {
  CachingAllocator allocator;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&, seed] { wrong += wrong_of_drawn_blocks(seed, allocator); });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(allocator.bytes().used == 0);
}

template <typename Function>
void in_child(Function function) {
  const pid_t child = fork();
  if (child == 0) {
    function();
    _exit(tally().failed == 0 ? 0 : 1);
  }
  CHECK(child > 0);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#ifndef STOW_SANITIZED
// A process may have 65,530 mappings. Beyond the limit pages are new: no allocation fails.
void test_mappings_are_bounded() {
  constexpr std::size_t kCount = 20000;
  CachingAllocator allocator;
  std::vector<void*> blocks;
  for (std::size_t k = 0; k < kCount; ++k) blocks.push_back(allocator.allocate(kHuge));
  for (void* block : blocks) CHECK(allocator.free(block));
  auto* whole = static_cast<char*>(allocator.allocate(kCount * kHuge));
  CHECK(whole != nullptr);
  for (std::size_t at : {std::size_t{0}, kCount / 2, kCount - 1}) whole[at * kHuge] = 1;
  CHECK(held(allocator) == kCount * kHuge);
  CHECK(allocator.free(whole));
  allocator.empty_cache();
  CHECK(held(allocator) == 0);
}

void test_without_memory_there_is_no_block() {
  in_child([] {
    CachingAllocator allocator;
    const Filled kept = fill(allocator, kHuge, 3);
    CHECK(allocator.free(allocator.allocate(64 * kHuge)));
    // No more addresses than there are: what is cached gives way.
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = 0;
    setrlimit(RLIMIT_AS, &limit);
    CHECK(allocator.allocate(65 * kHuge) == nullptr);
    CHECK(allocator.bytes().used == kHuge);
    CHECK(kept.is_whole());
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_AS, &limit);
    CHECK(fill(allocator, 65 * kHuge, 4).is_whole());
    CHECK(allocator.allocate(SIZE_MAX - 1) == nullptr);
    CHECK(allocator.allocate(SIZE_MAX / 4) == nullptr);
  });
}

#endif

void test_refused_moves_touch_nothing_of_others() {
  CachingAllocator allocator;
  const Filled kept = fill(allocator, 2 * kHuge, 1);
  for (int refused = 1; refused <= 4; ++refused) {
    for (std::uint64_t k = 0; k < 3; ++k)
      CHECK(allocator.free(fill(allocator, 4 * kHuge, k).words));
    std::vector<void*> blocks;
    for (std::uint64_t k = 0; k < 3; ++k) blocks.push_back(fill(allocator, 2 * kHuge, k).words);
    for (void* block : blocks) CHECK(allocator.free(block));
    g_to_refuse = refused;
    const Filled block = fill(allocator, 5 * kHuge, 77);
    CHECK(block.is_whole());
    CHECK(allocator.free(block.words));
    g_to_refuse = 0;
  }
  CHECK(!g_of_others.empty());
  for (const auto& [begin, size] : g_of_others) {
    CHECK(std::all_of(begin, begin + size, [](char byte) { return byte == 42; }));
    munmap(begin, size);
  }
  CHECK(kept.is_whole());
  CHECK(allocator.bytes().used == 2 * kHuge);
  allocator.empty_cache();
  CHECK(held(allocator) == 2 * kHuge);
}

// A part that a caller has locked is another mapping: older kernels do not move both at once.
void test_locked_parts_do_no_harm() {
  CachingAllocator allocator;
  for (std::uint64_t round = 0; round < 3; ++round) {
    const Filled block = fill(allocator, 4 * kHuge, round);
    mlock(block.words + 100000, 4096);
    CHECK(allocator.free(block.words));
    const Filled other = fill(allocator, (3 + round) * kHuge, round + 10);
    CHECK(other.is_whole());
    CHECK(allocator.free(other.words));
  }
  CHECK(allocator.bytes().used == 0);
  allocator.empty_cache();
  CHECK(held(allocator) == 0);
}

void test_a_forked_child_has_its_own() {
  CachingAllocator allocator;
  const Filled block = fill(allocator, 2 * kHuge, 9);
  CHECK(allocator.free(fill(allocator, 3 * kHuge, 10).words));
  in_child([&] {
    CHECK(block.is_whole());
    CHECK(fill(allocator, 3 * kHuge, 11).is_whole());
    CHECK(allocator.free(block.words));
    CHECK(fill(allocator, 5 * kHuge, 12).is_whole());
  });
  CHECK(block.is_whole());
}

void test_imports_are_found() {
  CHECK(imports_of("libstdc++.so.6", "malloc").size() == 1);
  CHECK(imports_of("libstdc++.so.6", "there is no such function").empty());
  CHECK(imports_of("libthere_is_none.so", "malloc").empty());
  CHECK(!cache_blocks_of("libthere_is_none.so"));
  CHECK(installed_allocator() == nullptr);
}

#ifndef STOW_SANITIZED
std::size_t g_calls = 0;

void* counted_malloc(std::size_t bytes) {
  ++g_calls;
  return std::malloc(bytes);
}

void test_an_import_is_replaced() {
  const auto found = imports_of("libstdc++.so.6", "malloc");
  void* const before = *found.at(0).slot;
  CHECK(replace_import(found[0], reinterpret_cast<void*>(counted_malloc)));
  const std::vector<int> made(1000);  // by operator new, which is in that library
  CHECK(replace_import(found[0], before));
  CHECK(made.size() == 1000);
  CHECK(g_calls > 0);
}
#endif

}  // namespace
}  // namespace stow

int main() {
  stow::test_the_next_of_a_size_takes_the_last();
  stow::test_pages_move_to_blocks_of_other_sizes();
  stow::test_blocks_of_others_are_not_freed();
  stow::test_the_cache_is_emptied();
  stow::test_what_is_held_follows_the_use();
  stow::test_threads_share_it();
#ifndef STOW_SANITIZED
  stow::test_mappings_are_bounded();
  stow::test_without_memory_there_is_no_block();
#endif
  stow::test_refused_moves_touch_nothing_of_others();
  stow::test_locked_parts_do_no_harm();
  stow::test_a_forked_child_has_its_own();
  stow::test_imports_are_found();
#ifndef STOW_SANITIZED
  stow::test_an_import_is_replaced();
#endif
  return stow::report();
}
