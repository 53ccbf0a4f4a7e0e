// Which gradients a step still expects, and whose weights it has still to write.
#pragma once

#include <cstddef>
#include <vector>

#include "pipeline/pipeline_chunk.h"

namespace stow {

class StepGradients {
 public:
  // In an open step the `expected` parameters may get one.
  void start(std::size_t parameters, bool open, const std::vector<char>& expected);

  // Finds what the chunk gets: gradients that are there, unless it `leaves_out` their update, and
  // those that are due.
  void plan(PipelineChunk& chunk, const std::vector<StepParameter>& parameters, bool leaves_out);

  bool is_expected(int parameter) const { return expected_.at(parameter) != 0; }
  void set_arrived(int parameter) { expected_.at(parameter) = 0; }
  // What was due is there, or (null) will not come.
  void add(PipelineChunk& chunk, std::size_t segment, const void* data, DType dtype);
  // None is expected any more.
  void close();

  // The chunk's weights are new.
  void finish(const PipelineChunk& chunk);
  bool is_published(int parameter) const { return unpublished_of_.at(parameter) == 0; }

 private:
  std::vector<char> expected_;       // by parameter: a gradient may still come
  std::vector<int> pieces_due_of_;   // by parameter: chunks that still wait for its gradient
  std::vector<int> unpublished_of_;  // by parameter: chunks of it that are still to be updated
};

// The gradient of the segment, where the parameter has one.
SegmentGradient piece_of(const StepParameter& parameter, const Segment& segment);
// Which segment of the chunk is the parameter's; throws where none is.
std::size_t segment_of(const ChunkSpec& spec, int parameter);

}  // namespace stow
