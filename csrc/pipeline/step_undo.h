// Takes an undoable step back, or makes it final.
//
// [Note: Undo] In an undoable step an update leaves the old states where they are on disk, and
// writes the new ones to the chunk's second place; the old weights go to the backups of the
// parameters, unless the caller keeps them elsewhere. Chunks that have no second place, or memory
// of their own, wait for `confirm`. Where runs commit, the place of the last commit is a third one,
// which neither of the two ever is.
#pragma once

#include <vector>

#include "pipeline/pipeline_data.h"
#include "pipeline/scheduler.h"

namespace stow {

class StepUndo {
 public:
  StepUndo(PipelineData& data, Scheduler& scheduler) : data_(data), scheduler_(scheduler) {}

  // Before such a step begins, with the lock held: throws where it could not be undone.
  void check(const std::vector<StepParameter>& parameters, const StepSpec& step,
             const std::vector<char>& expected);

  // No update of the step will be undone.
  void confirm();
  // Ends the open step as if it had never begun: weights, states and checksums are those of before.
  // Gradients are the caller's again.
  Failure undo();

 private:
  void put_back_weights(const PipelineChunk& chunk);

  PipelineData& data_;
  Scheduler& scheduler_;
};

}  // namespace stow
