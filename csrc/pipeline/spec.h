// What a pipeline is given, and what it reports.
#pragma once

#include <cstdint>

#include "io/transfer.h"
#include "kernels/kernels.h"

namespace stow {

// `error` of a failure where the disk gave other bytes than were written to it.
inline constexpr int kDamaged = -2;

// Slot s begins at base + s * slot_bytes; behind them are the small ones, alike.
struct RingSpec {
  char* base = nullptr;
  int slots = 0;
  std::int64_t slot_bytes = 0;
  int small_slots = 0;
  std::int64_t small_bytes = 0;
};

// How chunks are taken in turn.
enum class Order : std::uint8_t {
  alternating,  // there and back: a step begins with what the last one left in the ring
  given,        // by `set_order`, every step
};

// How many threads of the pool update, the scheduler counted; 0 is all.
struct Team {
  int whole = 0;
  int few = 0;   // while the caller computes
  int most = 0;  // while the caller launches
};

// What the caller does while a step runs.
enum class Caller : std::uint8_t {
  waits,     // nothing: all cores are the step's
  computes,  // on these cores beside it, until somebody waits
  helps,     // the same, and often calls `help`: chunks that are ready wait for that while the disk
             // is busy, and its waits do the scheduler's work
  launches,  // work of an accelerator: one core is the caller's
  updates,   // the chunks of `set_caller_chunks`, by `acquire_chunk`: none of their gradients is
             // read here, and their weights are only looked at when a chunk is released
};

struct StepSpec {
  bool open = false;     // gradients follow one by one by `add_gradient`, until `close`
  bool capture = false;  // what is written also holds the new weights, and chunks that have no
                         // gradient are written too where the disk has not all of them
  bool resident_first = false;  // resident chunks before those in slots
  bool newest_first = false;    // of the chunks that are ready, the last that became so
  bool undoable = false;        // `undo` may take the step back, until `confirm`
  Caller caller = Caller::waits;
};

// A chunk whose states are there to be changed: in a slot, or (slot -1) in memory of their own.
struct AcquiredChunk {
  int chunk = -1;  // none
  int slot = -1;
};

// A gradient from the first element on that a chunk has of `parameter`.
struct PieceGradient {
  int parameter;
  const void* grad;
  DType dtype;
};

struct PipelineCounters {
  std::int64_t bytes_read = 0;  // of chunk streams, alignment padding included
  std::int64_t bytes_written = 0;
  std::int64_t bytes_spared = 0;  // not read, for a slot still held them
  std::int64_t chunks_updated = 0;
  std::int64_t slots_in_use = 0;
  std::int64_t slots_high_water = 0;
  std::int64_t small_high_water = 0;
  double wait_seconds = 0;  // in which callers were blocked
};

// The first thing that failed; error 0: nothing has.
struct Failure {
  int error = 0;  // an errno, kEndOfFile or kDamaged
  int file = -1;
  int chunk = -1;
  Op op = Op::read;
  std::int64_t offset = 0;
  std::int64_t length = 0;
};

}  // namespace stow
