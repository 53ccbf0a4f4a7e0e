// What was written, in the order in which it was: tests replay it as a disk that loses its power.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace stow {

// A block whose write has completed. It may not survive a power loss yet.
struct LoggedWrite {
  int file;
  std::int64_t offset;
  std::string bytes;
};

class WriteLog {
 public:
  void start() { on_.store(true, std::memory_order_release); }

  void add(int file, std::int64_t offset, const char* data, std::int64_t length) {
    if (!on_.load(std::memory_order_acquire)) return;
    std::lock_guard lock(mutex_);
    writes_.push_back({file, offset, std::string(data, length)});
  }

  // Since the last call.
  std::vector<LoggedWrite> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(writes_, {});
  }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<LoggedWrite> writes_;
};

}  // namespace stow
