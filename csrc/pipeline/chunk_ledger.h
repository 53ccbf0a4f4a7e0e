// What is known of each chunk: where its states are, and which checksums they and its weights have.
#pragma once

#include "pipeline/pipeline_data.h"

namespace stow {

class ChunkLedger {
 public:
  explicit ChunkLedger(PipelineData& data) : data_(data) {}

  ChunkState state(int chunk) const;
  DiskPosition place(int chunk) const;
  DiskPosition target(int chunk) const;
  void set_target(int chunk, DiskPosition target);  // of the next step's write
  void set_spare(int chunk, DiskPosition spare);    // a second place, for steps that may be undone

  // Whether the chunk's place holds its current states and weights.
  bool captured(int chunk) const;
  void forget_capture(int parameter);  // others wrote the weight

  // While idle.
  const ChunkChecksums& checksums(int chunk) const;
  // While idle: `streams` are what was written to the chunk's target, or put into its memory.
  void rewritten(int chunk, char* const* streams);
  // While idle: whether `streams` are what was written last.
  bool intact(int chunk, char* const* streams) const;

  // While idle: the weights at `weight` are what an update of ours would have left.
  void record_weight(int parameter, const void* weight);
  void forget_weight(int parameter);  // what our last update left is unknown
  // While idle: whether the weights at `weight` are those that our last update left.
  bool unchanged(int parameter, const void* weight);

  // While idle: whether these chunks, each of one parameter, defer updates with a zero gradient
  // ([Note: Deferred updates]); not in steps that may be undone, or of a caller who updates.
  void set_deferring(const std::vector<int>& chunks, bool defers);
  // While idle: the next step to begin makes the updates that these chunks have deferred.
  void want(const std::vector<int>& chunks);
  // The number of the parameter's chunks that have deferred updates.
  std::int64_t lagging(int parameter) const;

 private:
  PipelineData& data_;
};

}  // namespace stow
