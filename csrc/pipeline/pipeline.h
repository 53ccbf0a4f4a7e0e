// The update pipeline: chunks of optimizer states go READ -> UPDATE -> WRITE through a ring of
// slots, without Python.
//
// [Note: One scheduler] One thread holds the whole schedule: it starts reads while slots are free,
// updates chunks whose states and gradients are there (on the process's pool), and starts their
// writes. Completions of I/O and calls from outside only change what is known, under the lock, and
// wake it. Everything it needs is allocated when chunks are added; a step allocates nothing.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/trace.h"
#include "io/engine.h"
#include "pipeline/chunk.h"
#include "pipeline/update.h"

namespace stow {

// `error` of a failure where the disk gave other bytes than were written to it.
inline constexpr int kDamaged = -2;

// Slot s begins at base + s * slot_bytes.
struct RingSpec {
  char* base = nullptr;
  int slots = 0;
  std::int64_t slot_bytes = 0;
};

// How chunks are taken in turn.
enum class Order : std::uint8_t {
  alternating,  // there and back: a step begins with what the last one left in the ring
  given,        // by `set_order`, every step
};

// How many threads of the pool update, the scheduler counted; 0 is all.
struct Team {
  int whole = 0;
  int few = 0;  // while the caller computes
};

// What the caller does while a step runs.
enum class Caller : std::uint8_t {
  waits,     // nothing: all cores are the step's
  computes,  // on these cores beside it, until somebody waits
  updates,   // the chunks of `set_caller_chunks`, by `acquire_chunk`: none of their gradients is
             // read here, and their weights are only looked at when a chunk is released
};

struct StepSpec {
  bool open = false;     // gradients follow one by one by `add_gradient`, until `close`
  bool capture = false;  // what is written also holds the new weights, and chunks that have no
                         // gradient are written too where the disk has not all of them
  bool resident_first = false;  // resident chunks before those in slots
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
  double wait_seconds = 0;  // callers blocked in wait_published and wait_parameters
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

// Chunk numbers, first in first out, in memory that is kept.
class Queue {
 public:
  void reserve(std::size_t count) { items_.reserve(count); }
  void clear() { items_.clear(), head_ = 0; }
  bool empty() const { return head_ == items_.size(); }
  int front() const { return items_[head_]; }
  void push(int number) { items_.push_back(number); }
  void pop() {
    if (++head_ == items_.size()) clear();
  }

 private:
  std::vector<int> items_;
  std::size_t head_ = 0;
};

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
  // Between steps: the chunks that a step leaves to a caller who updates; until then, all of them.
  void set_caller_chunks(const std::vector<int>& chunks);

  // Starts reading the first chunks, up to the ring. Idempotent until the next `begin`.
  void prefetch();

  // Starts one step; returns at once. After a failure nothing is begun, and the waits report it.
  // `parameters` is indexed as in the segments; both vectors are copied. In an open step all
  // gradients are null and the `expected` parameters may get one.
  void begin(const std::vector<StepParameter>& parameters, const std::vector<AdamHyper>& hypers,
             const StepSpec& step, const std::vector<char>& expected);
  // In an open step: the gradient of an expected parameter, once. It stays until it is published.
  void add_gradient(int parameter, const void* grad, DType dtype);
  // The same, chunk by chunk: the gradients of those pieces of expected parameters that lie in
  // `chunk`; null: none comes. A gradient comes as a whole or in pieces.
  void add_chunk_gradients(int chunk, const std::vector<PieceGradient>& pieces);
  // No more gradients: expected parameters without one are left alone.
  void close();

  // Where the caller updates: the next chunk for the caller to update, whose gradients he knows (in
  // an open step he adds them as ever); none where the step is over, or where none is there and he
  // does not `wait`. He who waits must hold no chunk himself, or nobody might ever go on.
  AcquiredChunk acquire_chunk(bool wait);
  // The caller is done with the chunk: its memory holds the new states, and the weights of 16-bit
  // parameters (in a commit, of all) are new where the step says they are.
  void release_chunk(int chunk);

  // Block until the step is published as a whole, or these parameters of it; or something failed.
  // In an open step a parameter waits for the gradients of all that share a chunk with it; one that
  // is still expected is not waited for.
  Failure wait_published();
  Failure wait_parameters(const std::vector<int>& parameters);
  bool is_published(int parameter) const;
  // Whether the step is done with the chunk: its weights are new, its gradients the caller's again.
  bool is_updated(int chunk) const;
  // Blocks until it is, or until a chunk can be acquired.
  Failure wait_chunk(int chunk);
  // Blocks until every write of the step is over.
  Failure wait_written();
  // Blocks until no slot is in use: writes are over, prefetched states were evicted.
  Failure quiesce();

  // Whether no step is under way: weights and gradients are the caller's again.
  bool is_over() const;
  Failure failure() const;
  std::vector<int> order() const;  // in which the next step takes chunks, or this one does
  ChunkState state(int chunk) const;
  DiskPosition place(int chunk) const;
  // Whether the chunk's place holds its current states and weights.
  bool captured(int chunk) const;
  void forget_capture(int parameter);                // others wrote the weight
  void set_target(int chunk, DiskPosition target);   // of the next step's write
  const ChunkChecksums& checksums(int chunk) const;  // while idle
  // While idle: `streams` are what was written to the chunk's target, or put into its memory.
  void rewritten(int chunk, char* const* streams);
  // While idle: whether `streams` are what was written last.
  bool intact(int chunk, char* const* streams) const;
  // While idle: the weights at `weight` are what an update of ours would have left.
  void record_weight(int parameter, const void* weight);
  void forget_weight(int parameter);  // what our last update left is unknown
  // While idle: whether the weights at `weight` are those that our last update left.
  bool unchanged(int parameter, const void* weight);

  PipelineCounters counters() const;
  Trace& trace() { return trace_; }
  bool in_owner() const;

 private:
  struct Chunk;
  enum class Stage : std::uint8_t;

  void plan_chunk(Chunk& chunk);
  void set_next_order();
  void mark_ready(Chunk& chunk);
  void add_segment_gradient(Chunk& chunk, std::size_t segment, const void* data, DType dtype);
  void exclude(Chunk& chunk);
  void schedule_loop();
  bool admit();
  Chunk* next_to_admit();
  static bool startable(const Chunk& chunk);
  static ChunkState state_on_disk(const Chunk& chunk);
  bool slots_are_wanted() const;
  bool evict();
  Chunk* pick();
  void take_slot(Chunk& chunk);
  void start_read(Chunk& chunk);
  void run(Chunk& chunk, std::unique_lock<std::mutex>& lock);
  UpdateScope scope_of(const Chunk& chunk) const;
  UpdateMemory memory_of(const Chunk& chunk, UpdateScope scope) const;
  void settle_update(Chunk& chunk, UpdateScope scope);
  void finish(Chunk& chunk);
  void start_write(Chunk& chunk, int first_part, int parts);
  void submit(Chunk& chunk, Op op, DiskPosition place, int first_part, int parts);
  void settle_write(Chunk& chunk);
  void leave_slot(Chunk& chunk, ChunkState next);
  void move(Chunk& chunk, ChunkState next);
  void transferred(Chunk& chunk, const Transfer& transfer);
  void fail(const Failure& failure);
  bool idle() const;
  bool anything_in_flight() const;
  char* slot_part(const Chunk& chunk, int part) const;
  template <class Over>
  void sleep_until(std::unique_lock<std::mutex>& lock, Over over);
  template <class Over>
  Failure wait(Over over);
  static void on_transfer(Transfer* transfer);

  Engine& engine_;
  const Isa isa_;
  const Order order_kind_;
  const Team team_;
  const pid_t owner_;
  Trace trace_;

  mutable std::mutex mutex_;
  std::condition_variable scheduler_wakes_;
  std::condition_variable callers_wake_;
  RingSpec ring_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<std::vector<int>> chunks_of_;  // by parameter
  std::vector<int> free_slots_;
  std::vector<StepParameter> parameters_;
  std::vector<AdamHyper> hypers_;
  std::vector<char> expected_;       // by parameter: a gradient may still come
  std::vector<int> pieces_due_of_;   // by parameter: chunks that still wait for its gradient
  std::vector<int> unpublished_of_;  // by parameter: chunks of it that are still to be updated
  StepSpec step_;
  std::vector<int> order_;       // all chunks, in this step's order
  std::size_t next_ = 0;         // in order_: what is to be admitted
  Queue ready_to_read_;          // gradients are there, but passed by in order_
  Queue ready_;                  // states and gradients are there
  Queue ready_resident_;         // the same, of resident chunks
  Queue acquirable_;             // to be updated by whoever calls `acquire_chunk`
  Queue released_;               // updated by the caller
  std::int64_t unfinished_ = 0;  // chunks of this step
  int waiters_ = 0;              // callers that are blocked
  bool work_ = false;            // something may have become possible
  bool stepping_ = false;
  bool updating_ = false;  // the scheduler is in the kernel, on the caller's gradients
  bool prefetching_ = false;
  bool stopping_ = false;
  Failure failure_;
  PipelineCounters counters_;
  std::thread scheduler_;
};

}  // namespace stow
