#include "pipeline/pipeline_chunk.h"

#include <stdexcept>
#include <string>

namespace stow {

void PipelineChunk::move(ChunkState next) {
  if (!legal(state, next)) {
    throw std::logic_error("chunk " + std::to_string(number) + ": illegal transition " +
                           std::to_string(static_cast<int>(state)) + " -> " +
                           std::to_string(static_cast<int>(next)));
  }
  state = next;
}

}  // namespace stow
