#include "pipeline/step_gradients.h"

#include <algorithm>
#include <stdexcept>

namespace stow {

std::size_t segment_of(const ChunkSpec& spec, int parameter) {
  for (std::size_t s = 0; s < spec.segments.size(); ++s) {
    if (spec.segments[s].parameter == parameter) return s;
  }
  throw std::out_of_range("the chunk has nothing of this parameter");
}

SegmentGradient piece_of(const StepParameter& parameter, const Segment& segment) {
  const std::int64_t at = segment.parameter_offset * size_of(parameter.grad_dtype);
  return {static_cast<const char*>(parameter.grad) + at, parameter.grad_dtype, false};
}

void StepGradients::start(std::size_t parameters, bool open, const std::vector<char>& expected) {
  expected_.assign(parameters, 0);
  if (open) std::copy_n(expected.begin(), std::min(expected.size(), parameters), expected_.begin());
  unpublished_of_.assign(parameters, 0);
  pieces_due_of_.assign(parameters, 0);
}

void StepGradients::plan(PipelineChunk& chunk, const std::vector<StepParameter>& parameters,
                         bool leaves_out) {
  chunk.gradients_due = 0;
  chunk.has_update = false;
  for (std::size_t s = 0; s < chunk.spec.segments.size(); ++s) {
    const Segment& segment = chunk.spec.segments[s];
    const StepParameter& parameter = parameters[segment.parameter];
    SegmentGradient& gradient = chunk.gradients[s] = {};
    if (parameter.grad != nullptr) {
      if (leaves_out) {
        chunk.captured = false;  // what its place holds is older than the step
        continue;
      }
      gradient = piece_of(parameter, segment);
      chunk.has_update = true;
    } else if (expected_[segment.parameter] != 0) {
      gradient.due = true;
      ++chunk.gradients_due;
      ++pieces_due_of_[segment.parameter];
    } else {
      continue;
    }
    ++unpublished_of_[segment.parameter];
  }
}

void StepGradients::add(PipelineChunk& chunk, std::size_t segment, const void* data, DType dtype) {
  const int parameter = chunk.spec.segments[segment].parameter;
  chunk.gradients[segment] = {static_cast<const char*>(data), dtype, false};
  if (--pieces_due_of_[parameter] == 0) expected_[parameter] = 0;
  if (data != nullptr) {
    chunk.has_update = true;
  } else {
    --unpublished_of_[parameter];
  }
  --chunk.gradients_due;
}

void StepGradients::close() { std::fill(expected_.begin(), expected_.end(), 0); }

void StepGradients::finish(const PipelineChunk& chunk) {
  for (std::size_t s = 0; s < chunk.gradients.size(); ++s) {
    if (chunk.gradients[s].data != nullptr) --unpublished_of_[chunk.spec.segments[s].parameter];
  }
}

}  // namespace stow
