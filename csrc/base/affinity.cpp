#include "base/affinity.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>

namespace stow {
namespace {

constexpr int kBits = 8 * sizeof(unsigned long);

// As the kernel takes sets of cores and of nodes, of any size.
std::vector<unsigned long> mask_of(const std::vector<int>& numbers) {
  const int last = numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end());
  std::vector<unsigned long> mask(static_cast<std::size_t>(last / kBits + 1));
  for (const int number : numbers) {
    mask[static_cast<std::size_t>(number / kBits)] |= 1UL << number % kBits;
  }
  return mask;
}

struct Cores {
  int version;
  std::vector<int> numbers;
};

// Each stays for ever, for a thread that starts may read it; a run has one or two of them. No lock
// guards it: a fork could copy it locked.
std::atomic<const Cores*> g_cores{nullptr};

int set_affinity(const std::vector<int>& cores) {
  const std::vector<unsigned long> mask = mask_of(cores);
  // The thread 0 is the calling one, alone.
  return syscall(SYS_sched_setaffinity, 0, mask.size() * sizeof mask[0], mask.data()) < 0 ? errno
                                                                                          : 0;
}

}  // namespace

std::vector<int> thread_cores() {
  const Cores* cores = g_cores.load(std::memory_order_acquire);
  return cores == nullptr ? std::vector<int>{} : cores->numbers;
}

int thread_cores_version() {
  const Cores* cores = g_cores.load(std::memory_order_acquire);
  return cores == nullptr ? 0 : cores->version;
}

void set_thread_cores(const std::vector<int>& cores) {
  if (cores == thread_cores()) return;
  if (std::any_of(cores.begin(), cores.end(), [](int core) { return core < 0; })) {
    throw std::system_error(EINVAL, std::generic_category(), "a core below 0");
  }
  if (!cores.empty()) {  // tried by a temporary thread
    int error = 0;
    std::thread([&] { error = set_affinity(cores); }).join();
    if (error != 0) throw std::system_error(error, std::generic_category(), "sched_setaffinity");
  }
  g_cores.store(new Cores{thread_cores_version() + 1, cores}, std::memory_order_release);
}

void bind_thread() {
  const std::vector<int> cores = thread_cores();
  // It was tried before. Where all these cores have been taken from the process since, the thread
  // stays where the system has put it.
  if (!cores.empty()) set_affinity(cores);
}

int prefer_node(void* address, std::size_t bytes, int node) {
  if (node < 0) return EINVAL;
  const std::vector<unsigned long> mask = mask_of({node});
  // The kernel reads one bit less than the given number.
  const unsigned long bits = mask.size() * kBits + 1;
  return syscall(SYS_mbind, address, bytes, MPOL_PREFERRED, mask.data(), bits, 0) < 0 ? errno : 0;
}

}  // namespace stow
