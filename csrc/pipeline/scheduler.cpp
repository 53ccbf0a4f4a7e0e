// The scheduler's thread: what is read, updated and written next. See [Note: One scheduler].
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pipeline/pipeline_chunk.h"

namespace stow {

// --- the scheduler ---

void Pipeline::schedule_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    scheduler_wakes_.wait(lock, [this] { return stopping_ || work_; });
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
  if (!ready_to_read_.empty() && ready_to_read_.front() == chunk->number) ready_to_read_.pop();
  start_read(*chunk);
  return true;
}

bool Pipeline::startable(const Chunk& chunk) {
  return chunk.state == ChunkState::blank || chunk.state == ChunkState::stored;
}

// What a chunk is that leaves its slot as it came.
ChunkState Pipeline::state_on_disk(const Chunk& chunk) {
  return chunk.slot_states == SlotStates::zero ? ChunkState::blank : ChunkState::stored;
}

// Passes by those that need nothing; null where the first that does must wait.
Pipeline::Chunk* Pipeline::next_to_admit() {
  if (stepping_) {
    while (!ready_to_read_.empty() && chunks_[ready_to_read_.front()]->stage != Stage::waiting)
      ready_to_read_.pop();
    if (!ready_to_read_.empty() && startable(*chunks_[ready_to_read_.front()]))
      return chunks_[ready_to_read_.front()].get();
  }
  for (; next_ < order_.size(); ++next_) {
    Chunk& chunk = *chunks_[order_[next_]];
    if (stepping_) {
      if (chunk.stage != Stage::waiting) continue;
      if (chunk.blank() && chunk.gradients_due != 0) continue;  // nothing to read ahead of it
    } else if (chunk.state != ChunkState::stored && chunk.state != ChunkState::writing) {
      continue;
    }
    if (chunk.has_own_memory() && chunk.state == ChunkState::writing)
      continue;  // `settle_write` sees to it
    return startable(chunk) ? &chunk : nullptr;
  }
  return nullptr;
}

// Whether the step has more chunks to bring in than there are slots for.
bool Pipeline::slots_are_wanted() const {
  if (!stepping_) return false;
  // A resident chunk takes a slot only if it is written too.
  if (!ready_to_read_.empty() || (step_.capture && !ready_resident_.empty())) return true;
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
      exclude(chunk);
      return true;
    }
    if (chunk.stage == Stage::admitted && chunk.gradients_due != 0) last = &chunk;
  }
  if (last == nullptr) return false;
  leave_slot(*last, state_on_disk(*last));
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
void Pipeline::start_read(Chunk& chunk) {
  take_slot(chunk);
  chunk.unwanted = false;
  chunk.stage = stepping_ ? Stage::admitted : Stage::out;
  if (chunk.blank()) chunk.slot_states = SlotStates::zero;
  const bool needs_read =
      !stepping_ || chunk.gradients_due != 0 || chunk.has_gradient || chunk.place != chunk.target;
  if (chunk.blank() || !needs_read) {
    move(chunk, ChunkState::ready);
    if (stepping_ && chunk.gradients_due == 0) mark_ready(chunk);
    return;
  }
  move(chunk, ChunkState::reading);
  chunk.slot_states = SlotStates::unverified;
  submit(chunk, Op::read, chunk.place, 0, chunk.parts.layout.streams);
}

// Chunks in slots go first: their slots are what the reads behind them wait for.
Pipeline::Chunk* Pipeline::pick() {
  if (!stepping_ || failure_.error != 0) return nullptr;
  if (!released_.empty()) {
    Chunk& chunk = *chunks_[released_.front()];
    released_.pop();
    return &chunk;
  }
  Queue* queue = &ready_;
  if (!ready_resident_.empty() && (ready_.empty() || step_.resident_first)) {
    // A commit also writes what is resident, through a slot.
    if (!step_.capture || !free_slots_.empty() || evict()) queue = &ready_resident_;
  }
  if (queue->empty()) return nullptr;
  Chunk& chunk = *chunks_[queue->front()];
  queue->pop();
  return &chunk;
}

// The states of a chunk that only gives its weights to a commit are not read where they stand on
// disk already, and zeros are not written.
UpdateScope Pipeline::scope_of(const Chunk& chunk) const {
  if (chunk.state == ChunkState::resident) return UpdateScope::resident;
  const bool in_place = chunk.place == chunk.target || chunk.slot_states == SlotStates::zero;
  return !chunk.has_gradient && in_place ? UpdateScope::weights_only : UpdateScope::slot;
}

void Pipeline::run(Chunk& chunk, std::unique_lock<std::mutex>& lock) {
  const UpdateScope scope = scope_of(chunk);
  const bool idle_chunk = !chunk.has_gradient;
  const bool is_external = step_.caller == Caller::updates && chunk.is_of_caller && !idle_chunk;
  const Half half = chunk.stage == Stage::released ? Half::after
                    : is_external                  ? Half::before
                                                   : Half::both;
  if (half != Half::after) {
    chunk.capturing = step_.capture;
    if (scope == UpdateScope::resident) {
      if (step_.capture) take_slot(chunk);
    } else {
      move(chunk, ChunkState::updating);
    }
    if (scope == UpdateScope::slot && chunk.slot_states == SlotStates::known) {
      counters_.bytes_spared += chunk.parts.layout.state_bytes();
    }
    chunk.started = now();
  }
  const UpdateTask task{
      chunk.spec,
      chunk.parts,
      chunk.gradients,
      chunk.checksums,
      memory_of(chunk, scope),
      scope == UpdateScope::slot ? chunk.slot_states : SlotStates::known,
      idle_chunk,
      scope == UpdateScope::slot || (scope == UpdateScope::resident && step_.capture),
      half};
  const int threads = step_.caller == Caller::computes && waiters_ == 0 ? team_.few : team_.whole;
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
    leave_slot(chunk, ChunkState::failed);
    return;
  }
  if (chunk.slot_states == SlotStates::unverified) chunk.slot_states = SlotStates::known;
  if (half != Half::before) {
    settle_update(chunk, scope);
    return;
  }
  chunk.stage = Stage::acquirable;
  acquirable_.push(chunk.number);
  callers_wake_.notify_all();
}

UpdateMemory Pipeline::memory_of(const Chunk& chunk, UpdateScope scope) const {
  const int streams = chunk.parts.layout.streams;
  UpdateMemory memory{};
  for (int k = 0; k < streams; ++k) {
    char* own = chunk.spec.resident[k];
    if (scope == UpdateScope::resident) {
      memory.states[k] = own;
      if (step_.capture) memory.copy[k] = slot_part(chunk, k);
    } else {
      memory.states[k] = slot_part(chunk, k);
      if (scope == UpdateScope::slot) memory.copy[k] = own;
    }
  }
  if (step_.capture) memory.weight = slot_part(chunk, streams);
  return memory;
}

// The chunk's memory holds new states: write them, or keep them.
void Pipeline::settle_update(Chunk& chunk, UpdateScope scope) {
  const int streams = chunk.parts.layout.streams;
  if (chunk.has_gradient) ++counters_.chunks_updated;
  if (chunk.has_gradient && scope == UpdateScope::slot) chunk.slot_states = SlotStates::known;
  if (scope == UpdateScope::weights_only) {
    start_write(chunk, streams, 1);
  } else if (step_.capture) {
    start_write(chunk, 0, streams + 1);
  } else if (scope == UpdateScope::slot) {
    if (chunk.has_own_memory()) {  // read once, and in its own memory from now on
      leave_slot(chunk, ChunkState::resident);
    } else {
      start_write(chunk, 0, streams);
    }
  }
  if (chunk.has_gradient && !step_.capture) chunk.captured = false;
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
    set_next_order();
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
    leave_slot(chunk, ChunkState::failed);
  } else if (!reading) {
    settle_write(chunk);
  } else {
    move(chunk, ChunkState::ready);
    if (chunk.unwanted) {
      leave_slot(chunk, ChunkState::stored);
    } else if (chunk.stage == Stage::admitted && chunk.gradients_due == 0) {
      mark_ready(chunk);
    }
  }
  work_ = true;
  scheduler_wakes_.notify_one();
  callers_wake_.notify_all();
}

void Pipeline::settle_write(Chunk& chunk) {
  chunk.place = chunk.target;
  chunk.captured = chunk.capturing;
  if (chunk.slot_states == SlotStates::zero) {
    leave_slot(chunk, ChunkState::blank);
    return;
  }
  const bool whole = chunk.transfer_count >= chunk.parts.layout.streams;
  if (chunk.has_own_memory() && whole) {
    leave_slot(chunk, ChunkState::resident);
    if (chunk.stage == Stage::waiting) {  // a new step has begun
      chunk.stage = Stage::admitted;
      if (chunk.gradients_due == 0) mark_ready(chunk);
    }
    return;
  }
  // A new step has begun and has its gradients: it need not read what the slot holds.
  if (chunk.stage == Stage::waiting && chunk.gradients_due == 0 && whole) {
    move(chunk, ChunkState::ready);
    chunk.stage = Stage::admitted;
    mark_ready(chunk);
    return;
  }
  // The slot keeps its states if no chunk needs it now and the next step begins with it.
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
  chunk.unwanted = false;
  chunk.slot_states = SlotStates::known;
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

}  // namespace stow
