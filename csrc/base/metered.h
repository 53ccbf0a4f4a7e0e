// Injected delays, so that tests and benchmarks have a lower bound of how long transfers take.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace stow {

// A lane that takes units / rate for each piece of work, one after the other. Off by default.
class Metered {
 public:
  using Clock = std::chrono::steady_clock;

  // 0: as fast as the machine.
  void set(double units_per_s) { units_per_s_.store(units_per_s, std::memory_order_release); }

  // Takes the lane for work that could have begun at `ready`; returns when it may be over.
  Clock::time_point take(std::int64_t units, Clock::time_point ready) {
    const double rate = units_per_s_.load(std::memory_order_acquire);
    if (rate <= 0) return ready;
    const std::chrono::duration<double> takes(static_cast<double>(units) / rate);
    std::lock_guard lock(mutex_);
    over_ = std::max(over_, ready) + std::chrono::duration_cast<Clock::duration>(takes);
    return over_;
  }

  bool is_on() const { return units_per_s_.load(std::memory_order_acquire) > 0; }

 private:
  std::atomic<double> units_per_s_{0};
  std::mutex mutex_;
  Clock::time_point over_{};
};

// Of the process: all its engines have one disk, all its pipelines one memory.
inline Metered disk_lane;    // bytes
inline Metered update_lane;  // elements of parameters

}  // namespace stow
