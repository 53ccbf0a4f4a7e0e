#include "pipeline/slot_ring.h"

#include <algorithm>

namespace stow {

void SlotRing::set(const RingSpec& spec) {
  spec_ = spec;
  free_.clear();
  holders_.assign(spec.slots, nullptr);
  free_.reserve(spec.slots);
  for (int slot = spec.slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

void SlotRing::take(PipelineChunk& chunk) {
  chunk.slot = free_.back();
  free_.pop_back();
  holders_[chunk.slot] = &chunk;
  ++counters_.slots_in_use;
  counters_.slots_high_water = std::max(counters_.slots_high_water, counters_.slots_in_use);
}

void SlotRing::leave(PipelineChunk& chunk, ChunkState next) {
  chunk.move(next);
  free_.push_back(chunk.slot);
  holders_[chunk.slot] = nullptr;
  --counters_.slots_in_use;
  chunk.slot = -1;
  chunk.unwanted = false;
  chunk.slot_states = SlotStates::known;
}

bool SlotRing::has_ready() const {
  return std::any_of(holders_.begin(), holders_.end(), [](const PipelineChunk* chunk) {
    return chunk != nullptr && chunk->state == ChunkState::ready;
  });
}

char* SlotRing::part(const PipelineChunk& chunk, int part) const {
  return spec_.base + chunk.slot * spec_.slot_bytes + chunk.parts.layout.parts[part].slot_at;
}

}  // namespace stow
