// The event log: what each lane did, when. Bounded, allocated once, off by default.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace stow {

enum class Lane : std::uint8_t { read, update, write, wait };

struct Event {
  double start;  // seconds on CLOCK_MONOTONIC, Python's time.monotonic()
  double stop;
  Lane lane;
  std::int32_t chunk;
  std::int64_t bytes;
};

double now();

class Trace {
 public:
  // Keeps the first `capacity` events from now on; 0 switches the log off.
  void start(std::size_t capacity);
  void record(const Event& event);
  std::vector<Event> events() const;
  std::int64_t dropped() const;  // events that found the log full

 private:
  mutable std::mutex mutex_;
  std::vector<Event> events_;
  std::size_t capacity_ = 0;
  std::int64_t dropped_ = 0;
};

}  // namespace stow
