#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/affinity.h"
#include "pipeline/pipeline_chunk.h"

namespace stow {

Pipeline::Pipeline(Engine& engine, Isa isa, Order order, Team team)
    : engine_(engine), isa_(isa), order_kind_(order), team_(team), owner_(getpid()) {
  scheduler_ = std::thread([this] {
    bind_thread();
    schedule_loop();
  });
}

Pipeline::~Pipeline() {
  // The scheduler first: a step without a wait would start new transfers after `quiesce`.
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    stepping_ = false;
  }
  scheduler_wakes_.notify_one();
  scheduler_.join();
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
  order_.push_back(number);
  ready_to_read_.reserve(chunks_.size());
  ready_.reserve(chunks_.size());
  ready_resident_.reserve(chunks_.size());
  acquirable_.reserve(chunks_.size());
  released_.reserve(chunks_.size());
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

void Pipeline::set_caller_chunks(const std::vector<int>& chunks) {
  std::lock_guard lock(mutex_);
  if (stepping_) throw std::logic_error("set_caller_chunks in a step");
  for (const auto& chunk : chunks_) chunk->is_of_caller = false;
  for (int number : chunks) chunks_.at(number)->is_of_caller = true;
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

const ChunkChecksums& Pipeline::checksums(int chunk) const {
  std::lock_guard lock(mutex_);
  return chunks_.at(chunk)->checksums;
}

void Pipeline::rewritten(int chunk, char* const* streams) {
  std::lock_guard lock(mutex_);
  Chunk& c = *chunks_.at(chunk);
  for (std::size_t b = 0; b < c.parts.blocks.size(); ++b) {
    c.checksums.states[b] = block_checksum(c.parts.layout, c.parts.blocks[b], streams);
  }
  c.captured = false;
  if (c.state == ChunkState::resident) return;
  if (c.has_own_memory()) {
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
    if (sum != c.checksums.states[b]) return false;
  }
  return true;
}

void Pipeline::record_weight(int parameter, const void* weight) {
  std::lock_guard lock(mutex_);
  if (static_cast<std::size_t>(parameter) >= chunks_of_.size()) return;
  for (int number : chunks_of_[parameter]) {
    Chunk& chunk = *chunks_[number];
    for (std::size_t s = 0; s < chunk.spec.segments.size(); ++s) {
      if (chunk.spec.segments[s].parameter != parameter) continue;
      record_segment(chunk.spec, chunk.parts, chunk.checksums, static_cast<std::int32_t>(s), weight,
                     false);
    }
  }
}

void Pipeline::forget_weight(int parameter) {
  std::lock_guard lock(mutex_);
  if (static_cast<std::size_t>(parameter) >= chunks_of_.size()) return;
  for (int number : chunks_of_[parameter]) {
    Chunk& chunk = *chunks_[number];
    for (std::size_t p = 0; p < chunk.parts.pieces.size(); ++p) {
      const Segment& segment = chunk.spec.segments[chunk.parts.pieces[p].segment];
      if (segment.parameter == parameter) chunk.checksums.is_recorded[p] = 0;
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
      if (!record_segment(chunk.spec, chunk.parts, chunk.checksums, static_cast<std::int32_t>(s),
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
