// Chunks, first in first out, in memory that is kept.
#pragma once

#include <cstddef>
#include <vector>

#include "pipeline/pipeline_chunk.h"

namespace stow {

class ChunkQueue {
 public:
  void reserve(std::size_t count) { items_.reserve(count); }
  void clear() { items_.clear(), head_ = 0; }
  bool empty() const { return head_ == items_.size(); }
  PipelineChunk& front() const { return *items_[head_]; }
  void push(PipelineChunk& chunk) { items_.push_back(&chunk); }
  // The first one; null where there is none.
  PipelineChunk* pop() {
    if (empty()) return nullptr;
    PipelineChunk* first = items_[head_];
    if (++head_ == items_.size()) clear();
    return first;
  }

 private:
  std::vector<PipelineChunk*> items_;
  std::size_t head_ = 0;
};

}  // namespace stow
