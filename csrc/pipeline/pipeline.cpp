#include "pipeline/pipeline.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "base/pool.h"

namespace stow {
namespace {

// [Note: Chunk states] Row: from; column: to; in the order of the enum.
constexpr bool kLegal[8][8] = {
    // resident blank  stored reading ready  updating writing lost
    {false, false, false, false, false, false, false, false},  // resident
    {false, false, true, false, true, false, false, false},    // blank: zeros need no read
    {false, false, true, true, false, false, false, true},     // stored
    {false, false, false, false, true, false, false, true},    // reading
    {false, true, true, false, false, true, false, false},     // ready: let go unused, or updated
    {false, false, false, false, false, false, true, false},   // updating
    {false, false, true, false, false, false, false, true},    // writing
    {false, false, false, false, false, false, false, false},  // lost
};

std::int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace

struct Pipeline::UpdateBlock {
  std::int32_t segment;
  std::int64_t offset;  // elements from the segment's start
  std::int64_t count;
};

struct Pipeline::Chunk {
  Pipeline* pipeline;
  int number;
  ChunkSpec spec;
  std::vector<UpdateBlock> blocks;
  ChunkState state;
  int slot = -1;
  bool fresh = false;     // in the slot, but its zeros are not written out yet
  bool unwanted = false;  // let go as soon as its read has landed
  int transfers_left = 0;
  Transfer transfers[kMaxStreams];
  double started = 0;  // of the read or write in flight

  bool on_disk() const { return spec.file >= 0; }
  std::int64_t bytes() const { return spec.stream_bytes * spec.family.streams(); }
};

Pipeline::Pipeline(Engine& engine, const RingSpec& ring, Isa isa)
    : engine_(engine), ring_(ring), isa_(isa), owner_(getpid()) {
  free_slots_.reserve(ring.slots);
  for (int slot = ring.slots - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  conductor_ = std::thread([this] { conduct(); });
}

Pipeline::~Pipeline() {
  // The conductor first: a step that nobody waited for would start new transfers behind `quiesce`.
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    stepping_ = false;
  }
  conductor_wakes_.notify_one();
  conductor_.join();
  quiesce();
}

bool Pipeline::in_owner() const { return getpid() == owner_; }

int Pipeline::add_chunk(ChunkSpec spec, ChunkState state) {
  std::lock_guard lock(mutex_);
  if (!idle()) throw std::logic_error("add_chunk while a step or a prefetch is under way");
  const int number = static_cast<int>(chunks_.size());
  auto chunk = std::make_unique<Chunk>();
  chunk->pipeline = this;
  chunk->number = number;
  chunk->state = state;
  for (std::size_t s = 0; s < spec.segments.size(); ++s) {
    for (std::int64_t at = 0; at < spec.segments[s].count; at += kUpdateBlock) {
      const std::int64_t count = std::min(kUpdateBlock, spec.segments[s].count - at);
      chunk->blocks.push_back({static_cast<std::int32_t>(s), at, count});
    }
  }
  chunk->spec = std::move(spec);
  chunks_.push_back(std::move(chunk));
  disk_order_.reserve(chunks_.size());
  resident_order_.reserve(chunks_.size());
  ready_.reserve(chunks_.size());
  return number;
}

void Pipeline::prefetch() {
  std::lock_guard lock(mutex_);
  if (stepping_ || prefetching_ || failure_.error != 0) return;
  prefetching_ = true;
  disk_order_.clear();
  for (const auto& chunk : chunks_) {
    if (chunk->on_disk()) disk_order_.push_back(chunk->number);
  }
  next_disk_ = 0;
  conductor_wakes_.notify_one();
}

void Pipeline::begin(const std::vector<StepParameter>& parameters,
                     const std::vector<AdamHyper>& hypers) {
  std::lock_guard lock(mutex_);
  if (stepping_) throw std::logic_error("begin before the last step was published");
  if (failure_.error != 0) return;  // wait_published tells
  parameters_ = parameters;
  hypers_ = hypers;
  prefetching_ = false;
  disk_order_.clear();
  resident_order_.clear();
  ready_.clear();
  ready_head_ = next_disk_ = next_resident_ = 0;
  unpublished_ = 0;
  for (const auto& chunk : chunks_) {
    if (active(*chunk)) {
      enlist(*chunk);
    } else if (chunk->state == ChunkState::ready) {
      release(*chunk, ChunkState::stored);
    } else if (chunk->state == ChunkState::reading) {
      chunk->unwanted = true;
    }
  }
  stepping_ = unpublished_ != 0;
  conductor_wakes_.notify_one();
}

// [Note: Once] Each chunk of a step waits in exactly one place until it is updated: in
// `resident_order_`; in `ready_`; in flight, whose end puts it in `ready_`; or in `disk_order_`, to
// be read. A chunk in two of them would be updated twice, and another one never.
void Pipeline::enlist(Chunk& chunk) {
  ++unpublished_;
  chunk.unwanted = false;
  if (!chunk.on_disk()) {
    resident_order_.push_back(chunk.number);
  } else if (chunk.state == ChunkState::ready) {
    ready_.push_back(chunk.number);
  } else if (chunk.state != ChunkState::reading) {
    disk_order_.push_back(chunk.number);
  }
}

Failure Pipeline::wait_published() {
  const double start = now();
  std::unique_lock lock(mutex_);
  callers_wake_.wait(lock, [this] { return !stepping_ || failure_.error != 0; });
  if (failure_.error != 0) {
    // The update under way reads the caller's gradients: it must end before the caller may free
    // them.
    callers_wake_.wait(lock, [this] { return !updating_; });
    stepping_ = false;
  }
  const double stop = now();
  counters_.wait_seconds += stop - start;
  trace_.record({start, stop, Lane::wait, -1, 0});
  return failure_;
}

Failure Pipeline::quiesce() {
  std::unique_lock lock(mutex_);
  prefetching_ = false;
  for (const auto& chunk : chunks_) {
    if (chunk->state == ChunkState::ready && !stepping_) release(*chunk, ChunkState::stored);
    if (chunk->state == ChunkState::reading && !stepping_) chunk->unwanted = true;
  }
  callers_wake_.wait(lock, [this] {
    const bool step_over = !stepping_ || failure_.error != 0;
    return step_over && !updating_ &&
           std::none_of(chunks_.begin(), chunks_.end(),
                        [](const auto& c) { return c->transfers_left != 0; });
  });
  return failure_;
}

Failure Pipeline::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

ChunkState Pipeline::state(int chunk) const {
  std::lock_guard lock(mutex_);
  return chunks_.at(chunk)->state;
}

void Pipeline::mark_stored(int chunk) {
  std::lock_guard lock(mutex_);
  move(*chunks_.at(chunk), ChunkState::stored);
}

PipelineCounters Pipeline::counters() const {
  std::lock_guard lock(mutex_);
  return counters_;
}

// --- the conductor ---

void Pipeline::conduct() {
  std::unique_lock lock(mutex_);
  for (;;) {
    conductor_wakes_.wait(lock, [this] { return stopping_ || runnable(); });
    if (stopping_) return;
    while (admit()) {
    }
    Chunk* chunk = pick();
    if (chunk == nullptr) continue;
    if (chunk->on_disk()) move(*chunk, ChunkState::updating);
    updating_ = true;
    lock.unlock();
    const double start = now();
    update(*chunk);
    trace_.record({start, now(), Lane::update, chunk->number, 0});
    lock.lock();
    updating_ = false;
    ++counters_.chunks_updated;
    if (chunk->on_disk()) start_write(*chunk);
    if (--unpublished_ == 0) stepping_ = false;
    if (!stepping_ || failure_.error != 0) callers_wake_.notify_all();
  }
}

// Whether `admit` or `pick` would do something.
bool Pipeline::runnable() const {
  if (failure_.error != 0) return false;
  if (stepping_ && (ready_head_ < ready_.size() || next_resident_ < resident_order_.size()))
    return true;
  if (!(stepping_ || prefetching_) || next_disk_ >= disk_order_.size()) return false;
  const Chunk& next = *chunks_[disk_order_[next_disk_]];
  switch (next.state) {
    case ChunkState::reading:
    case ChunkState::ready:
      return true;
    case ChunkState::blank:
      return prefetching_ || !free_slots_.empty();
    case ChunkState::stored:
      return !free_slots_.empty();
    default:
      return false;  // its last write must land before it is read again
  }
}

// Takes the next chunk of the order one state on; false when it must wait.
bool Pipeline::admit() {
  if (failure_.error != 0 || !(stepping_ || prefetching_) || next_disk_ >= disk_order_.size())
    return false;
  Chunk& chunk = *chunks_[disk_order_[next_disk_]];
  const bool here = chunk.state == ChunkState::reading || chunk.state == ChunkState::ready;
  const bool nothing_to_read = chunk.state == ChunkState::blank && prefetching_;
  if (!here && !nothing_to_read) {
    const bool startable = chunk.state == ChunkState::blank || chunk.state == ChunkState::stored;
    if (!startable || free_slots_.empty()) return false;
    const int slot = free_slots_.back();
    free_slots_.pop_back();
    ++counters_.slots_in_use;
    counters_.slots_high_water = std::max(counters_.slots_high_water, counters_.slots_in_use);
    start_read(chunk, slot);
  }
  ++next_disk_;
  return true;
}

// Chunks from disk go first: their slots are what the reads behind them wait for.
Pipeline::Chunk* Pipeline::pick() {
  if (!stepping_ || failure_.error != 0) return nullptr;
  if (ready_head_ < ready_.size()) return chunks_[ready_[ready_head_++]].get();
  if (next_resident_ < resident_order_.size())
    return chunks_[resident_order_[next_resident_++]].get();
  return nullptr;
}

void Pipeline::start_read(Chunk& chunk, int slot) {
  chunk.slot = slot;
  chunk.unwanted = false;
  chunk.fresh = chunk.state == ChunkState::blank;
  if (chunk.fresh) {
    move(chunk, ChunkState::ready);
    ready_.push_back(chunk.number);
    return;
  }
  move(chunk, ChunkState::reading);
  chunk.started = now();
  chunk.transfers_left = chunk.spec.family.streams();
  for (int k = 0; k < chunk.spec.family.streams(); ++k) {
    Transfer& t = chunk.transfers[k];
    t.file = chunk.spec.file;
    t.op = Op::read;
    t.data = ring_.base + slot * ring_.slot_bytes + k * ring_.stream_stride;
    t.length = chunk.spec.stream_bytes;
    t.offset = chunk.spec.offset + k * chunk.spec.stream_bytes;
    t.done = &Pipeline::on_transfer;
    t.context = &chunk;
    engine_.submit(&t);
  }
}

void Pipeline::start_write(Chunk& chunk) {
  move(chunk, ChunkState::writing);
  chunk.fresh = false;
  chunk.started = now();
  chunk.transfers_left = chunk.spec.family.streams();
  for (int k = 0; k < chunk.spec.family.streams(); ++k) {
    Transfer& t = chunk.transfers[k];
    t.file = chunk.spec.file;
    t.op = Op::write;
    t.data = ring_.base + chunk.slot * ring_.slot_bytes + k * ring_.stream_stride;
    t.length = chunk.spec.stream_bytes;
    t.offset = chunk.spec.offset + k * chunk.spec.stream_bytes;
    t.done = &Pipeline::on_transfer;
    t.context = &chunk;
    engine_.submit(&t);
  }
}

void Pipeline::on_transfer(Transfer* transfer) {
  Chunk& chunk = *static_cast<Chunk*>(transfer->context);
  chunk.pipeline->transferred(chunk, *transfer);
}

void Pipeline::transferred(Chunk& chunk, const Transfer& transfer) {
  std::lock_guard lock(mutex_);
  if (transfer.error != 0 && failure_.error == 0) {
    failure_ = {transfer.error, transfer.file,         chunk.number,
                transfer.op,    transfer.error_offset, transfer.error_length};
  }
  (transfer.op == Op::read ? counters_.bytes_read : counters_.bytes_written) += transfer.moved;
  if (--chunk.transfers_left != 0) return;
  const bool reading = transfer.op == Op::read;
  trace_.record(
      {chunk.started, now(), reading ? Lane::read : Lane::write, chunk.number, chunk.bytes()});
  const bool failed = std::any_of(chunk.transfers, chunk.transfers + chunk.spec.family.streams(),
                                  [](const Transfer& t) { return t.error != 0; });
  if (failed) {
    release(chunk, ChunkState::lost);
  } else if (!reading) {
    release(chunk, ChunkState::stored);
  } else {
    move(chunk, ChunkState::ready);
    if (chunk.unwanted) {
      release(chunk, ChunkState::stored);
    } else if (stepping_) {
      ready_.push_back(chunk.number);
    }
  }
  conductor_wakes_.notify_one();
  callers_wake_.notify_all();
}

void Pipeline::release(Chunk& chunk, ChunkState next) {
  move(chunk, chunk.fresh ? ChunkState::blank : next);
  free_slots_.push_back(chunk.slot);
  --counters_.slots_in_use;
  chunk.slot = -1;
  chunk.fresh = false;
  chunk.unwanted = false;
}

void Pipeline::move(Chunk& chunk, ChunkState next) {
  if (!kLegal[static_cast<int>(chunk.state)][static_cast<int>(next)]) {
    throw std::logic_error("chunk " + std::to_string(chunk.number) + ": illegal transition " +
                           std::to_string(static_cast<int>(chunk.state)) + " -> " +
                           std::to_string(static_cast<int>(next)));
  }
  chunk.state = next;
}

bool Pipeline::idle() const { return !stepping_ && !prefetching_ && counters_.slots_in_use == 0; }

bool Pipeline::active(const Chunk& chunk) const {
  return std::any_of(
      chunk.spec.segments.begin(), chunk.spec.segments.end(),
      [this](const Segment& s) { return parameters_.at(s.parameter).grad != nullptr; });
}

// --- the update ---

void Pipeline::update(Chunk& chunk) {
  char* streams[kMaxStreams];
  for (int k = 0; k < chunk.spec.family.streams(); ++k) {
    streams[k] = chunk.on_disk()
                     ? ring_.base + chunk.slot * ring_.slot_bytes + k * ring_.stream_stride
                     : chunk.spec.resident[k];
    if (chunk.fresh) std::memset(streams[k], 0, chunk.spec.stream_bytes);
  }
  const auto body = [&](std::int64_t b) { update_block(chunk, chunk.blocks[b], streams); };
  // By reference: the capture is too large for std::function to hold without allocating.
  pool().run(static_cast<std::int64_t>(chunk.blocks.size()), std::cref(body));
}

void Pipeline::update_block(const Chunk& chunk, const UpdateBlock& block, char* const* streams) {
  const Segment& segment = chunk.spec.segments[block.segment];
  const StepParameter& parameter = parameters_[segment.parameter];
  if (parameter.grad == nullptr) return;
  const Family& family = chunk.spec.family;
  const std::int64_t at = segment.parameter_offset + block.offset;
  const std::int64_t state_at = 4 * (segment.chunk_offset + block.offset);
  const int last = family.streams() - 1;
  AdamArgs args;
  args.param = static_cast<char*>(parameter.param) + at * size_of(family.param_dtype);
  args.grad = static_cast<const char*>(parameter.grad) + at * size_of(parameter.grad_dtype);
  args.m = reinterpret_cast<float*>(streams[0] + state_at);
  args.v = reinterpret_cast<float*>(streams[1] + state_at);
  args.vmax = family.amsgrad ? reinterpret_cast<float*>(streams[2] + state_at) : nullptr;
  args.master = family.param_dtype == DType::f32
                    ? nullptr
                    : reinterpret_cast<float*>(streams[last] + state_at);
  args.n = block.count;
  args.param_dtype = family.param_dtype;
  args.grad_dtype = parameter.grad_dtype;
  args.seed_master = parameter.seed_master;
  args.hyper = hypers_[parameter.hyper];
  adam_update(args, isa_);
}

}  // namespace stow
