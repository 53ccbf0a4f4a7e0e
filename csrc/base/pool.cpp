#include "base/pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "base/affinity.h"
#include "base/openmp_team.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace stow {
namespace {

// About 30 us of polling: longer than the gap between two kernels of one update, shorter than
// anyone else on the core would notice.
constexpr int kSpins = 1000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls until `value` differs from `seen`, then sleeps until it does.
std::uint32_t wait_for_change(const std::atomic<std::uint32_t>& value, std::uint32_t seen) {
  for (int spin = 0; spin < kSpins; ++spin) {
    const std::uint32_t now = value.load(std::memory_order_acquire);
    if (now != seen) return now;
    pause();
  }
  value.wait(seen, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

}  // namespace

// [Note: The gate] `gate` is the open bit plus the number of workers inside. A worker enters by
// adding one and belongs to the job only if it found the bit set; otherwise it subtracts it again
// without reading the job. The caller fills in the job while no worker is inside, sets the
// bit, works, clears the bit and waits for zero. So a job that is over before a sleeping worker
// wakes up does not wait for it.
//
// [Note: Shares] Each thread begins with its own share, neighbouring blocks in order, so that it
// streams through memory and has the same part of it in its cache at the next job. A thread
// that is done takes single blocks of the others' shares.
struct alignas(64) Share {
  std::atomic<std::int64_t> next{0};
  std::int64_t end = 0;
};

struct Pool::State {
  static constexpr std::uint32_t kOpen = 1u << 31;

  std::mutex turn;  // held by the caller whose job runs
  std::atomic<std::uint32_t> gate{0};
  std::atomic<std::uint32_t> epoch{0};  // counts jobs; what idle workers watch
  std::vector<Share> shares;            // one per thread
  std::size_t active = 1;               // threads that take part in the job
  const std::function<void(std::int64_t)>* body = nullptr;
  std::atomic<bool> stopping{false};
  std::atomic<int> threads{1};
  std::atomic<int> cores_version{0};  // that the workers are bound to
  std::vector<std::thread> workers;

  void work(std::size_t self) noexcept {
    for (std::size_t k = 0; self < active && k < active; ++k) {
      Share& share = shares[(self + k) % active];
      for (;;) {
        const std::int64_t block = share.next.fetch_add(1, std::memory_order_relaxed);
        if (block >= share.end) break;
        (*body)(block);
      }
    }
  }

  void deal(std::int64_t blocks, int threads_wanted) {
    active = shares.size();
    if (threads_wanted > 0) active = std::min(active, static_cast<std::size_t>(threads_wanted));
    const auto count = static_cast<std::int64_t>(active);
    for (std::int64_t k = 0; k < count; ++k) {
      shares[k].next.store(blocks * k / count, std::memory_order_relaxed);
      shares[k].end = blocks * (k + 1) / count;
    }
  }

  void leave() {
    if (gate.fetch_sub(1, std::memory_order_acq_rel) == 1) gate.notify_one();
  }

  void serve(std::size_t self) {
    bind_thread();
    std::uint32_t seen = 0;
    for (;;) {
      seen = wait_for_change(epoch, seen);
      if (stopping.load(std::memory_order_acquire)) return;
      if (gate.fetch_add(1, std::memory_order_acq_rel) & kOpen) work(self);
      leave();
    }
  }

  void announce() {
    epoch.fetch_add(1, std::memory_order_acq_rel);
    epoch.notify_all();
  }

  void start(int count) {
    stopping.store(false, std::memory_order_relaxed);
    epoch.store(0, std::memory_order_relaxed);
    cores_version.store(thread_cores_version(), std::memory_order_relaxed);
    try {
      shares = std::vector<Share>(static_cast<std::size_t>(count));
      for (int i = 1; i < count; ++i) workers.emplace_back([this, i] { serve(i); });
    } catch (...) {  // no more threads to be had: leave none behind
      stop();
      shares = std::vector<Share>(1);
      threads.store(1, std::memory_order_relaxed);
      throw;
    }
    threads.store(count, std::memory_order_relaxed);
  }

  void stop() {
    stopping.store(true, std::memory_order_release);
    announce();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }
};

// A job on threads that are not the pool's. If they are fewer, the others' shares are taken too.
struct TeamJob {
  Pool::State& state;
  std::atomic<std::size_t> threads{0};

  static void work(void* job) noexcept {
    auto& self = *static_cast<TeamJob*>(job);
    self.state.work(self.threads.fetch_add(1, std::memory_order_relaxed));
  }
};

Pool::Pool(int threads) : state_(std::make_unique<State>()) { state_->start(std::max(1, threads)); }

Pool::~Pool() { state_->stop(); }

int Pool::threads() const { return state_->threads.load(std::memory_order_relaxed); }

bool Pool::is_as(int threads) const {
  return threads == this->threads() &&
         thread_cores_version() == state_->cores_version.load(std::memory_order_relaxed);
}

void Pool::resize(int threads) {
  const std::lock_guard<std::mutex> lock(state_->turn);
  threads = std::max(1, threads);
  if (is_as(threads)) return;
  state_->stop();
  state_->start(threads);
}

void Pool::run(std::int64_t blocks, const std::function<void(std::int64_t)>& body, int threads) {
  State& s = *state_;
  const std::lock_guard<std::mutex> lock(s.turn);
  s.body = &body;
  s.deal(blocks, threads);
  if (s.active == 1 || blocks <= 1) {
    s.work(0);
    return;
  }
  TeamJob job{s};
  if (run_on_team(static_cast<int>(s.active), TeamJob::work, &job)) return;
  s.gate.fetch_or(State::kOpen, std::memory_order_acq_rel);
  s.announce();
  s.work(0);
  std::uint32_t inside = s.gate.fetch_and(~State::kOpen, std::memory_order_acq_rel) & ~State::kOpen;
  while (inside != 0) inside = wait_for_change(s.gate, inside);
}

namespace {

// No lock guards these two: a fork could copy it locked.
struct Owned {
  pid_t pid;
  Pool pool;
};
std::atomic<Owned*> g_owned{nullptr};
std::atomic<int> g_threads{1};

}  // namespace

Pool& pool() {
  const pid_t pid = getpid();
  const int threads = g_threads.load(std::memory_order_relaxed);
  Owned* owned = g_owned.load(std::memory_order_acquire);
  if (owned == nullptr || owned->pid != pid) {
    // The parent's object is left as it is: its threads and the state of its locks stayed behind.
    auto* fresh = new Owned{pid, Pool(threads)};
    if (g_owned.compare_exchange_strong(owned, fresh, std::memory_order_acq_rel)) {
      owned = fresh;
    } else {
      delete fresh;
    }
  }
  if (!owned->pool.is_as(threads)) owned->pool.resize(threads);
  return owned->pool;
}

void set_pool_threads(int threads) {
  g_threads.store(std::max(1, threads), std::memory_order_relaxed);
}

}  // namespace stow
