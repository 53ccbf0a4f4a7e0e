#include "pipeline/slot_ring.h"

#include <algorithm>

namespace stow {

void SlotRing::set(char* base, int slots, std::int64_t slot_bytes) {
  base_ = base;
  slot_bytes_ = slot_bytes;
  free_.clear();
  free_.reserve(slots);
  holders_.assign(slots, nullptr);
  for (int slot = slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

void SlotRing::take(PipelineChunk& chunk) {
  chunk.slot = free_.back();
  free_.pop_back();
  holders_[chunk.slot] = &chunk;
  high_water_ = std::max(high_water_, in_use());
}

void SlotRing::leave(PipelineChunk& chunk, ChunkState next) {
  chunk.move(next);
  free_.push_back(chunk.slot);
  holders_[chunk.slot] = nullptr;
  chunk.slot = -1;
  chunk.unwanted = false;
  chunk.slot_states = SlotStates::known;
}

bool SlotRing::has_ready() const {
  return std::any_of(holders_.begin(), holders_.end(), [](const PipelineChunk* chunk) {
    return chunk != nullptr && chunk->state == ChunkState::ready;
  });
}

std::size_t SlotRing::awaiting_gradients(int turn) const {
  return std::count_if(holders_.begin(), holders_.end(), [turn](const PipelineChunk* chunk) {
    return chunk != nullptr && chunk->stage == StepStage::admitted && chunk->turn > turn &&
           chunk->gradients_due != 0;
  });
}

PipelineChunk* SlotRing::next_idle(bool lags) {
  for (std::size_t k = 0; k < holders_.size(); ++k) {
    turn_ = (turn_ + 1) % holders_.size();
    PipelineChunk* chunk = holders_[turn_];
    if (chunk != nullptr && chunk->is_idle() && chunk->lags_on_disk == lags) return chunk;
  }
  return nullptr;
}

char* SlotRing::part(const PipelineChunk& chunk, int part) const {
  return base_ + chunk.slot * slot_bytes_ + chunk.parts.layout.parts[part].slot_at;
}

}  // namespace stow
