// One pass over one chunk: verify what was read, update, and sum up what will be written.
#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/chunk.h"

namespace stow {

// What one step does with one parameter. `grad` null: it has no gradient (yet).
struct StepParameter {
  void* param;
  const void* grad;
  DType grad_dtype;
  bool seed_master;
  std::int32_t hyper;
  std::uint64_t key;          // of the random bits that inexact formats round with
  void* backup = nullptr;     // where an update puts the old weight first; null: nowhere
  bool keeps_weight = false;  // the caller keeps the old weight, and puts it back after `undo`
};

// The gradient of one segment, from the segment's first element on. `data` null: there is none.
struct SegmentGradient {
  const char* data = nullptr;
  DType dtype = DType::f32;
  bool due = false;  // it may still come
};

// What an update with a zero gradient needs to be made later.
struct MissedUpdate {
  AdamHyper hyper;
  std::uint64_t key;
};

struct MissedUpdates {
  const MissedUpdate* first = nullptr;
  std::size_t count = 0;
};

// Memory of a chunk in one step. `states` is what the kernel works on.
struct UpdateMemory {
  char* states[kMaxStreams];
  char* copy[kMaxStreams];  // where the new states also go; null: nowhere
  char* weight;             // where the new weights also go; null: nowhere
};

// What a chunk's memory holds of its states before they are updated.
enum class SlotStates : std::uint8_t {
  known,       // them; or nobody looks at it
  unverified,  // what came from disk
  zero,        // something else: they are zero
};

// What one update of a chunk works on.
enum class UpdateScope : std::uint8_t {
  resident,      // states in memory of their own; a commit copies them into the slot
  slot,          // states in the slot: read, zero, or left there by the last step
  weights_only,  // no states: they are where they belong on disk, or zero; the slot takes weights
};

// [Note: AcquiredChunk] An update has two halves with the kernel between them. If the caller
// changes the states in memory instead of the kernel, `before` leaves verified states, or zeros,
// there, and `after` takes checksums and copies of what the caller left.
enum class UpdatePhase : std::uint8_t { both, before, after };

struct UpdateTask {
  const ChunkSpec& spec;
  const ChunkParts& parts;
  const std::vector<SegmentGradient>& gradients;  // by segment
  MissedUpdates missed;                           // made before that with the gradient
  ChunkChecksums& checksums;
  UpdateMemory memory;
  SlotStates states;
  bool idle;  // no update: only verified and copied
  bool sum;   // the states go to disk
  UpdatePhase phase;
};

// Runs on the pool with `threads` threads (0: all of them). Returns the first block whose states
// are not what was written, or -1.
std::int64_t update_chunk(const UpdateTask& task, const std::vector<StepParameter>& parameters,
                          const std::vector<AdamHyper>& hypers, Isa isa, int threads);

// Fills `checksums.recorded` for one segment from the weights at `weight` (the parameter's begin),
// or, with `compare`, returns whether they are the recorded ones.
bool record_segment(const ChunkSpec& spec, const ChunkParts& parts, ChunkChecksums& checksums,
                    std::int32_t segment, const void* weight, bool compare);

}  // namespace stow
