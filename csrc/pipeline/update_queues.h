// Chunks that are to be updated now, by whom they are.
#pragma once

#include <cstddef>

#include "pipeline/chunk_queue.h"

namespace stow {

class UpdateQueues {
 public:
  void reserve(std::size_t count);
  void clear();
  // For the step that begins: among those that are ready.
  void set_newest_first(bool newest_first);

  // States and gradients are there: in a slot, or in the chunk's own memory.
  void push_ready(PipelineChunk& chunk);
  bool has_ready() const { return !in_slots_.empty(); }
  PipelineChunk* pop_ready() { return in_slots_.pop(); }
  PipelineChunk* pop_resident() { return resident_.pop(); }
  bool has_resident() const { return !resident_.empty(); }
  // Chunks in slots go first: their slots are what the reads behind them wait for.
  bool resident_is_next(bool resident_first) const {
    return has_resident() && (in_slots_.empty() || resident_first);
  }

  // For the caller to acquire, and to give back updated.
  void push_acquirable(PipelineChunk& chunk);
  bool has_acquirable() const { return !acquirable_.empty(); }
  PipelineChunk* pop_acquirable();
  void push_released(PipelineChunk& chunk);
  PipelineChunk* pop_released() { return released_.pop(); }

 private:
  ChunkQueue in_slots_;
  ChunkQueue resident_;
  ChunkQueue acquirable_;
  ChunkQueue released_;
};

}  // namespace stow
