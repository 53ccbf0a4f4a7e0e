#include "pipeline/update_queues.h"

namespace stow {

void UpdateQueues::reserve(std::size_t count) {
  for (ChunkQueue* queue : {&in_slots_, &resident_, &acquirable_, &released_}) {
    queue->reserve(count);
  }
}

void UpdateQueues::clear() {
  for (ChunkQueue* queue : {&in_slots_, &resident_, &acquirable_, &released_}) queue->clear();
}

void UpdateQueues::set_newest_first(bool newest_first) {
  in_slots_.set_newest_first(newest_first);
  resident_.set_newest_first(newest_first);
}

void UpdateQueues::push_ready(PipelineChunk& chunk) {
  chunk.stage = StepStage::queued;
  (chunk.state == ChunkState::resident ? resident_ : in_slots_).push(chunk);
}

void UpdateQueues::push_acquirable(PipelineChunk& chunk) {
  chunk.stage = StepStage::acquirable;
  acquirable_.push(chunk);
}

PipelineChunk* UpdateQueues::pop_acquirable() {
  PipelineChunk* chunk = acquirable_.pop();
  if (chunk != nullptr) chunk->stage = StepStage::acquired;
  return chunk;
}

void UpdateQueues::push_released(PipelineChunk& chunk) {
  chunk.stage = StepStage::released;
  released_.push(chunk);
}

}  // namespace stow
