// The backend that always works: threads that block in pread and pwrite.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "base/affinity.h"
#include "base/metered.h"
#include "io/engine.h"

namespace stow {
namespace {

std::int64_t attempt(const Block& block, const FaultEffect& fault) {
  if (fault.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(fault.delay_us));
  if (disk_lane.is_on()) {
    std::this_thread::sleep_until(disk_lane.take(block.length, Metered::Clock::now()));
  }
  if (fault.error != 0) return -fault.error;
  std::int64_t length = block.length - block.settled;
  if (fault.max_bytes > 0) length = std::min(length, fault.max_bytes);
  char* data = block.data + block.settled;
  const off_t offset = block.offset + block.settled;
  const ssize_t moved = block.op == Op::read ? pread(block.fd, data, length, offset)
                                             : pwrite(block.fd, data, length, offset);
  return moved < 0 ? -errno : moved;
}

class ThreadsEngine final : public Engine {
 public:
  ThreadsEngine(const EngineOptions& options, int workers)
      : Engine(options), bounce_(workers, options.block_bytes) {
    threads_.reserve(workers);
    try {
      for (int i = 0; i < workers; ++i) threads_.emplace_back([this, i] { work(bounce_.at(i)); });
    } catch (...) {  // no more threads to be had: leave none behind
      stop();
      throw;
    }
  }

  ~ThreadsEngine() override {
    drain();
    stop();
  }

  const char* backend() const override { return "threads"; }

 protected:
  void wake() override { queued_.notify_all(); }

 private:
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    queued_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void work(char* bounce) {
    bind_thread();
    std::unique_lock lock(mutex_);
    for (;;) {
      queued_.wait(lock, [this] { return stopping_ || queued(); });
      Block block;
      if (!take(&block, bounce)) return;  // stopping
      lock.unlock();
      fill(block);
      lock.lock();
      Transfer* finished = nullptr;
      bool over = false;
      while (!over) {
        lock.unlock();
        std::int64_t result = attempt(block, faults_.next(block.op));
        empty(block, result);
        if (block.drop_cache && result > 0) {
          if (const int error = leave_no_cache(block)) result = -error;
        }
        lock.lock();
        over = settle(&block, result, &finished);
      }
      lock.unlock();
      notify(finished);
      lock.lock();
    }
  }

  BounceBuffers bounce_;
  std::condition_variable queued_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Engine> make_threads_engine(const EngineOptions& options) {
  // Past eight a disk gains nothing from more threads here, and each costs a stack and a bounce
  // buffer. Each disk has as many: else all could be at one that is late.
  return std::make_unique<ThreadsEngine>(options, std::min(options.depth, 8 * options.drives));
}

}  // namespace stow
