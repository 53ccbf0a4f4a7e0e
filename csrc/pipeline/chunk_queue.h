// Chunks, first in first out or the newest first, in memory that is kept.
#pragma once

#include <cstddef>
#include <vector>

#include "pipeline/pipeline_chunk.h"

namespace stow {

class ChunkQueue {
 public:
  void reserve(std::size_t count) { items_.reserve(count); }
  void clear() { items_.clear(), head_ = 0; }
  // Whether `front` and `pop` are about the chunk that was pushed last.
  void set_newest_first(bool newest_first) { newest_first_ = newest_first; }
  bool empty() const { return head_ == items_.size(); }
  PipelineChunk& front() const { return newest_first_ ? *items_.back() : *items_[head_]; }
  void push(PipelineChunk& chunk) { items_.push_back(&chunk); }
  // The first one; null where there is none.
  PipelineChunk* pop() {
    if (empty()) return nullptr;
    PipelineChunk* next = &front();
    if (newest_first_) {
      items_.pop_back();
    } else {
      ++head_;
    }
    if (empty()) clear();
    return next;
  }

 private:
  std::vector<PipelineChunk*> items_;
  std::size_t head_ = 0;
  bool newest_first_ = false;
};

}  // namespace stow
