// What is read, updated and written next.
//
// [Note: One scheduler] One thread holds the whole schedule: it starts reads while slots are free,
// updates chunks whose states and gradients are there (on the process's pool), and starts their
// writes. Completions of I/O and calls from outside only change what is known, under the lock, and
// wake it. Everything it needs is allocated when chunks are added; a step allocates nothing. A step
// whose caller waits for it is run by that caller in the thread's place: to wake a thread takes
// longer than a small step, and the caller has a team of its own ([Note: torch's team]).
//
// [Note: Help] A thread that updates beside a team that computes takes a core from it, and the team
// waits at its next barrier for as long as the update takes. So a caller that computes on these
// cores `helps`: between two of its computations it updates what is ready, on its whole team. The
// scheduler's thread keeps the disk busy meanwhile: it reads and writes, and updates only where
// nothing is being read or written, for then the disk waits for a slot.
#pragma once

#include <cstddef>
#include <functional>
#include <thread>

#include "pipeline/chunk_updater.h"
#include "pipeline/pipeline_data.h"
#include "pipeline/slot_transfers.h"

namespace stow {

class Scheduler {
 public:
  // Starts the thread. `engine` and `data` outlive the scheduler.
  Scheduler(Engine& engine, PipelineData& data, Isa isa, Team team);
  ~Scheduler() { stop(); }
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Runs the step that has begun in the caller's thread until it is published, or fails; called
  // without the lock. An exception would leave the scheduler asleep, so that it ends the process
  // here as it does in the scheduler's thread; so in the two below.
  Failure run() noexcept;
  // Starts and updates what can be started and updated now in the caller's thread; called without
  // the lock.
  void help() noexcept;
  // Works in the caller's thread until it is `over`; the lock is given up for updates.
  void run_until(PipelineMonitor::Lock& lock, const std::function<bool()>& over) noexcept;
  // Gives the step under way up and ends the thread; called without the lock.
  void stop();

  // --- called with the lock held ---

  // Decides what the step that has begun is to do with a chunk.
  void plan_chunk(PipelineChunk& chunk);
  // A gradient that was due is there, or (null) will not come.
  void add_gradient(PipelineChunk& chunk, std::size_t segment, const void* data, DType dtype);
  // The step is over if nothing is left of it.
  void end_finished_step();
  // The chunk has no part in this step.
  void exclude(PipelineChunk& chunk);
  // It leaves a slot that it idles in. If the disk has not what is there, that is first written.
  void let_go(PipelineChunk& chunk);
  // All gradients that the chunk will get are there.
  void mark_ready(PipelineChunk& chunk);

 private:
  void loop();
  void work(PipelineMonitor::Lock& lock, const std::function<bool()>& stop);
  bool start_next_read();
  void start_read(PipelineChunk& chunk);
  bool evict(SlotRing& ring);
  PipelineChunk* next_to_update();
  void update(PipelineChunk& chunk, PipelineMonitor::Lock& lock);
  void settle_update(PipelineChunk& chunk, UpdateScope scope);
  void fail_update(PipelineChunk& chunk, std::int64_t block);
  void settle_transfer(PipelineChunk& chunk, Op op, bool failed);
  void settle_write(PipelineChunk& chunk);
  bool slots_are_wanted() const;
  void finish(PipelineChunk& chunk);

  PipelineData& data_;
  SlotTransfers transfers_;
  ChunkUpdater updater_;
  std::thread thread_;  // the last one: it uses the others
};

}  // namespace stow
