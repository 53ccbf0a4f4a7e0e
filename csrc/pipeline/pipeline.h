// The update pipeline: chunks of optimizer states go READ -> UPDATE -> WRITE through a ring of
// slots, without Python.
//
// A pipeline is made of one class for each noun; [Note: One lock] in monitor.h says what guards
// them, [Note: One scheduler] in scheduler.h who acts.
//   PipelineData     what they share: the chunks, the ring, the step, the order, the queues
//   Scheduler        decides, in a thread of its own, with SlotTransfers and ChunkUpdater
//   ChunkLedger      says where chunks are, and which checksums they have
//   StepProgress     says how far the step is
//   StepUndo         takes an undoable step back, or makes it final
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "pipeline/chunk_ledger.h"
#include "pipeline/pipeline_data.h"
#include "pipeline/scheduler.h"
#include "pipeline/step_progress.h"
#include "pipeline/step_undo.h"

namespace stow {

class Pipeline {
 public:
  // `engine` outlives the pipeline.
  Pipeline(Engine& engine, Isa isa, Order order, Team team);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // While idle (nothing begun, nothing prefetched). The memory of `ring` outlives its use.
  void set_ring(const RingSpec& ring);
  // While idle: returns the chunk's number. `blank` states are zero; others are resident or, with
  // a place, stored there with the block checksums `states`. With the checksums `weights` the place
  // also holds the current weights, written by a commit.
  int add_chunk(ChunkSpec spec, bool blank, std::vector<std::uint32_t> states,
                std::vector<std::uint32_t> weights = {});
  // While idle: every chunk's number, in the order in which the next steps take them.
  void set_order(std::vector<int> order);
  std::vector<int> order() const;  // in which the next step takes chunks, or this one does
  // Between steps: the chunks that a step leaves to a caller who updates; until then, all of them.
  void set_caller_chunks(const std::vector<int>& chunks);

  // Starts reading the first chunks, up to the ring. Idempotent until the next `begin`.
  void prefetch();

  // Starts one step; returns at once. After a failure nothing is begun, and the waits report it.
  // `parameters` is indexed as in the segments; both vectors are copied. In an open step all
  // gradients are null and the `expected` parameters may get one. `runs` false: `run` follows.
  void begin(const std::vector<StepParameter>& parameters, const std::vector<AdamHyper>& hypers,
             const StepSpec& step, const std::vector<char>& expected, bool runs = true);
  // Reads, updates and writes in the calling thread until the step is published.
  Failure run();
  // In an open step: the gradient of an expected parameter, once. It stays until it is published.
  void add_gradient(int parameter, const void* grad, DType dtype);
  // The same, chunk by chunk: the gradients of those pieces of expected parameters that lie in
  // `chunk`; null: none comes. A gradient comes as a whole or in pieces.
  void add_chunk_gradients(int chunk, const std::vector<PieceGradient>& pieces);
  // Where the caller helps: updates what is ready, in the calling thread; waits for nothing.
  void help() { scheduler_.help(); }
  // No more gradients: expected parameters without one are left alone.
  void close();

  // Where the caller updates: the next chunk for the caller to update, whose gradients he knows (in
  // an open step he adds them as ever); none where the step is over, or where none is there and he
  // does not `wait`. Do not wait while holding a chunk: deadlock.
  AcquiredChunk acquire_chunk(bool wait);
  // The caller is done with the chunk: its memory holds the new states, and the weights of 16-bit
  // parameters (in a commit, of all) are new where the step says they are.
  void release_chunk(int chunk);

  // Blocks until no slot is in use: writes are over, prefetched states were evicted.
  Failure quiesce();

  StepProgress& progress() { return progress_; }
  ChunkLedger& ledger() { return ledger_; }
  StepUndo& undoing() { return undo_; }
  Trace& trace() { return data_.trace; }
  PipelineCounters counters() const;
  bool in_owner() const;

 private:
  void require_idle(const char* method) const;
  void drain(PipelineMonitor::Lock& lock);

  const pid_t owner_;
  PipelineData data_;
  ChunkLedger ledger_;
  Scheduler scheduler_;
  StepProgress progress_;
  StepUndo undo_;
};

}  // namespace stow
