// The step under way: what it was begun with, and how much of it is left.
#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/pipeline_chunk.h"
#include "pipeline/spec.h"
#include "pipeline/step_gradients.h"

namespace stow {

class CurrentStep {
 public:
  void start(const std::vector<StepParameter>& parameters, const std::vector<AdamHyper>& hypers,
             const StepSpec& spec, const std::vector<char>& expected);
  // Begun, and not yet published as a whole.
  bool is_under_way() const { return phase_ == PipelinePhase::stepping; }
  void end() {
    if (is_under_way()) phase_ = PipelinePhase::idle;
  }

  // Between steps: reads for the next one.
  bool is_prefetching() const { return phase_ == PipelinePhase::prefetching; }
  void start_prefetch() { phase_ = PipelinePhase::prefetching; }
  void end_prefetch() {
    if (is_prefetching()) phase_ = PipelinePhase::idle;
  }

  const StepSpec& spec() const { return spec_; }
  const std::vector<StepParameter>& parameters() const { return parameters_; }
  const std::vector<AdamHyper>& hypers() const { return hypers_; }

  StepGradients& gradients() { return gradients_; }
  // Takes an expected gradient of an open step.
  const StepParameter& set_gradient(int parameter, const void* grad, DType dtype);
  bool takes_gradients() const { return is_under_way() && spec_.open; }
  // No more gradients.
  void close();
  // Whether updates may be undone; until `confirm`.
  bool is_undoable() const { return is_under_way() && spec_.undoable; }
  void confirm() { spec_.undoable = false; }
  // Whether the chunk waits until then, in no slot.
  bool holds_back(const PipelineChunk& chunk) const { return is_undoable() && !chunk.can_undo(); }

  // Whether the chunk is written though it gets no gradient.
  bool must_capture(const PipelineChunk& chunk) const { return spec_.capture && !chunk.captured; }
  // The step is to do something with one more chunk, or one fewer.
  void include_chunk() { ++unfinished_; }
  void finish_chunk() { --unfinished_; }
  bool has_unfinished() const { return spec_.open || unfinished_ != 0; }

 private:
  enum class PipelinePhase : std::uint8_t { idle, prefetching, stepping };

  PipelinePhase phase_ = PipelinePhase::idle;
  StepSpec spec_;
  std::vector<StepParameter> parameters_;
  std::vector<AdamHyper> hypers_;
  StepGradients gradients_;
  std::int64_t unfinished_ = 0;  // chunks
};

}  // namespace stow
