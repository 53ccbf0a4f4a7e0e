// The slots that chunks pass through.
#pragma once

#include <vector>

#include "pipeline/pipeline_chunk.h"
#include "pipeline/spec.h"

namespace stow {

class SlotRing {
 public:
  // While no slot is in use.
  void set(char* base, int slots, std::int64_t slot_bytes);

  bool has_free() const { return !free_.empty(); }
  std::size_t slots() const { return holders_.size(); }
  std::size_t free_slots() const { return free_.size(); }
  std::int64_t in_use() const { return static_cast<std::int64_t>(holders_.size() - free_.size()); }
  std::int64_t high_water() const { return high_water_; }

  // Gives the chunk a slot; there is a free one.
  void take(PipelineChunk& chunk);
  // The chunk gives its slot back, and is what `next` says.
  void leave(PipelineChunk& chunk, ChunkState next);

  // Whether a slot holds a chunk that nothing is being done with.
  bool has_ready() const;
  // How many slots hold chunks whose gradients are still to come, of those after `turn`.
  std::size_t awaiting_gradients(int turn) const;
  // The next chunk in turn that has no part in the step and may leave its slot, or, if it `lags`
  // on disk, may do so once it is written; null: there is none.
  PipelineChunk* next_idle(bool lags);
  // Where the chunk's slot has one of its parts.
  char* part(const PipelineChunk& chunk, int part) const;

 private:
  char* base_ = nullptr;
  std::int64_t slot_bytes_ = 0;
  std::vector<int> free_;
  std::vector<PipelineChunk*> holders_;  // by slot; null: it is free
  std::int64_t high_water_ = 0;
  std::size_t turn_ = 0;  // of `next_idle`
};

}  // namespace stow
