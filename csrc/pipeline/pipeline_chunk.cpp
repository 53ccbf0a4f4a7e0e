#include "pipeline/pipeline_chunk.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace stow {

void PipelineChunk::move(ChunkState next) {
  if (!legal(state, next)) {
    throw std::logic_error("chunk " + std::to_string(number) + ": illegal transition " +
                           std::to_string(static_cast<int>(state)) + " -> " +
                           std::to_string(static_cast<int>(next)));
  }
  state = next;
}

void PipelineChunk::keep_undo() {
  undo.is_taken = true;
  undo.blank = slot_states == SlotStates::zero;
  undo.captured = captured;
  undo.place = place;
  undo.target = target;
  undo.spare = spare;
  undo.checksums = checksums;  // also of weights: what the place holds may be in the next commit
  if (target == place) std::swap(target, spare);
}

void PipelineChunk::restore() {
  undo.is_taken = false;
  state = undo.blank ? ChunkState::blank : ChunkState::stored;
  captured = undo.captured;
  place = undo.place;
  target = undo.target;
  spare = undo.spare;
  checksums = undo.checksums;
}

}  // namespace stow
