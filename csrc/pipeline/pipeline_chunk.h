// A chunk in a pipeline: where its states are, and what the step under way does with it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/metered.h"
#include "io/transfer.h"
#include "pipeline/chunk.h"
#include "pipeline/update.h"

namespace stow {

class SlotTransfers;

// [Note: Once] Each chunk of a step is in exactly one of these until it is updated. A chunk in two
// places would be updated twice, and another one never.
enum class StepStage : std::uint8_t {
  out,         // no part of this step, or done with
  waiting,     // for a slot, or for the end of its last write
  admitted,    // has a slot, or its own memory: its read or a gradient is still to come
  queued,      // in UpdateQueues, states and gradients there
  acquirable,  // in UpdateQueues, for the caller to acquire
  acquired,    // taken from there by the caller
  released,    // in UpdateQueues, updated by the caller
};

// What an update that may be undone has replaced.
struct ChunkUndo {
  bool is_taken = false;  // the step has updated the chunk
  bool blank = false;     // its states were zero
  bool captured = false;
  DiskPosition place, target, spare;
  ChunkChecksums checksums;
};

struct PipelineChunk {
  PipelineChunk(int n, ChunkSpec s) : number(n), spec(std::move(s)), parts(spec) {}

  int number;
  ChunkSpec spec;
  ChunkParts parts;
  ChunkChecksums checksums;
  std::vector<SegmentGradient> gradients;  // of the step, by segment
  ChunkState state = ChunkState::blank;
  StepStage stage = StepStage::out;
  DiskPosition place;   // where the states were last written
  DiskPosition target;  // where they are to be written next
  DiskPosition spare;   // a second place, which an update that may be undone writes to
  ChunkUndo undo;
  bool captured = false;   // `place` also holds the current weights
  bool capturing = false;  // what is being written holds them
  SlotStates slot_states = SlotStates::known;
  bool lags_on_disk = false;     // its slot has newer states than its place
  bool unwanted = false;         // let go as soon as its read is over
  int gradients_due = 0;         // of its parameters, in an open step
  int turn = 0;                  // in the order of the step
  bool has_update = false;       // a gradient, or updates that were deferred and are due now
  bool defers = false;           // updates with a zero gradient ([Note: Deferred updates])
  bool is_untouched = false;     // the gradient that comes next is zero
  bool is_wanted = false;        // its deferred updates are due in the step that begins
  std::size_t updates_done = 0;  // of those in its parameter's log
  bool is_of_caller = true;      // to a caller who updates
  int slot = -1;
  SlotTransfers* mover = nullptr;  // of the transfers below
  int transfers_left = 0;
  int transfer_count = 0;
  Transfer transfers[kMaxParts];
  double started = 0;  // of the read or write in flight
  std::int64_t moving = 0;
  Metered::Clock::time_point ready;  // all that it waits for was there

  // Whether an update leaves the states of before where they are.
  bool can_undo() const { return !has_own_memory() && spare.file >= 0; }
  // Before an update that may be undone, and to undo it. The chunk is in no slot then.
  void keep_undo();
  void restore();
  bool has_own_memory() const { return spec.resident[0] != nullptr; }
  bool blank() const { return state == ChunkState::blank; }
  // Whether it has a slot, and no part in a step.
  bool is_idle() const { return state == ChunkState::ready && stage == StepStage::out; }
  bool needs_slot() const { return blank() || state == ChunkState::stored; }
  // What it is once it leaves its slot as it came.
  ChunkState state_on_disk() const {
    return slot_states == SlotStates::zero ? ChunkState::blank : ChunkState::stored;
  }
  // Throws where the transition is not legal.
  void move(ChunkState next);
};

}  // namespace stow
