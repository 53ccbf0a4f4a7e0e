// In which order a step takes the chunks: which is read next, and which gives its slot up.
//
// [Note: Ahead of gradients] Where a step goes on in the next forward, what that needs first gets
// its gradients last, and forward would wait while its states are read. So once the first gradients
// have come, chunks are read before theirs come: the last one of a window as wide as the ring
// first, as about so many come while all slots are in use. If the disk cannot keep up, those in
// between are passed by, and read when nothing newer is left. So what is left is spread over the
// model: a forward that waits for chunks in a row leaves the disk idle later. A quarter of the
// slots is for chunks that have their gradients.
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
  // From the first chunk on, of a step whose ring has so many slots. `newest_first`: of those whose
  // gradients are there.
  void restart(std::size_t slots, bool newest_first = false);
  // All gradients of a chunk have come, of an open step.
  void arrive(const PipelineChunk& chunk) { reached_ = std::max(reached_, chunk.turn); }
  // How many slots are for chunks whose gradients come next ([Note: Ahead of gradients]).
  std::size_t slots_ahead() const;
  // Gradients of chunks up to this turn come late: many that are later in the order have theirs.
  int late_turn() const { return reached_ - static_cast<int>(slots_); }
  // Gradients of a chunk that waits are there: it is read before those in turn.
  void push_ready(PipelineChunk& chunk) { ready_to_read_.push(chunk); }
  // The chunk to read next; null where there is none, or where the first that needs a slot must
  // wait. `ahead`: of the chunks whose gradients come next the last one, before all others.
  PipelineChunk* next(const CurrentStep& step, bool ahead = false);
  // Reading of `next` has begun.
  void pop(const PipelineChunk& chunk);

  bool has_ready() const { return !ready_to_read_.empty(); }
  // Whether more chunks than that are still to be read in turn.
  bool has_more_than(std::size_t slots) const;
  // The chunk whose slot another one may have: one that has no part in the step or waits until it
  // is confirmed, else the last one up to the turn `last` whose gradients are still to come; null
  // where there is none.
  PipelineChunk* to_evict(const CurrentStep& step, int last) const;

 private:
  PipelineChunk* next_due(const CurrentStep& step);

  const Order kind_;
  const ChunkTable& chunks_;
  std::vector<int> numbers_;  // of all chunks
  std::vector<int> current_;  // of those that may have a part in the step
  std::size_t next_ = 0;      // in current_
  std::size_t slots_ = 0;
  bool newest_first_ = false;
  int reached_ = -1;          // the turn of the last chunk whose gradients have come; -1: none have
  ChunkQueue ready_to_read_;  // passed by in current_
};

}  // namespace stow
