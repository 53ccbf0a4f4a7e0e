// The least that a test program needs.
#pragma once

#include <cstdio>

namespace stow {

struct Tally {
  long passed = 0;
  long failed = 0;
};

inline Tally& tally() {
  static Tally instance;
  return instance;
}

inline void check(bool ok, const char* what, const char* file, int line) {
  if (ok) {
    ++tally().passed;
    return;
  }
  ++tally().failed;
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
}

// Prints the count; what main returns.
inline int report() {
  std::printf("%ld passed, %ld failed\n", tally().passed, tally().failed);
  return tally().failed == 0 ? 0 : 1;
}

}  // namespace stow

#define CHECK(condition) ::stow::check((condition), #condition, __FILE__, __LINE__)
