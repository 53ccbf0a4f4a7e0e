// The update pipeline: chunks of optimizer states go READ -> UPDATE -> WRITE through a ring of
// slots, without Python.
//
// [Note: One conductor] One thread holds the whole schedule: it starts reads while slots are free,
// updates chunks whose states have arrived (on the process's pool), and starts their writes.
// Completions of I/O only change a chunk's state under the lock and wake it. Everything it needs is
// allocated when chunks are added; a step allocates nothing.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/trace.h"
#include "io/engine.h"
#include "kernels/kernels.h"

namespace stow {

inline constexpr int kMaxStreams =
    4;  // m, v, then vmax with amsgrad, then the master of a 16-bit parameter
inline constexpr std::int64_t kUpdateBlock = 1 << 16;  // elements that one thread updates at a time

// Where a chunk's states are, and who holds memory for them.
enum class ChunkState : std::uint8_t {
  resident,  // in memory of their own, always
  blank,     // on disk and never written: zero by definition; no memory
  stored,    // on disk; no memory
  reading,   // a slot, a read in flight
  ready,     // a slot, the states are in it
  updating,  // a slot, the kernel is on it
  writing,   // a slot, a write in flight
  lost,      // the disk failed: neither copy can be trusted
};

// A family is a set of parameters whose states have the same streams.
struct Family {
  DType param_dtype;
  bool amsgrad;
  int streams() const { return 2 + (amsgrad ? 1 : 0) + (param_dtype == DType::f32 ? 0 : 1); }
};

// A run of one parameter's elements in a chunk.
struct Segment {
  std::int32_t parameter;
  std::int64_t parameter_offset;  // elements
  std::int64_t chunk_offset;      // elements
  std::int64_t count;             // elements
};

struct ChunkSpec {
  Family family;
  std::vector<Segment> segments;
  std::int64_t elements;  // of each stream, padding included
  // On disk: streams one after the other from `offset`, `stream_bytes` apart.
  int file;  // -1: resident
  std::int64_t offset;
  std::int64_t stream_bytes;
  // Resident: where each stream begins.
  char* resident[kMaxStreams];
};

// Slot s, stream k begins at base + s * slot_bytes + k * stream_stride.
struct RingSpec {
  char* base;
  int slots;
  std::int64_t slot_bytes;
  std::int64_t stream_stride;
};

// What one step does with one parameter. `grad` null: the parameter has no gradient and is left
// alone.
struct StepParameter {
  void* param;
  const void* grad;
  DType grad_dtype;
  bool seed_master;
  std::int32_t hyper;
};

struct PipelineCounters {
  std::int64_t bytes_read;  // of chunk streams, alignment padding included
  std::int64_t bytes_written;
  std::int64_t chunks_updated;
  std::int64_t slots_in_use;
  std::int64_t slots_high_water;
  double wait_seconds;  // callers blocked in wait_published
};

// The first transfer that failed; errno 0: none has.
struct Failure {
  int error = 0;
  int file = -1;
  int chunk = -1;
  Op op = Op::read;
  std::int64_t offset = 0;
  std::int64_t length = 0;
};

class Pipeline {
 public:
  // `engine` and the memory of `ring` outlive the pipeline. A ring of 0 slots serves resident
  // chunks alone.
  Pipeline(Engine& engine, const RingSpec& ring, Isa isa);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Only while idle (nothing begun, nothing prefetched): returns the chunk's number. Chunks are
  // used in this order.
  int add_chunk(ChunkSpec spec, ChunkState state);

  // Starts reading the first chunks, up to the ring. Idempotent until the next `begin`.
  void prefetch();

  // Hands over one step; returns at once. After a failure nothing is begun, and wait_published
  // tells it. `parameters` is indexed as in the segments; both are
  // copied.
  void begin(const std::vector<StepParameter>& parameters, const std::vector<AdamHyper>& hypers);

  // Blocks until every parameter of the step has its new weight, or something failed.
  Failure wait_published();

  // Blocks until no slot is in use: writes have landed, prefetched states were let go.
  Failure quiesce();

  Failure failure() const;
  ChunkState state(int chunk) const;
  void mark_stored(int chunk);  // while idle: its states were written by someone else
  PipelineCounters counters() const;
  Trace& trace() { return trace_; }
  bool in_owner() const;

 private:
  struct Chunk;
  struct UpdateBlock;

  void enlist(Chunk& chunk);
  void conduct();
  bool admit();
  Chunk* pick();
  void start_read(Chunk& chunk, int slot);
  void start_write(Chunk& chunk);
  void update(Chunk& chunk);
  void update_block(const Chunk& chunk, const UpdateBlock& block, char* const* streams);
  void release(Chunk& chunk, ChunkState next);
  void move(Chunk& chunk, ChunkState next);
  void transferred(Chunk& chunk, const Transfer& transfer);
  bool runnable() const;
  bool idle() const;
  bool active(const Chunk& chunk) const;
  static void on_transfer(Transfer* transfer);

  Engine& engine_;
  const RingSpec ring_;
  const Isa isa_;
  const pid_t owner_;
  Trace trace_;

  mutable std::mutex mutex_;
  std::condition_variable conductor_wakes_;
  std::condition_variable callers_wake_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<int> free_slots_;
  std::vector<StepParameter> parameters_;
  std::vector<AdamHyper> hypers_;
  std::vector<int> disk_order_;      // chunks of this step on disk
  std::vector<int> resident_order_;  // chunks of this step in memory
  std::vector<int> ready_;           // a queue of chunks whose states have arrived
  std::size_t ready_head_ = 0;
  std::size_t next_disk_ = 0;
  std::size_t next_resident_ = 0;
  std::size_t unpublished_ = 0;
  bool stepping_ = false;
  bool updating_ = false;  // the conductor is in the kernel, on the caller's gradients
  bool prefetching_ = false;
  bool stopping_ = false;
  Failure failure_;
  PipelineCounters counters_{};
  std::thread conductor_;
};

}  // namespace stow
