#include "pipeline/pipeline.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/affinity.h"
#include "base/metered.h"

namespace stow {

// [Note: Once] Each chunk of a step is in exactly one of these until it is updated. A chunk in two
// places would be updated twice, and another one never.
enum class Pipeline::Stage : std::uint8_t {
  out,       // no part of this step, or done with
  waiting,   // to be admitted
  admitted,  // has a slot, or its own memory: its read or a gradient is still to come
  queued,    // in ready_ or homely_
  outside,   // in outside_
  lent,      // in the hands of who took it from there
  returned,  // in returned_
};

struct Pipeline::Chunk {
  Chunk(Pipeline* owner, int n, ChunkSpec s)
      : pipeline(owner), number(n), spec(std::move(s)), parts(spec) {}

  Pipeline* pipeline;
  int number;
  ChunkSpec spec;
  ChunkParts parts;
  Marks marks;
  std::vector<SegmentGradient> gradients;  // of the step, by segment
  ChunkState state = ChunkState::blank;
  Stage stage = Stage::out;
  DiskPosition place;      // where the states were last written
  DiskPosition target;     // where they are to be written next
  bool captured = false;   // `place` also holds the weights of now
  bool capturing = false;  // what is being written holds them
  bool verify = false;     // the slot was filled from disk and not looked at yet
  bool fresh = false;      // states that are zero and in no slot's memory yet
  bool unwanted = false;   // let go as soon as its read has landed
  int gradients_due = 0;   // of its parameters, in an open step
  bool has_gradient = false;
  bool goes_outside = true;  // in an outside step
  int slot = -1;
  int transfers_left = 0;
  int first_transfer = 0;
  int transfer_count = 0;
  Transfer transfers[kMaxParts];
  double started = 0;  // of the read or write in flight
  std::int64_t moving = 0;
  Metered::Clock::time_point ready;  // all that it waits for was there

  bool at_home() const { return spec.resident[0] != nullptr; }
  bool blank() const { return state == ChunkState::blank; }
};

namespace {

std::size_t segment_of(const ChunkSpec& spec, int parameter) {
  for (std::size_t s = 0; s < spec.segments.size(); ++s) {
    if (spec.segments[s].parameter == parameter) return s;
  }
  throw std::out_of_range("the chunk has nothing of this parameter");
}

SegmentGradient piece_of(const StepParameter& parameter, const Segment& segment) {
  const std::int64_t at = segment.parameter_offset * size_of(parameter.grad_dtype);
  return {static_cast<const char*>(parameter.grad) + at, parameter.grad_dtype, false};
}

}  // namespace

Pipeline::Pipeline(Engine& engine, Isa isa, Order order, Team team)
    : engine_(engine), isa_(isa), order_kind_(order), team_(team), owner_(getpid()) {
  conductor_ = std::thread([this] {
    confine_thread();
    conduct();
  });
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

// --- what there is ---

void Pipeline::set_ring(const RingSpec& ring) {
  std::lock_guard lock(mutex_);
  if (!idle()) throw std::logic_error("set_ring while a step or a prefetch is under way");
  ring_ = ring;
  free_slots_.clear();
  free_slots_.reserve(ring.slots);
  for (int slot = ring.slots - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

int Pipeline::add_chunk(ChunkSpec spec, bool blank, std::vector<std::uint32_t> states,
                        std::vector<std::uint32_t> weights) {
  std::lock_guard lock(mutex_);
  if (!idle()) throw std::logic_error("add_chunk while a step or a prefetch is under way");
  const int number = static_cast<int>(chunks_.size());
  auto chunk = std::make_unique<Chunk>(this, number, std::move(spec));
  const std::size_t blocks = chunk->parts.blocks.size();
  const std::size_t pieces = chunk->parts.pieces.size();
  chunk->place = chunk->target = chunk->spec.place;
  const bool stored = !blank && chunk->place.file >= 0;
  if (states.size() != blocks && (stored || !states.empty())) {
    throw std::invalid_argument("add_chunk: one checksum for each block");
  }
  if (!weights.empty() && weights.size() != blocks) {
    throw std::invalid_argument("add_chunk: one weight checksum for each block");
  }
  if (!blank && !stored && !chunk->at_home()) {
    throw std::invalid_argument("add_chunk: states that are neither zero nor anywhere");
  }
  chunk->marks.states = states.empty() ? std::vector<std::uint32_t>(blocks) : std::move(states);
  chunk->gradients.resize(chunk->spec.segments.size());
  chunk->marks.published.resize(pieces);
  chunk->marks.is_published.resize(pieces);
  // Memory of its own is zero when it is made, as blank states are; but its place does not hold
  // those zeros, so the next commit writes them.
  chunk->captured = !weights.empty() && !(blank && chunk->at_home());
  chunk->marks.weights = weights.empty() ? std::vector<std::uint32_t>(blocks) : std::move(weights);
  chunk->state = stored             ? ChunkState::stored
                 : chunk->at_home() ? ChunkState::resident
                                    : ChunkState::blank;
  for (const Segment& segment : chunk->spec.segments) {
    const auto parameter = static_cast<std::size_t>(segment.parameter);
    if (chunks_of_.size() <= parameter) chunks_of_.resize(parameter + 1);
    chunks_of_[parameter].push_back(number);
  }
  chunks_.push_back(std::move(chunk));
  order_.push_back(number);
  hot_.reserve(chunks_.size());
  ready_.reserve(chunks_.size());
  homely_.reserve(chunks_.size());
  outside_.reserve(chunks_.size());
  returned_.reserve(chunks_.size());
  return number;
}

void Pipeline::set_order(std::vector<int> order) {
  std::lock_guard lock(mutex_);
  if (stepping_) throw std::logic_error("set_order in a step");
  std::vector<int> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t k = 0; k < sorted.size(); ++k) {
    if (sorted[k] != static_cast<int>(k)) throw std::invalid_argument("set_order: each chunk once");
  }
  if (sorted.size() != chunks_.size()) throw std::invalid_argument("set_order: all chunks");
  order_ = std::move(order);
  next_ = 0;
}

void Pipeline::set_outside(const std::vector<int>& chunks) {
  std::lock_guard lock(mutex_);
  if (stepping_) throw std::logic_error("set_outside in a step");
  for (const auto& chunk : chunks_) chunk->goes_outside = false;
  for (int number : chunks) chunks_.at(number)->goes_outside = true;
}

// --- a step ---

// The update under way reads the caller's gradients: after a failure it must end before the caller
// may free them.
template <class Over>
void Pipeline::sleep_until(std::unique_lock<std::mutex>& lock, Over over) {
  ++waiters_;
  callers_wake_.wait(lock, [&] { return over() && !(failure_.error != 0 && updating_); });
  --waiters_;
}

void Pipeline::prefetch() {
  std::lock_guard lock(mutex_);
  if (stepping_ || prefetching_ || failure_.error != 0) return;
  prefetching_ = true;
  next_ = 0;
  work_ = true;
  conductor_wakes_.notify_one();
}

void Pipeline::begin(const std::vector<StepParameter>& parameters,
                     const std::vector<AdamHyper>& hypers, const StepSpec& step,
                     const std::vector<char>& expected) {
  std::unique_lock lock(mutex_);
  if (failure_.error != 0) {  // the waits tell
    sleep_until(lock, [] { return true; });
    return;
  }
  if (stepping_) throw std::logic_error("begin before the last step was published");
  if (parameters.size() < chunks_of_.size()) {
    throw std::invalid_argument("begin: chunks have parameters that are not among these");
  }
  parameters_ = parameters;
  hypers_ = hypers;
  expected_.assign(parameters_.size(), 0);
  if (step.open)
    std::copy_n(expected.begin(), std::min(expected.size(), expected_.size()), expected_.begin());
  unpublished_of_.assign(parameters_.size(), 0);
  pieces_due_of_.assign(parameters_.size(), 0);
  step_ = step;
  prefetching_ = false;
  hot_.clear();
  ready_.clear();
  homely_.clear();
  outside_.clear();
  returned_.clear();
  next_ = 0;
  unfinished_ = 0;
  stepping_ = true;
  for (int number : order_) enlist(*chunks_[number]);
  stepping_ = step_.open || unfinished_ != 0;
  work_ = true;
  conductor_wakes_.notify_one();
}

// Decides what the step is to do with a chunk.
void Pipeline::enlist(Chunk& chunk) {
  chunk.stage = Stage::out;
  chunk.gradients_due = 0;
  chunk.has_gradient = false;
  for (std::size_t s = 0; s < chunk.spec.segments.size(); ++s) {
    const Segment& segment = chunk.spec.segments[s];
    const StepParameter& parameter = parameters_[segment.parameter];
    SegmentGradient& gradient = chunk.gradients[s] = {};
    if (parameter.grad != nullptr) {
      gradient = piece_of(parameter, segment);
      chunk.has_gradient = true;
    } else if (step_.open && expected_[segment.parameter]) {
      gradient.due = true;
      ++chunk.gradients_due;
      ++pieces_due_of_[segment.parameter];
    } else {
      continue;
    }
    ++unpublished_of_[segment.parameter];
  }
  const bool carried = step_.capture && !chunk.captured;
  if (!chunk.has_gradient && chunk.gradients_due == 0 && !carried) {
    drop(chunk);
    return;
  }
  ++unfinished_;
  chunk.unwanted = false;
  chunk.stage = Stage::waiting;
  if (chunk.state == ChunkState::ready || chunk.state == ChunkState::reading ||
      chunk.state == ChunkState::resident) {
    chunk.stage = Stage::admitted;
  }
  if (chunk.gradients_due == 0) complete(chunk);
}

// The chunk has no part in this step.
void Pipeline::drop(Chunk& chunk) {
  chunk.stage = Stage::out;
  if (chunk.state == ChunkState::ready) {
    leave_slot(chunk, chunk.fresh ? ChunkState::blank : ChunkState::stored);
  } else if (chunk.state == ChunkState::reading) {
    chunk.unwanted = true;
  }
}

// All gradients that the chunk will get are there.
void Pipeline::complete(Chunk& chunk) {
  chunk.ready = Metered::Clock::now();
  if (chunk.stage == Stage::waiting) {
    if (step_.open) hot_.push(chunk.number);
  } else if (chunk.state == ChunkState::ready) {
    chunk.stage = Stage::queued;
    ready_.push(chunk.number);
  } else if (chunk.state == ChunkState::resident) {
    chunk.stage = Stage::queued;
    homely_.push(chunk.number);
  }  // else its read is in flight, whose end queues it
}

void Pipeline::land(int parameter, const void* grad, DType dtype) {
  std::lock_guard lock(mutex_);
  if (failure_.error != 0) return;  // the waits tell
  if (!stepping_ || !step_.open || !expected_.at(parameter)) {
    throw std::logic_error("land: no gradient of this parameter is expected");
  }
  expected_[parameter] = 0;
  parameters_[parameter].grad = grad;
  parameters_[parameter].grad_dtype = dtype;
  if (static_cast<std::size_t>(parameter) < chunks_of_.size()) {
    for (int number : chunks_of_[parameter]) {
      Chunk& chunk = *chunks_[number];
      const std::size_t s = segment_of(chunk.spec, parameter);
      const SegmentGradient gradient = piece_of(parameters_[parameter], chunk.spec.segments[s]);
      land_segment(chunk, s, gradient.data, gradient.dtype);
    }
  }
  work_ = true;
  conductor_wakes_.notify_one();
}

void Pipeline::land_pieces(int number, const std::vector<PieceGradient>& pieces) {
  std::lock_guard lock(mutex_);
  if (failure_.error != 0) return;  // the waits tell
  Chunk& chunk = *chunks_.at(number);
  for (const PieceGradient& piece : pieces) {
    const std::size_t s = segment_of(chunk.spec, piece.parameter);
    if (!stepping_ || !step_.open || !chunk.gradients[s].due) {
      throw std::logic_error("land_pieces: no gradient of this piece is expected");
    }
    land_segment(chunk, s, piece.grad, piece.dtype);
    if (pieces_due_of_[piece.parameter] == 0) expected_[piece.parameter] = 0;
  }
  work_ = true;
  conductor_wakes_.notify_one();
}

// What was due is there, or (null) will not come.
void Pipeline::land_segment(Chunk& chunk, std::size_t segment, const void* data, DType dtype) {
  const int parameter = chunk.spec.segments[segment].parameter;
  chunk.gradients[segment] = {static_cast<const char*>(data), dtype, false};
  --pieces_due_of_[parameter];
  if (data != nullptr) {
    chunk.has_gradient = true;
  } else {
    --unpublished_of_[parameter];
  }
  if (--chunk.gradients_due != 0) return;
  if (chunk.has_gradient || (step_.capture && !chunk.captured)) {
    complete(chunk);
  } else {
    drop(chunk);
    --unfinished_;
  }
}

void Pipeline::close() {
  std::lock_guard lock(mutex_);
  if (failure_.error != 0) return;
  if (!stepping_ || !step_.open) throw std::logic_error("close: no open step");
  std::fill(expected_.begin(), expected_.end(), 0);
  for (const auto& chunk : chunks_) {
    for (std::size_t s = 0; s < chunk->gradients.size() && chunk->gradients_due != 0; ++s) {
      if (chunk->gradients[s].due) land_segment(*chunk, s, nullptr, DType::f32);
    }
  }
  step_.open = false;
  if (unfinished_ == 0) {
    stepping_ = false;
    arrange();
  }
  work_ = true;
  conductor_wakes_.notify_one();
  callers_wake_.notify_all();
}

Outside Pipeline::next_outside(bool wait) {
  std::unique_lock lock(mutex_);
  const double start = now();
  if (wait) {
    sleep_until(lock, [this] { return !outside_.empty() || !stepping_ || failure_.error != 0; });
    counters_.wait_seconds += now() - start;
  }
  if (outside_.empty() || failure_.error != 0) return {};
  Chunk& chunk = *chunks_[outside_.front()];
  outside_.pop();
  chunk.stage = Stage::lent;
  return {chunk.number, chunk.state == ChunkState::resident ? -1 : chunk.slot};
}

void Pipeline::outside_done(int number) {
  std::lock_guard lock(mutex_);
  Chunk& chunk = *chunks_.at(number);
  if (chunk.stage != Stage::lent) {
    throw std::logic_error("outside_done: the chunk was not lent");
  }
  chunk.stage = Stage::returned;
  returned_.push(number);
  work_ = true;
  conductor_wakes_.notify_one();
}

// The order of the next step. What this step's end left in the ring comes first.
void Pipeline::arrange() {
  if (order_kind_ == Order::alternating) std::reverse(order_.begin(), order_.end());
  next_ = 0;
}

template <class Over>
Failure Pipeline::wait(Over over) {
  const double start = now();
  std::unique_lock lock(mutex_);
  sleep_until(lock, [&] { return over() || failure_.error != 0; });
  if (failure_.error != 0) stepping_ = false;
  const double stop = now();
  counters_.wait_seconds += stop - start;
  trace_.record({start, stop, Lane::wait, -1, 0});
  return failure_;
}

Failure Pipeline::wait_published() {
  return wait([this] { return !stepping_; });
}

Failure Pipeline::wait_parameters(const std::vector<int>& parameters) {
  return wait([&] {
    return !stepping_ || std::all_of(parameters.begin(), parameters.end(), [this](int parameter) {
      return unpublished_of_.at(parameter) == 0 || expected_[parameter];
    });
  });
}

bool Pipeline::is_published(int parameter) const {
  std::lock_guard lock(mutex_);
  return !stepping_ || unpublished_of_.at(parameter) == 0;
}

Failure Pipeline::wait_chunk(int chunk) {
  return wait(
      [&] { return !stepping_ || chunks_.at(chunk)->stage == Stage::out || !outside_.empty(); });
}

bool Pipeline::is_updated(int chunk) const {
  std::lock_guard lock(mutex_);
  return !stepping_ || chunks_.at(chunk)->stage == Stage::out;
}

Failure Pipeline::wait_written() {
  std::unique_lock lock(mutex_);
  sleep_until(lock, [this] {
    if (failure_.error != 0) return true;
    return !stepping_ && std::none_of(chunks_.begin(), chunks_.end(), [](const auto& c) {
      return c->state == ChunkState::writing;
    });
  });
  return failure_;
}

Failure Pipeline::quiesce() {
  std::unique_lock lock(mutex_);
  prefetching_ = false;
  for (const auto& chunk : chunks_) {
    if (!stepping_) drop(*chunk);
  }
  sleep_until(lock, [this] {
    const bool step_over = !stepping_ || failure_.error != 0;
    return step_over && !anything_in_flight();
  });
  // What landed meanwhile may have stayed in its slot.
  for (const auto& chunk : chunks_) drop(*chunk);
  return failure_;
}

// --- the conductor ---

void Pipeline::conduct() {
  std::unique_lock lock(mutex_);
  for (;;) {
    conductor_wakes_.wait(lock, [this] { return stopping_ || work_; });
    if (stopping_) return;
    work_ = false;
    for (;;) {
      while (admit()) {
      }
      Chunk* chunk = pick();
      if (chunk == nullptr || stopping_) break;
      run(*chunk, lock);
    }
  }
}

// Takes the next chunk into memory; false when there is none or it must wait.
bool Pipeline::admit() {
  if (failure_.error != 0 || !(stepping_ || prefetching_)) return false;
  Chunk* chunk = next_to_admit();
  if (chunk == nullptr) return false;
  const bool urgent = stepping_ && chunk->gradients_due == 0;
  if (free_slots_.empty() && !(urgent && evict())) return false;
  if (!hot_.empty() && hot_.front() == chunk->number) hot_.pop();
  bring_in(*chunk);
  return true;
}

bool Pipeline::startable(const Chunk& chunk) {
  return chunk.state == ChunkState::blank || chunk.state == ChunkState::stored;
}

// Passes by those that need nothing; null where the first that does must wait.
Pipeline::Chunk* Pipeline::next_to_admit() {
  if (stepping_) {
    while (!hot_.empty() && chunks_[hot_.front()]->stage != Stage::waiting) hot_.pop();
    if (!hot_.empty() && startable(*chunks_[hot_.front()])) return chunks_[hot_.front()].get();
  }
  for (; next_ < order_.size(); ++next_) {
    Chunk& chunk = *chunks_[order_[next_]];
    if (stepping_) {
      if (chunk.stage != Stage::waiting) continue;
      if (chunk.blank() && chunk.gradients_due != 0) continue;  // nothing to read ahead of it
    } else if (chunk.state != ChunkState::stored && chunk.state != ChunkState::writing) {
      continue;
    }
    if (chunk.at_home() && chunk.state == ChunkState::writing)
      continue;  // `settle_write` sees to it
    return startable(chunk) ? &chunk : nullptr;
  }
  return nullptr;
}

// Whether the step has more chunks to bring in than there are slots for.
bool Pipeline::slots_are_wanted() const {
  if (!stepping_) return false;
  // What is resident goes through a slot only where it is written too.
  if (!hot_.empty() || (step_.capture && !homely_.empty())) return true;
  std::size_t wanting = 0;
  for (std::size_t k = next_; k < order_.size() && wanting <= free_slots_.size(); ++k) {
    const Chunk& chunk = *chunks_[order_[k]];
    wanting += chunk.stage == Stage::waiting && startable(chunk) ? 1 : 0;
  }
  return wanting > free_slots_.size();
}

// Frees a slot for a chunk that has its gradients: that of one which has no part in the step, else
// of the last one in the order whose gradients are still to come.
bool Pipeline::evict() {
  Chunk* last = nullptr;
  for (int number : order_) {
    Chunk& chunk = *chunks_[number];
    if (chunk.state != ChunkState::ready) continue;
    if (chunk.stage == Stage::out) {
      drop(chunk);
      return true;
    }
    if (chunk.stage == Stage::admitted && chunk.gradients_due != 0) last = &chunk;
  }
  if (last == nullptr) return false;
  leave_slot(*last, last->fresh ? ChunkState::blank : ChunkState::stored);
  last->stage = Stage::waiting;
  return true;
}

void Pipeline::take_slot(Chunk& chunk) {
  chunk.slot = free_slots_.back();
  free_slots_.pop_back();
  ++counters_.slots_in_use;
  counters_.slots_high_water = std::max(counters_.slots_high_water, counters_.slots_in_use);
}

// Gives the chunk a slot and starts filling it.
void Pipeline::bring_in(Chunk& chunk) {
  take_slot(chunk);
  chunk.unwanted = false;
  chunk.stage = stepping_ ? Stage::admitted : Stage::out;
  // The states of a chunk that only gives its weights to a commit are where they belong already.
  const bool weights_only =
      stepping_ && !chunk.has_gradient && chunk.gradients_due == 0 && chunk.place == chunk.target;
  chunk.fresh = chunk.blank();
  if (chunk.fresh || weights_only) {
    move(chunk, ChunkState::ready);
    if (stepping_ && chunk.gradients_due == 0) complete(chunk);
    return;
  }
  move(chunk, ChunkState::reading);
  chunk.verify = true;
  submit(chunk, Op::read, chunk.place, 0, chunk.parts.layout.streams);
}

// Chunks in slots go first: their slots are what the reads behind them wait for.
Pipeline::Chunk* Pipeline::pick() {
  if (!stepping_ || failure_.error != 0) return nullptr;
  if (!returned_.empty()) {
    Chunk& chunk = *chunks_[returned_.front()];
    returned_.pop();
    return &chunk;
  }
  Queue* queue = &ready_;
  if (!homely_.empty() && (ready_.empty() || step_.home_first)) {
    // A commit also writes what is resident, through a slot.
    if (!step_.capture || !free_slots_.empty() || evict()) queue = &homely_;
  }
  if (queue->empty()) return nullptr;
  Chunk& chunk = *chunks_[queue->front()];
  queue->pop();
  return &chunk;
}

void Pipeline::run(Chunk& chunk, std::unique_lock<std::mutex>& lock) {
  const bool home = chunk.state == ChunkState::resident;
  const bool idle_chunk = !chunk.has_gradient;
  const bool states_in_place = idle_chunk && !home && chunk.place == chunk.target;
  const bool empty_slot = states_in_place || (chunk.fresh && idle_chunk);
  const bool outside = step_.outside && chunk.goes_outside && !idle_chunk;
  const Half half = chunk.stage == Stage::returned ? Half::after
                    : outside                      ? Half::before
                                                   : Half::both;
  if (half != Half::after) {
    chunk.capturing = step_.capture;
    if (home && step_.capture) take_slot(chunk);
    if (!home) move(chunk, ChunkState::updating);
    if (!home && !empty_slot && !chunk.fresh && !chunk.verify) {
      counters_.bytes_spared += chunk.parts.layout.state_bytes();
    }
    chunk.started = now();
  }
  const UpdateTask task{chunk.spec,
                        chunk.parts,
                        chunk.gradients,
                        chunk.marks,
                        memory_of(chunk, home, empty_slot),
                        chunk.fresh,
                        idle_chunk,
                        chunk.verify && !empty_slot,
                        !empty_slot && (!home || step_.capture),
                        half};
  const int threads = step_.background && waiters_ == 0 ? team_.few : team_.whole;
  updating_ = true;
  lock.unlock();
  const bool slow = update_lane.is_on() && half == Half::both && !idle_chunk;
  const auto over =
      slow ? update_lane.take(chunk.spec.elements, chunk.ready) : Metered::Clock::time_point{};
  const std::int64_t damaged = update_chunk(task, parameters_, hypers_, isa_, threads);
  if (slow) std::this_thread::sleep_until(over);
  if (half != Half::before) {
    trace_.record({chunk.started, now(), Lane::update, chunk.number, 0});
  }
  lock.lock();
  updating_ = false;
  if (damaged >= 0) {
    const Layout::Part& part = chunk.parts.layout.parts[0];
    const UpdateBlock& block = chunk.parts.blocks[damaged];
    fail({kDamaged, chunk.place.file, chunk.number, Op::read,
          chunk.place.offset + part.file_at + part.at(block.begin),
          part.length(block.end - block.begin)});
    leave_slot(chunk, ChunkState::lost);
    return;
  }
  chunk.verify = false;
  if (half != Half::before) {
    settle_update(chunk, home, empty_slot);
    return;
  }
  chunk.stage = Stage::outside;
  outside_.push(chunk.number);
  callers_wake_.notify_all();
}

UpdateMemory Pipeline::memory_of(const Chunk& chunk, bool home, bool empty_slot) const {
  const int streams = chunk.parts.layout.streams;
  UpdateMemory memory{};
  for (int k = 0; k < streams; ++k) {
    memory.states[k] = home ? chunk.spec.resident[k] : slot_part(chunk, k);
    if (home && step_.capture) memory.copy[k] = slot_part(chunk, k);
    if (!home && chunk.at_home()) memory.copy[k] = chunk.spec.resident[k];
  }
  if (step_.capture) memory.weight = slot_part(chunk, streams);
  if (empty_slot) memory.copy[0] = nullptr;
  return memory;
}

// The chunk's memory holds what is new: it goes where it belongs.
void Pipeline::settle_update(Chunk& chunk, bool home, bool empty_slot) {
  const int streams = chunk.parts.layout.streams;
  const bool idle_chunk = !chunk.has_gradient;
  if (!idle_chunk) ++counters_.chunks_updated;
  if (empty_slot) {  // the states are where they belong, or still blank
    start_write(chunk, streams, 1);
  } else if (!home || step_.capture) {
    const bool settled = chunk.at_home() && !home && !step_.capture;
    if (!idle_chunk) chunk.fresh = false;
    if (settled) {  // read once, and in its own memory from now on
      leave_slot(chunk, ChunkState::resident);
    } else {
      start_write(chunk, 0, streams + (step_.capture ? 1 : 0));
    }
  }
  if (!idle_chunk && !step_.capture) chunk.captured = false;
  finish(chunk);
}

// The chunk's part of the step is published.
void Pipeline::finish(Chunk& chunk) {
  chunk.stage = Stage::out;
  for (std::size_t s = 0; s < chunk.gradients.size(); ++s) {
    if (chunk.gradients[s].data != nullptr) --unpublished_of_[chunk.spec.segments[s].parameter];
  }
  if (--unfinished_ == 0 && !step_.open) {
    stepping_ = false;
    arrange();
  }
  callers_wake_.notify_all();
}

// --- transfers ---

char* Pipeline::slot_part(const Chunk& chunk, int part) const {
  return ring_.base + chunk.slot * ring_.slot_bytes + chunk.parts.layout.parts[part].slot_at;
}

void Pipeline::start_write(Chunk& chunk, int first_part, int parts) {
  move(chunk, ChunkState::writing);
  submit(chunk, Op::write, chunk.target, first_part, parts);
}

void Pipeline::submit(Chunk& chunk, Op op, DiskPosition place, int first_part, int parts) {
  chunk.started = now();
  chunk.moving = 0;
  chunk.transfers_left = chunk.transfer_count = parts;
  for (int k = 0; k < parts; ++k) {
    const Layout::Part& part = chunk.parts.layout.parts[first_part + k];
    Transfer& t = chunk.transfers[k];
    t = Transfer{};
    t.file = place.file;
    t.op = op;
    t.data = slot_part(chunk, first_part + k);
    t.length = part.bytes;
    t.offset = place.offset + part.file_at;
    t.done = &Pipeline::on_transfer;
    t.context = &chunk;
    chunk.moving += part.bytes;
  }
  for (int k = 0; k < parts; ++k) engine_.submit(&chunk.transfers[k]);
}

void Pipeline::on_transfer(Transfer* transfer) {
  Chunk& chunk = *static_cast<Chunk*>(transfer->context);
  chunk.pipeline->transferred(chunk, *transfer);
}

void Pipeline::transferred(Chunk& chunk, const Transfer& transfer) {
  std::lock_guard lock(mutex_);
  if (transfer.error != 0) {
    fail({transfer.error, transfer.file, chunk.number, transfer.op, transfer.error_offset,
          transfer.error_length});
  }
  const bool reading = transfer.op == Op::read;
  (reading ? counters_.bytes_read : counters_.bytes_written) += transfer.moved;
  if (--chunk.transfers_left != 0) return;
  trace_.record(
      {chunk.started, now(), reading ? Lane::read : Lane::write, chunk.number, chunk.moving});
  const bool failed = std::any_of(chunk.transfers, chunk.transfers + chunk.transfer_count,
                                  [](const Transfer& t) { return t.error != 0; });
  if (failed) {
    leave_slot(chunk, ChunkState::lost);
  } else if (!reading) {
    settle_write(chunk);
  } else {
    move(chunk, ChunkState::ready);
    if (chunk.unwanted) {
      leave_slot(chunk, ChunkState::stored);
    } else if (chunk.stage == Stage::admitted && chunk.gradients_due == 0) {
      complete(chunk);
    }
  }
  work_ = true;
  conductor_wakes_.notify_one();
  callers_wake_.notify_all();
}

void Pipeline::settle_write(Chunk& chunk) {
  chunk.place = chunk.target;
  chunk.captured = chunk.capturing;
  if (chunk.fresh) {
    leave_slot(chunk, ChunkState::blank);
    return;
  }
  const bool whole = chunk.transfer_count >= chunk.parts.layout.streams;
  if (chunk.at_home() && whole) {
    leave_slot(chunk, ChunkState::resident);
    if (chunk.stage == Stage::waiting) {  // a new step has begun
      chunk.stage = Stage::admitted;
      if (chunk.gradients_due == 0) complete(chunk);
    }
    return;
  }
  // A new step has begun and has its gradients: it need not read what the slot holds.
  if (chunk.stage == Stage::waiting && chunk.gradients_due == 0 && whole) {
    move(chunk, ChunkState::ready);
    chunk.stage = Stage::admitted;
    complete(chunk);
    return;
  }
  // The slot keeps what was written where nobody needs it now and the next step begins with it.
  const bool over = chunk.stage == Stage::out && !slots_are_wanted();
  if (order_kind_ == Order::alternating && whole && over) {
    move(chunk, ChunkState::ready);
  } else {
    leave_slot(chunk, ChunkState::stored);
  }
}

void Pipeline::leave_slot(Chunk& chunk, ChunkState next) {
  move(chunk, next);
  free_slots_.push_back(chunk.slot);
  --counters_.slots_in_use;
  chunk.slot = -1;
  chunk.fresh = chunk.unwanted = chunk.verify = false;
}

void Pipeline::move(Chunk& chunk, ChunkState next) {
  if (!legal(chunk.state, next)) {
    throw std::logic_error("chunk " + std::to_string(chunk.number) + ": illegal transition " +
                           std::to_string(static_cast<int>(chunk.state)) + " -> " +
                           std::to_string(static_cast<int>(next)));
  }
  chunk.state = next;
}

void Pipeline::fail(const Failure& failure) {
  if (failure_.error == 0) failure_ = failure;
  callers_wake_.notify_all();
}

bool Pipeline::idle() const { return !stepping_ && !prefetching_ && counters_.slots_in_use == 0; }

bool Pipeline::anything_in_flight() const {
  return std::any_of(chunks_.begin(), chunks_.end(),
                     [](const auto& c) { return c->transfers_left != 0; });
}

// --- questions and answers ---

bool Pipeline::is_over() const {
  std::lock_guard lock(mutex_);
  return !stepping_ && !updating_;
}

Failure Pipeline::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::vector<int> Pipeline::order() const {
  std::lock_guard lock(mutex_);
  return order_;
}

ChunkState Pipeline::state(int chunk) const {
  std::lock_guard lock(mutex_);
  return chunks_.at(chunk)->state;
}

DiskPosition Pipeline::place(int chunk) const {
  std::lock_guard lock(mutex_);
  return chunks_.at(chunk)->place;
}

bool Pipeline::captured(int chunk) const {
  std::lock_guard lock(mutex_);
  return chunks_.at(chunk)->captured;
}

void Pipeline::forget_capture(int parameter) {
  std::lock_guard lock(mutex_);
  if (static_cast<std::size_t>(parameter) >= chunks_of_.size()) return;
  for (int number : chunks_of_[parameter]) {
    chunks_[number]->captured = chunks_[number]->capturing = false;
  }
}

void Pipeline::set_target(int chunk, DiskPosition target) {
  std::lock_guard lock(mutex_);
  Chunk& c = *chunks_.at(chunk);
  // A slot may have been filled for the weights alone, for the states stay where they are.
  if (c.state == ChunkState::writing || c.stage != Stage::out) {
    throw std::logic_error("set_target before the step has written it");
  }
  c.target = target;
}

const Marks& Pipeline::marks(int chunk) const {
  std::lock_guard lock(mutex_);
  return chunks_.at(chunk)->marks;
}

void Pipeline::rewritten(int chunk, char* const* streams) {
  std::lock_guard lock(mutex_);
  Chunk& c = *chunks_.at(chunk);
  for (std::size_t b = 0; b < c.parts.blocks.size(); ++b) {
    c.marks.states[b] = block_checksum(c.parts.layout, c.parts.blocks[b], streams);
  }
  c.captured = false;
  if (c.state == ChunkState::resident) return;
  if (c.at_home()) {
    for (int k = 0; k < c.parts.layout.streams; ++k) {
      std::memcpy(c.spec.resident[k], streams[k], c.parts.layout.parts[k].length(c.spec.elements));
    }
    c.state = ChunkState::resident;
    return;
  }
  c.place = c.target;
  c.state = ChunkState::stored;
}

bool Pipeline::intact(int chunk, char* const* streams) const {
  std::lock_guard lock(mutex_);
  const Chunk& c = *chunks_.at(chunk);
  for (std::size_t b = 0; b < c.parts.blocks.size(); ++b) {
    const std::uint32_t sum = block_checksum(c.parts.layout, c.parts.blocks[b], streams);
    if (sum != c.marks.states[b]) return false;
  }
  return true;
}

void Pipeline::publish(int parameter, const void* weight) {
  std::lock_guard lock(mutex_);
  if (static_cast<std::size_t>(parameter) >= chunks_of_.size()) return;
  for (int number : chunks_of_[parameter]) {
    Chunk& chunk = *chunks_[number];
    for (std::size_t s = 0; s < chunk.spec.segments.size(); ++s) {
      if (chunk.spec.segments[s].parameter != parameter) continue;
      publish_segment(chunk.spec, chunk.parts, chunk.marks, static_cast<std::int32_t>(s), weight,
                      false);
    }
  }
}

void Pipeline::unpublish(int parameter) {
  std::lock_guard lock(mutex_);
  if (static_cast<std::size_t>(parameter) >= chunks_of_.size()) return;
  for (int number : chunks_of_[parameter]) {
    Chunk& chunk = *chunks_[number];
    for (std::size_t p = 0; p < chunk.parts.pieces.size(); ++p) {
      const Segment& segment = chunk.spec.segments[chunk.parts.pieces[p].segment];
      if (segment.parameter == parameter) chunk.marks.is_published[p] = 0;
    }
  }
}

bool Pipeline::unchanged(int parameter, const void* weight) {
  std::lock_guard lock(mutex_);
  if (static_cast<std::size_t>(parameter) >= chunks_of_.size()) return true;
  for (int number : chunks_of_[parameter]) {
    Chunk& chunk = *chunks_[number];
    for (std::size_t s = 0; s < chunk.spec.segments.size(); ++s) {
      if (chunk.spec.segments[s].parameter != parameter) continue;
      if (!publish_segment(chunk.spec, chunk.parts, chunk.marks, static_cast<std::int32_t>(s),
                           weight, true)) {
        return false;
      }
    }
  }
  return true;
}

PipelineCounters Pipeline::counters() const {
  std::lock_guard lock(mutex_);
  return counters_;
}

}  // namespace stow
