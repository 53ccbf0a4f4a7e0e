#include "pipeline/scheduler.h"

#include <limits>

#include "base/affinity.h"
#include "base/openmp_team.h"

namespace stow {

Scheduler::Scheduler(Engine& engine, PipelineData& data, Isa isa, Team team)
    : data_(data),
      transfers_(
          engine, data,
          [this](PipelineChunk& chunk, Op op, bool failed) { settle_transfer(chunk, op, failed); }),
      updater_(data, isa, team),
      thread_([this] {
        bind_thread();
        loop();
      }) {}

void Scheduler::stop() {
  if (!thread_.joinable()) return;
  {
    const PipelineMonitor::Lock lock = data_.monitor.lock();
    data_.step.end();
    data_.monitor.stop();
  }
  thread_.join();
}

void Scheduler::loop() {
  PipelineMonitor::Lock lock = data_.monitor.lock();
  // Updates are left to a caller who helps, unless somebody waits, or the disk has nothing to do
  // until a slot is free.
  const auto stop = [this] {
    const bool leaves = data_.takes_help() && !data_.monitor.has_waiters();
    return data_.monitor.is_replaced() || (leaves && data_.chunks.any_in_flight());
  };
  while (data_.monitor.wait_for_work(lock)) work(lock, stop);
}

Failure Scheduler::run() noexcept {
  PipelineMonitor& monitor = data_.monitor;
  PipelineMonitor::Lock lock = monitor.lock();
  run_until(lock, [&] { return !data_.step.is_under_way() || monitor.has_failed(); });
  if (monitor.has_failed()) data_.step.end();
  return monitor.failure();
}

void Scheduler::help() noexcept {
  const TorchTeamScope scope;
  PipelineMonitor& monitor = data_.monitor;
  PipelineMonitor::Lock lock = monitor.lock();
  if (!data_.takes_help() || monitor.is_updating()) return;
  monitor.begin_replacing(lock);
  work(lock, [&] { return !data_.step.is_under_way(); });
  monitor.end_replacing(data_.step.is_under_way());
}

void Scheduler::run_until(PipelineMonitor::Lock& lock, const std::function<bool()>& over) noexcept {
  const TorchTeamScope scope;
  PipelineMonitor& monitor = data_.monitor;
  monitor.begin_replacing(lock);
  for (;;) {
    work(lock, over);
    if (over()) break;
    const double start = now();
    monitor.wait_for_work_in_place(lock, over);
    data_.record_wait(start);
  }
  monitor.end_replacing(data_.step.is_under_way());
}

// Reads and updates until nothing more can be done now, or it is to `stop` updating.
void Scheduler::work(PipelineMonitor::Lock& lock, const std::function<bool()>& stop) {
  for (;;) {
    while (start_next_read()) {
    }
    if (stop()) return;
    PipelineChunk* chunk = next_to_update();
    if (chunk == nullptr || data_.monitor.is_stopping()) return;
    update(*chunk, lock);
  }
}

// --- what a step does with a chunk ---

void Scheduler::plan_chunk(PipelineChunk& chunk) {
  CurrentStep& step = data_.step;
  chunk.stage = StepStage::out;
  const bool is_whole = step.spec().capture;
  const bool leaves_out = !is_whole && data_.deferred.leaves_out(chunk);
  step.gradients().plan(chunk, step.parameters(), leaves_out);
  if (is_whole || chunk.is_wanted) {
    const bool is_behind = (is_whole && chunk.lags_on_disk) || data_.deferred.lags(chunk);
    chunk.has_update = chunk.has_update || is_behind;
  }
  chunk.is_wanted = false;
  if (!chunk.has_update && chunk.gradients_due == 0 && !step.must_capture(chunk)) {
    exclude(chunk);
    return;
  }
  step.include_chunk();
  chunk.unwanted = false;
  chunk.stage = StepStage::waiting;
  if (chunk.state == ChunkState::ready || chunk.state == ChunkState::reading ||
      chunk.state == ChunkState::resident) {
    chunk.stage = StepStage::admitted;
  }
  if (chunk.gradients_due == 0) mark_ready(chunk);
}

void Scheduler::add_gradient(PipelineChunk& chunk, std::size_t segment, const void* data,
                             DType dtype) {
  data_.step.gradients().add(chunk, segment, data, dtype);
  if (chunk.gradients_due != 0) return;
  data_.order.arrive(chunk);
  if (chunk.has_update || data_.step.must_capture(chunk)) {
    mark_ready(chunk);
  } else {
    exclude(chunk);
    data_.step.finish_chunk();
  }
}

void Scheduler::mark_ready(PipelineChunk& chunk) {
  if (data_.step.holds_back(chunk)) return;
  chunk.ready = Metered::Clock::now();
  if (chunk.stage == StepStage::waiting) {
    if (data_.step.spec().open) data_.order.push_ready(chunk);
  } else if (chunk.state == ChunkState::ready || chunk.state == ChunkState::resident) {
    data_.queues.push_ready(chunk);
  }  // else its read is in flight, whose end queues it
}

void Scheduler::exclude(PipelineChunk& chunk) {
  chunk.stage = StepStage::out;
  if (!chunk.spec.is_small || chunk.state == ChunkState::reading) let_go(chunk);
}

void Scheduler::let_go(PipelineChunk& chunk) {
  if (chunk.state == ChunkState::reading) chunk.unwanted = true;
  if (chunk.state != ChunkState::ready) return;
  if (!chunk.lags_on_disk) {
    data_.ring_of(chunk).leave(chunk, chunk.state_on_disk());
  } else if (!data_.monitor.is_stopping() && !data_.monitor.has_failed()) {
    chunk.lags_on_disk = chunk.capturing = false;
    transfers_.write(chunk, 0, chunk.parts.layout.streams);
  }
}

// The chunk's part of the step is published.
void Scheduler::finish(PipelineChunk& chunk) {
  chunk.stage = StepStage::out;
  data_.step.gradients().finish(chunk);
  data_.step.finish_chunk();
  end_finished_step();
  data_.monitor.wake_callers();
}

void Scheduler::end_finished_step() {
  if (data_.step.has_unfinished()) return;
  data_.step.end();
  data_.order.set_next_order();
}

// --- reads ---

// False where there is nothing to read, or it must wait.
bool Scheduler::start_next_read() {
  const CurrentStep& step = data_.step;
  if (data_.monitor.has_failed() || !(step.is_under_way() || step.is_prefetching())) return false;
  const ReadOrder& order = data_.order;
  const bool reads_ahead = order.slots_ahead() > 0 && data_.ring.has_free() &&
                           data_.ring.awaiting_gradients(order.late_turn()) < order.slots_ahead();
  PipelineChunk* chunk = data_.order.next(step, reads_ahead);
  if (chunk == nullptr) return false;
  const bool urgent = step.is_under_way() && chunk->gradients_due == 0;
  SlotRing& ring = data_.ring_of(*chunk);
  if (!ring.has_free() && !(urgent && evict(ring))) return false;
  data_.order.pop(*chunk);
  start_read(*chunk);
  return true;
}

// Gives the chunk a slot and starts filling it.
void Scheduler::start_read(PipelineChunk& chunk) {
  const bool stepping = data_.step.is_under_way();
  data_.ring_of(chunk).take(chunk);
  chunk.unwanted = false;
  chunk.stage = stepping ? StepStage::admitted : StepStage::out;
  if (chunk.blank()) chunk.slot_states = SlotStates::zero;
  const bool needs_read =
      !stepping || chunk.gradients_due != 0 || chunk.has_update || chunk.place != chunk.target;
  if (!chunk.blank() && needs_read) {
    transfers_.read(chunk);
    return;
  }
  chunk.move(ChunkState::ready);
  if (stepping && chunk.gradients_due == 0) mark_ready(chunk);
}

// Frees a slot for a chunk that has its gradients.
//
// [Note: Small slots] Chunks of few rows stay in their slots until another one needs the slot, for
// the rows that a step touches are often those of the last one. Those that have caught up before
// they were read are not written before `step()` has updated them: `lags_on_disk`. When slots are
// scarce they are written first; so are all of them when the pipeline is to be quiet.
bool Scheduler::evict(SlotRing& ring) {
  if (&ring == &data_.small_ring) {
    PipelineChunk* idle = ring.next_idle(false);
    const bool is_free = idle != nullptr;
    if (!is_free) idle = ring.next_idle(true);
    if (idle != nullptr) let_go(*idle);
    return is_free;
  }
  const ReadOrder& order = data_.order;
  const bool has_many = ring.awaiting_gradients(order.late_turn()) > order.slots_ahead();
  const int last = has_many ? std::numeric_limits<int>::max() : order.late_turn();
  PipelineChunk* chunk = ring.has_ready() ? order.to_evict(data_.step, last) : nullptr;
  if (chunk == nullptr) return false;
  const bool takes_part = chunk->stage != StepStage::out;
  exclude(*chunk);
  if (takes_part) chunk->stage = StepStage::waiting;
  return true;
}

// Whether the step has more chunks to read than there are slots for.
bool Scheduler::slots_are_wanted() const {
  if (!data_.step.is_under_way()) return false;
  // A resident chunk takes a slot only if it is written too.
  if (data_.order.has_ready()) return true;
  if (data_.step.spec().capture && data_.queues.has_resident()) return true;
  return data_.order.has_more_than(data_.ring.free_slots());
}

// --- updates ---

PipelineChunk* Scheduler::next_to_update() {
  if (!data_.step.is_under_way() || data_.monitor.has_failed()) return nullptr;
  if (PipelineChunk* chunk = data_.queues.pop_released()) return chunk;
  const StepSpec& spec = data_.step.spec();
  if (data_.queues.resident_is_next(spec.resident_first)) {
    // A commit also writes what is resident, through a slot.
    const bool has_slot = !spec.capture || data_.ring.has_free() || evict(data_.ring);
    if (has_slot) return data_.queues.pop_resident();
  }
  return data_.queues.pop_ready();
}

void Scheduler::update(PipelineChunk& chunk, PipelineMonitor::Lock& lock) {
  const UpdateScope scope = updater_.scope_of(chunk);
  const UpdatePhase phase = updater_.phase_of(chunk);
  if (phase != UpdatePhase::after) {
    // Without a gradient the states stay as they are, and a commit may write the weights beside
    // them.
    if (data_.step.is_undoable() && chunk.has_update) chunk.keep_undo();
    chunk.capturing = data_.step.spec().capture;
    if (scope == UpdateScope::resident) {
      if (chunk.capturing) data_.ring_of(chunk).take(chunk);
    } else {
      chunk.move(ChunkState::updating);
    }
    if (scope == UpdateScope::slot && chunk.slot_states == SlotStates::known) {
      data_.counters.bytes_spared += chunk.parts.layout.state_bytes();
    }
    chunk.started = now();
  }
  const std::int64_t damaged = updater_.update(chunk, scope, phase, lock);
  if (damaged >= 0) {
    fail_update(chunk, damaged);
    return;
  }
  if (chunk.slot_states == SlotStates::unverified) chunk.slot_states = SlotStates::known;
  if (phase != UpdatePhase::before) {
    settle_update(chunk, scope);
    return;
  }
  data_.queues.push_acquirable(chunk);
  data_.monitor.wake_callers();
}

// The states in the slot are not those that were written.
void Scheduler::fail_update(PipelineChunk& chunk, std::int64_t block) {
  const Layout::Part& part = chunk.parts.layout.parts[0];
  const UpdateBlock& damaged = chunk.parts.blocks[block];
  data_.monitor.fail({kDamaged, chunk.place.file, chunk.number, Op::read,
                      chunk.place.offset + part.file_at + part.at(damaged.begin),
                      part.length(damaged.end - damaged.begin)});
  data_.ring_of(chunk).leave(chunk, ChunkState::failed);
}

// The chunk's memory holds new states: write them, or keep them.
void Scheduler::settle_update(PipelineChunk& chunk, UpdateScope scope) {
  const int streams = chunk.parts.layout.streams;
  const bool capture = data_.step.spec().capture;
  if (chunk.has_update) {
    ++data_.counters.chunks_updated;
    data_.deferred.catch_up(chunk);
  }
  if (chunk.has_update && scope == UpdateScope::slot) chunk.slot_states = SlotStates::known;
  const bool has_gradient = chunk.gradients.front().data != nullptr;
  if (scope == UpdateScope::slot && chunk.spec.is_small && !capture && !has_gradient) {
    chunk.move(ChunkState::ready);
    chunk.captured = false;
    chunk.lags_on_disk = true;
    finish(chunk);
    return;
  }
  if (scope == UpdateScope::slot) chunk.lags_on_disk = false;
  if (scope == UpdateScope::weights_only) {
    transfers_.write(chunk, streams, 1);
  } else if (capture) {
    transfers_.write(chunk, 0, streams + 1);
  } else if (scope == UpdateScope::slot) {
    if (chunk.has_own_memory()) {  // read once, and in its own memory from now on
      data_.ring_of(chunk).leave(chunk, ChunkState::resident);
    } else {
      transfers_.write(chunk, 0, streams);
    }
  }
  if (chunk.has_update && !capture) chunk.captured = false;
  finish(chunk);
}

// --- ends of transfers ---

void Scheduler::settle_transfer(PipelineChunk& chunk, Op op, bool failed) {
  if (failed) {
    data_.ring_of(chunk).leave(chunk, ChunkState::failed);
  } else if (op == Op::write) {
    settle_write(chunk);
  } else {
    chunk.move(ChunkState::ready);
    if (chunk.unwanted) {
      data_.ring_of(chunk).leave(chunk, ChunkState::stored);
    } else if (chunk.stage == StepStage::admitted && chunk.gradients_due == 0) {
      mark_ready(chunk);
    }
  }
}

void Scheduler::settle_write(PipelineChunk& chunk) {
  chunk.place = chunk.target;
  chunk.captured = chunk.capturing;
  if (chunk.slot_states == SlotStates::zero) {
    data_.ring_of(chunk).leave(chunk, ChunkState::blank);
    return;
  }
  const bool whole = chunk.transfer_count >= chunk.parts.layout.streams;
  if (chunk.has_own_memory() && whole) {
    data_.ring_of(chunk).leave(chunk, ChunkState::resident);
    if (chunk.stage == StepStage::waiting) {  // a new step has begun
      chunk.stage = StepStage::admitted;
      if (chunk.gradients_due == 0) mark_ready(chunk);
    }
    return;
  }
  // A new step has begun and has its gradients: it need not read what the slot holds.
  if (chunk.stage == StepStage::waiting && chunk.gradients_due == 0 && whole) {
    chunk.move(ChunkState::ready);
    chunk.stage = StepStage::admitted;
    mark_ready(chunk);
    return;
  }
  // The slot keeps its states if no chunk needs it now and the next step begins with it.
  const bool stays = chunk.spec.is_small || (data_.order.alternates() && !slots_are_wanted());
  if (whole && stays && chunk.stage == StepStage::out) {
    chunk.move(ChunkState::ready);
  } else {
    data_.ring_of(chunk).leave(chunk, ChunkState::stored);
  }
}

}  // namespace stow
