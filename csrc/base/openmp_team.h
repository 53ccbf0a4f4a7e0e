// The OpenMP team that torch computes with, for updates in the thread that calls step().
//
// [Note: torch's team] OpenMP's threads poll for some 10 ms after each of their jobs, and backward
// has just ended when step() is called. Threads of our own would share the cores with them, and an
// update of some milliseconds takes half as long again. So a step that its caller waits for runs on
// the caller's team, by the functions that torch's library has imported. Every thread has a team of
// its own: a background thread would start another one, and uses our pool.
#pragma once

namespace stow {

// While it lives, `run_on_team` in this thread may use the team of this thread.
class TorchTeamScope {
 public:
  TorchTeamScope();
  ~TorchTeamScope();
  TorchTeamScope(const TorchTeamScope&) = delete;
  TorchTeamScope& operator=(const TorchTeamScope&) = delete;

 private:
  bool before_;
};

// Calls body(data) on `threads` threads of the team (0: all), the calling one among them; returns
// when all have returned. False, and nothing is called, outside of a TorchTeamScope, or where the
// team has another number of threads, torch has none, its threads may be bound to other cores than
// ours, or the process was forked since the library was loaded.
bool run_on_team(int threads, void (*body)(void*), void* data);

}  // namespace stow
