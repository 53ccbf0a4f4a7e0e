// The thread pool that every kernel runs on. Callers need no Python and hold no lock of ours while
// they run.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace stow {

class Pool {
 public:
  // `threads` counts the caller: Pool(1) starts none.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const;
  // Whether it has so many, all of them where `set_thread_cores` wants them.
  bool is_as(int threads) const;
  // Waits for its turn among the callers of `run`.
  void resize(int threads);

  // Calls body(block) once for every block in [0, blocks), on the pool's threads and the calling
  // one, neighbours mostly on the same thread; returns when all have returned. Concurrent callers
  // take turns, so the body must not call `run` on the same pool; it must not throw either.
  // `threads` caps how many take part, the caller counted; 0 is all.
  void run(std::int64_t blocks, const std::function<void(std::int64_t)>& body, int threads = 0);

 private:
  friend struct TeamJob;
  struct State;
  std::unique_ptr<State> state_;
};

// The process's pool, made at first use with `set_pool_threads` threads (default 1), and recreated
// in a forked child, where the parent's threads do not exist. The reference stays good: another
// number of threads resizes it in place.
Pool& pool();
void set_pool_threads(int threads);

}  // namespace stow
