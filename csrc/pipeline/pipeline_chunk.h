// The pipeline's state of a chunk: shared by its three sources alone.
#pragma once

#include "base/metered.h"
#include "pipeline/pipeline.h"

namespace stow {

// [Note: Once] Each chunk of a step is in exactly one of these until it is updated. A chunk in two
// places would be updated twice, and another one never.
enum class Pipeline::Stage : std::uint8_t {
  out,         // no part of this step, or done with
  waiting,     // to be admitted
  admitted,    // has a slot, or its own memory: its read or a gradient is still to come
  queued,      // in ready_ or ready_resident_
  acquirable,  // in acquirable_
  acquired,    // taken from there by the caller
  released,    // in released_
};

struct Pipeline::Chunk {
  Chunk(Pipeline* owner, int n, ChunkSpec s)
      : pipeline(owner), number(n), spec(std::move(s)), parts(spec) {}

  Pipeline* pipeline;
  int number;
  ChunkSpec spec;
  ChunkParts parts;
  ChunkChecksums checksums;
  std::vector<SegmentGradient> gradients;  // of the step, by segment
  ChunkState state = ChunkState::blank;
  Stage stage = Stage::out;
  DiskPosition place;      // where the states were last written
  DiskPosition target;     // where they are to be written next
  bool captured = false;   // `place` also holds the current weights
  bool capturing = false;  // what is being written holds them
  SlotStates slot_states = SlotStates::known;
  bool unwanted = false;  // let go as soon as its read is over
  int gradients_due = 0;  // of its parameters, in an open step
  bool has_gradient = false;
  bool is_of_caller = true;  // to a caller who updates
  int slot = -1;
  int transfers_left = 0;
  int first_transfer = 0;
  int transfer_count = 0;
  Transfer transfers[kMaxParts];
  double started = 0;  // of the read or write in flight
  std::int64_t moving = 0;
  Metered::Clock::time_point ready;  // all that it waits for was there

  bool has_own_memory() const { return spec.resident[0] != nullptr; }
  bool blank() const { return state == ChunkState::blank; }
};

}  // namespace stow
