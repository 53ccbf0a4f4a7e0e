// What tests of the pipeline vary: engines, rings, orders, steps; and how long they may take.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <system_error>
#include <vector>

#include "rig_checks.h"

namespace stow {

using Make = std::unique_ptr<Engine> (*)(const EngineOptions&);

// The backends that work here.
inline std::vector<Make> backends() {
  std::vector<Make> found = {make_threads_engine};
  try {
    make_uring_engine({1, 4096});
    found.push_back(make_uring_engine);
  } catch (const std::system_error& error) {
    std::printf("io_uring is not tested: %s\n", error.what());
  }
  return found;
}

// A deadlock ends the program, and says where.
inline char g_doing[256] = "nothing";

inline void doing(const char* what, unsigned long seed = 0) {
  if (std::getenv("STOW_VERBOSE") != nullptr) std::fprintf(stderr, "%s %lu\n", what, seed);
  std::snprintf(g_doing, sizeof g_doing, "hangs in %s (%lu)\n", what, seed);
  std::signal(SIGALRM, [](int) {
    (void)!write(2, g_doing, std::strlen(g_doing));
    _exit(2);
  });
  alarm(std::getenv("STOW_VERBOSE") ? 6 : 120);
}

inline constexpr int kChunks = 6;  // of the default rig: three parameters of two chunks each
inline const std::vector<int> kHome = {4, 5};

inline RigOptions with(int slots, Order order = Order::alternating,
                       std::vector<int> resident = kHome) {
  RigOptions options;
  options.slots = slots;
  options.order = order;
  options.resident = std::move(resident);
  return options;
}

inline RigOptions durable(int slots, Order order, std::vector<int> resident = kHome) {
  RigOptions options = with(slots, order, std::move(resident));
  options.durable = true;
  return options;
}

inline constexpr StepSpec kOpen{.open = true};
inline constexpr StepSpec kCapture{.capture = true};
inline constexpr StepSpec kOpenCapture{.open = true, .capture = true};
inline constexpr StepSpec kBackground{.caller = Caller::computes};
inline constexpr StepSpec kOutside{.caller = Caller::updates};
inline constexpr StepSpec kOutsideCapture{.capture = true, .caller = Caller::updates};
inline constexpr Order kOrders[] = {Order::alternating, Order::given};

template <class Exception, class Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Exception&) {
    return true;
  }
  return false;
}

inline bool soon(const std::function<bool()>& holds) {
  for (int turn = 0; turn < 20000; ++turn) {
    if (holds()) return true;
    usleep(100);
  }
  return false;
}

}  // namespace stow
