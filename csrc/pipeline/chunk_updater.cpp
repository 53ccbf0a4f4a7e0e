#include "pipeline/chunk_updater.h"

#include <thread>

namespace stow {

// The states of a chunk that only gives its weights to a commit are not read where they stand on
// disk already, and zeros are not written.
UpdateScope ChunkUpdater::scope_of(const PipelineChunk& chunk) const {
  if (chunk.state == ChunkState::resident) return UpdateScope::resident;
  const bool in_place = chunk.place == chunk.target || chunk.slot_states == SlotStates::zero;
  return !chunk.has_update && in_place ? UpdateScope::weights_only : UpdateScope::slot;
}

UpdatePhase ChunkUpdater::phase_of(const PipelineChunk& chunk) const {
  if (chunk.stage == StepStage::released) return UpdatePhase::after;
  const bool by_caller = data_.step.spec().caller == Caller::updates && chunk.is_of_caller;
  return by_caller && chunk.has_update ? UpdatePhase::before : UpdatePhase::both;
}

std::int64_t ChunkUpdater::update(PipelineChunk& chunk, UpdateScope scope, UpdatePhase phase,
                                  PipelineMonitor::Lock& lock) {
  const CurrentStep& step = data_.step;
  const UpdateTask task{
      chunk.spec,
      chunk.parts,
      chunk.gradients,
      data_.deferred.missed(chunk, chunk.gradients.front().data != nullptr),
      chunk.checksums,
      memory_of(chunk, scope),
      scope == UpdateScope::slot ? chunk.slot_states : SlotStates::known,
      !chunk.has_update,
      scope == UpdateScope::slot || (scope == UpdateScope::resident && step.spec().capture),
      phase};
  const int count = threads();
  std::int64_t damaged = -1;
  data_.monitor.unlocked(lock, [&] {
    const bool slow = update_lane.is_on() && phase == UpdatePhase::both && !task.idle;
    const auto over =
        slow ? update_lane.take(chunk.spec.elements, chunk.ready) : Metered::Clock::time_point{};
    damaged = update_chunk(task, step.parameters(), step.hypers(), isa_, count);
    if (slow) std::this_thread::sleep_until(over);
    if (phase != UpdatePhase::before) {
      data_.trace.record({chunk.started, now(), Lane::update, chunk.number, 0});
    }
  });
  return damaged;
}

int ChunkUpdater::threads() const {
  if (data_.monitor.has_waiters() || data_.monitor.is_replaced()) return team_.whole;
  switch (data_.step.spec().caller) {
    case Caller::computes:
    case Caller::helps:
      return team_.few;
    case Caller::launches:
      return team_.most;
    default:
      return team_.whole;
  }
}

UpdateMemory ChunkUpdater::memory_of(const PipelineChunk& chunk, UpdateScope scope) const {
  const int streams = chunk.parts.layout.streams;
  const bool capture = data_.step.spec().capture;
  UpdateMemory memory{};
  for (int k = 0; k < streams; ++k) {
    char* own = chunk.spec.resident[k];
    if (scope == UpdateScope::resident) {
      memory.states[k] = own;
      if (capture) memory.copy[k] = data_.ring_of(chunk).part(chunk, k);
    } else {
      memory.states[k] = data_.ring_of(chunk).part(chunk, k);
      if (scope == UpdateScope::slot) memory.copy[k] = own;
    }
  }
  if (capture) memory.weight = data_.ring_of(chunk).part(chunk, streams);
  return memory;
}

}  // namespace stow
