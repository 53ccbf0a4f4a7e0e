// The slots that chunks pass through.
#pragma once

#include <vector>

#include "pipeline/pipeline_chunk.h"
#include "pipeline/spec.h"

namespace stow {

class SlotRing {
 public:
  explicit SlotRing(PipelineCounters& counters) : counters_(counters) {}

  // While no slot is in use.
  void set(const RingSpec& spec);

  bool has_free() const { return !free_.empty(); }
  std::size_t free_slots() const { return free_.size(); }
  bool is_unused() const { return counters_.slots_in_use == 0; }

  // Gives the chunk a slot; there is a free one.
  void take(PipelineChunk& chunk);
  // The chunk gives its slot back, and is what `next` says.
  void leave(PipelineChunk& chunk, ChunkState next);

  // Whether a slot holds a chunk that nothing is being done with.
  bool has_ready() const;
  // Where the chunk's slot has one of its parts.
  char* part(const PipelineChunk& chunk, int part) const;

 private:
  PipelineCounters& counters_;
  RingSpec spec_;
  std::vector<int> free_;
  std::vector<const PipelineChunk*> holders_;  // by slot; null: it is free
};

}  // namespace stow
