// How far the step is: callers ask, or wait for it.
#pragma once

#include <vector>

#include "pipeline/pipeline_data.h"
#include "pipeline/scheduler.h"

namespace stow {

class StepProgress {
 public:
  StepProgress(PipelineData& data, Scheduler& scheduler) : data_(data), scheduler_(scheduler) {}

  // Block until the step is published as a whole, or these parameters of it; or something failed.
  // In an open step a parameter waits for the gradients of all that share a chunk with it; one that
  // is still expected is not waited for.
  Failure wait_published();
  Failure wait_parameters(const std::vector<int>& parameters);
  bool is_published(int parameter) const;

  // Whether the step is done with the chunk: its weights are new, its gradients the caller's again.
  bool is_updated(int chunk) const;
  // Blocks until it is.
  Failure wait_chunk(int chunk);

  // The number of changes that callers may wait for: chunks that are updated or can be acquired,
  // and calls of `signal`. `wait_change` blocks until it is not `seen` any more.
  std::int64_t changes() const;
  Failure wait_change(std::int64_t seen);
  void signal();

  // Blocks until every write of the step is over.
  Failure wait_written();

  // Whether no step is under way: weights and gradients are the caller's again.
  bool is_over() const;
  Failure failure() const;

 private:
  template <class Over>
  Failure wait(Over over);

  PipelineData& data_;
  Scheduler& scheduler_;
};

}  // namespace stow
