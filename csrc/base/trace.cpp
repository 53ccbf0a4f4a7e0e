#include "base/trace.h"

#include <ctime>

namespace stow {

double now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void Trace::start(std::size_t capacity) {
  std::lock_guard lock(mutex_);
  events_.clear();
  events_.reserve(capacity);
  capacity_ = capacity;
  dropped_ = 0;
}

void Trace::record(const Event& event) {
  std::lock_guard lock(mutex_);
  if (events_.size() < capacity_) {
    events_.push_back(event);
  } else if (capacity_ != 0) {
    ++dropped_;
  }
}

std::vector<Event> Trace::events() const {
  std::lock_guard lock(mutex_);
  return events_;
}

std::int64_t Trace::dropped() const {
  std::lock_guard lock(mutex_);
  return dropped_;
}

}  // namespace stow
