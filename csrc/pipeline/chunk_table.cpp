#include "pipeline/chunk_table.h"

#include <algorithm>
#include <stdexcept>

namespace stow {
namespace {

// What else is wrong with numbers that were read from a file, Python has checked; these would have
// memory written that is nobody's.
void check_segments(const ChunkSpec& spec) {
  std::int64_t end = 0;
  for (const Segment& s : spec.segments) {
    if (s.parameter < 0 || s.parameter_offset < 0 || s.count < 0 || s.chunk_offset < end ||
        s.chunk_offset > spec.elements || s.count > spec.elements - s.chunk_offset) {
      throw std::invalid_argument("add_chunk: segments in order, inside of the chunk");
    }
    end = s.chunk_offset + s.count;
  }
}

}  // namespace

PipelineChunk& ChunkTable::add(ChunkSpec spec, bool blank, std::vector<std::uint32_t> states,
                               std::vector<std::uint32_t> weights) {
  check_segments(spec);
  const int number = static_cast<int>(chunks_.size());
  auto chunk = std::make_unique<PipelineChunk>(number, std::move(spec));
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
  if (!blank && !stored && !chunk->has_own_memory()) {
    throw std::invalid_argument("add_chunk: states that are neither zero nor anywhere");
  }
  chunk->checksums.states = states.empty() ? std::vector<std::uint32_t>(blocks) : std::move(states);
  chunk->gradients.resize(chunk->spec.segments.size());
  chunk->checksums.recorded.resize(pieces);
  chunk->checksums.is_recorded.resize(pieces);
  // Memory of its own is zero when it is made, as blank states are; but its place does not hold
  // those zeros, so the next commit writes them.
  chunk->captured = !weights.empty() && !(blank && chunk->has_own_memory());
  chunk->checksums.weights =
      weights.empty() ? std::vector<std::uint32_t>(blocks) : std::move(weights);
  chunk->state = stored                    ? ChunkState::stored
                 : chunk->has_own_memory() ? ChunkState::resident
                                           : ChunkState::blank;
  for (const Segment& segment : chunk->spec.segments) {
    const auto parameter = static_cast<std::size_t>(segment.parameter);
    if (chunks_of_.size() <= parameter) chunks_of_.resize(parameter + 1);
    chunks_of_[parameter].push_back(number);
  }
  chunks_.push_back(std::move(chunk));
  return *chunks_.back();
}

const std::vector<int>& ChunkTable::of(int parameter) const {
  static const std::vector<int> none;
  const auto index = static_cast<std::size_t>(parameter);
  return index < chunks_of_.size() ? chunks_of_[index] : none;
}

bool ChunkTable::any_in_flight() const {
  return std::any_of(begin(), end(), [](const auto& c) { return c->transfers_left != 0; });
}

bool ChunkTable::any_writing() const {
  return std::any_of(begin(), end(), [](const auto& c) { return c->state == ChunkState::writing; });
}

}  // namespace stow
