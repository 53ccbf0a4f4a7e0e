// Faults put in at the I/O interface, so that tests meet every error that a disk can give.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "io/transfer.h"

namespace stow {

// From the `after`-th block of that operation on (0 is the next one), for `times` blocks (-1: for
// ever).
struct Fault {
  Op op;
  std::int64_t after;
  std::int64_t times;
  int error;               // errno to answer with, without touching the disk; 0: none
  std::int64_t max_bytes;  // the block moves at most this many bytes; 0: no limit
  std::int64_t delay_us;   // before the block starts
};

struct FaultEffect {
  int error = 0;
  std::int64_t max_bytes = 0;
  std::int64_t delay_us = 0;
};

class FaultPlan {
 public:
  void add(const Fault& fault) {
    std::lock_guard lock(mutex_);
    faults_.push_back(fault);
    armed_.store(true, std::memory_order_release);
  }

  void clear() {
    std::lock_guard lock(mutex_);
    faults_.clear();
    armed_.store(false, std::memory_order_release);
  }

  // Called once for each block that is about to start.
  FaultEffect next(Op op) {
    if (!armed_.load(std::memory_order_acquire)) return {};
    std::lock_guard lock(mutex_);
    FaultEffect effect;
    for (Fault& fault : faults_) {
      if (fault.op != op || fault.times == 0) continue;
      if (fault.after > 0) {
        --fault.after;
        continue;
      }
      if (fault.times > 0) --fault.times;
      if (fault.error != 0) effect.error = fault.error;
      if (fault.max_bytes != 0) effect.max_bytes = fault.max_bytes;
      effect.delay_us += fault.delay_us;
    }
    return effect;
  }

 private:
  std::mutex mutex_;
  std::vector<Fault> faults_;
  std::atomic<bool> armed_{false};
};

}  // namespace stow
