// The lock of a pipeline, and what its threads wait for.
//
// [Note: One lock] The mutex of PipelineMonitor guards all that PipelineData holds but the trace,
// and every chunk. It is taken by
//   * Pipeline, ChunkLedger and StepProgress, in each public method (threads of callers);
//   * Scheduler::loop, whenever it neither sleeps nor computes (the scheduler's thread),
//     Scheduler::run in its place (a caller's thread), and Scheduler::stop;
//   * SlotTransfers::end, which then calls the scheduler (threads of the engine).
// All other methods of Scheduler and SlotTransfers, and those of SlotRing, ChunkTable, CurrentStep,
// StepGradients, ReadOrder, UpdateQueues and ChunkUpdater, are called with the lock held.
//
// Three methods give it up for a while, and take it as an argument to show that: `wait_for_work`,
// `wait`, and `unlocked`, around the kernel. While the kernel is on a chunk, the chunk's
// specification, gradients, checksums and memory are the kernel's: nobody else touches a chunk that
// was taken from UpdateQueues. Of the step's parameters it reads what only `begin` writes.
// ChunkLedger's `checksums` hands out a reference that is valid while the pipeline is idle.
//
// Locks inside this one: the engine's, when transfers are submitted (the engine calls back without
// it, [Note: Three steps] in io/engine.h), and the trace's, which takes no other.
#pragma once

#include <condition_variable>
#include <mutex>

#include "pipeline/spec.h"

namespace stow {

class PipelineMonitor {
 public:
  using Lock = std::unique_lock<std::mutex>;

  [[nodiscard]] Lock lock() const { return Lock(mutex_); }

  // Something may have become possible.
  void wake_scheduler() {
    work_ = true;
    scheduler_wakes_.notify_all();  // its thread, and the caller in its place
  }
  void wake_callers() {
    ++changes_;
    callers_wake_.notify_all();
  }
  std::int64_t changes() const { return changes_; }

  // The scheduler blocks until it has been woken and no caller is in its place; false: it is to
  // end.
  bool wait_for_work(Lock& lock) {
    scheduler_wakes_.wait(lock, [this] { return stopping_ || (work_ && !replaced_); });
    work_ = false;
    return !stopping_;
  }
  // While a caller does what the scheduler would, the scheduler's thread sleeps. It may have to end
  // the update that it is at.
  void begin_replacing(Lock& lock) {
    replaced_ = true;
    callers_wake_.wait(lock, [this] { return !updating_; });
  }
  // `more`: something is left for the scheduler.
  void end_replacing(bool more) {
    replaced_ = false;
    if (work_ || more) wake_scheduler();
  }
  bool is_replaced() const { return replaced_; }
  // The caller in its place blocks until there is work, or nothing is left for it.
  template <class Over>
  void wait_for_work_in_place(Lock& lock, Over over) {
    scheduler_wakes_.wait(lock, [&] { return work_ || over(); });
    work_ = false;
  }
  void stop() {
    stopping_ = true;
    scheduler_wakes_.notify_all();
  }
  bool is_stopping() const { return stopping_; }

  // A caller blocks until it is `over`. The update under way reads the caller's gradients: after a
  // failure it must end before the caller may free them.
  template <class Over>
  void wait(Lock& lock, Over over) {
    if (++waiters_ == 1 && !over())
      wake_scheduler();  // it may have left updates to a caller who helps
    callers_wake_.wait(lock, [&] { return over() && !(has_failed() && updating_); });
    --waiters_;
  }
  bool has_waiters() const { return waiters_ != 0; }

  // Runs the kernel without the lock.
  template <class Kernel>
  void unlocked(Lock& lock, Kernel kernel) {
    updating_ = true;
    lock.unlock();
    kernel();
    lock.lock();
    updating_ = false;
  }
  bool is_updating() const { return updating_; }

  // The first failure stays.
  void fail(const Failure& failure) {
    if (!has_failed()) failure_ = failure;
    wake_callers();
    scheduler_wakes_.notify_all();  // a caller in its place
  }
  const Failure& failure() const { return failure_; }
  bool has_failed() const { return failure_.error != 0; }

 private:
  mutable std::mutex mutex_;
  std::condition_variable scheduler_wakes_;
  std::condition_variable callers_wake_;
  std::int64_t changes_ = 0;  // how often callers were woken
  int waiters_ = 0;           // callers that are blocked
  bool work_ = false;         // something may have become possible
  bool replaced_ = false;     // a caller does what the scheduler would
  bool updating_ = false;     // the scheduler is in the kernel, on the caller's gradients
  bool stopping_ = false;
  Failure failure_;
};

}  // namespace stow
