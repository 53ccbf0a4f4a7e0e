// In which order a step takes the chunks: which is read next, and which gives its slot up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "pipeline/chunk_queue.h"
#include "pipeline/chunk_table.h"
#include "pipeline/current_step.h"

namespace stow {

class ReadOrder {
 public:
  ReadOrder(Order kind, const ChunkTable& chunks) : kind_(kind), chunks_(chunks) {}

  void add(int number);
  // Each chunk once.
  void set(std::vector<int> numbers);
  const std::vector<int>& numbers() const { return numbers_; }
  // The order of the next step. What this step's end left in the ring comes first.
  void set_next_order();
  // Whether the next step begins with what this one ends with.
  bool alternates() const { return kind_ == Order::alternating; }

  // Takes only these from now on, of a step that begins: most may have no part in it.
  void keep_participants();
  // From the first chunk on. `newest_first`: of those whose gradients are there.
  void restart(bool newest_first = false);
  // All gradients of a chunk have come, of an open step.
  void arrive(const PipelineChunk& chunk) { reached_ = std::max(reached_, chunk.turn); }
  // The turn of the last chunk whose gradients have come; -1: none have.
  int reached() const { return reached_; }
  // Gradients of a chunk that waits are there: it is read before those in turn.
  void push_ready(PipelineChunk& chunk) { ready_to_read_.push(chunk); }
  // The chunk to read next; null where there is none, or where the first that needs a slot must
  // wait. Of so many chunks `ahead` in turn whose gradients are still to come, the last one is read
  // before all others.
  PipelineChunk* next(const CurrentStep& step, std::size_t ahead = 0);
  // Reading of `next` has begun.
  void pop(const PipelineChunk& chunk);

  bool has_ready() const { return !ready_to_read_.empty(); }
  // Whether more chunks than that are still to be read in turn.
  bool has_more_than(std::size_t slots) const;
  // The chunk whose slot another one may have: one that has no part in the step, else the last one
  // whose gradients are still to come, up to the turn `last`; null where there is none.
  PipelineChunk* to_evict(const CurrentStep& step, int last) const;

 private:
  PipelineChunk* next_due(const CurrentStep& step, std::size_t ahead);

  const Order kind_;
  const ChunkTable& chunks_;
  std::vector<int> numbers_;  // of all chunks
  std::vector<int> current_;  // of those that may have a part in the step
  std::size_t next_ = 0;      // in current_
  int reached_ = -1;          // in current_
  ChunkQueue ready_to_read_;  // passed by in current_
};

}  // namespace stow
