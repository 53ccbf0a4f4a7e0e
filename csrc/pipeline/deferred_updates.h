// Updates with a zero gradient that chunks have still to make.
//
// [Note: Deferred updates] A zero gradient changes states and weights: moments fade, weights decay
// and go on with their momentum. A chunk that `defers` leaves such an update out of the step, and
// is neither read nor written; its parameter's log keeps what the update needs: the step's rounded
// scalars and its random key. When the chunk gets a gradient again, or is wanted, the same kernel
// makes the missing updates one after the other, block by block, while a block is in the cache. So
// states and weights are those of a pipeline that defers nothing, bit for bit, wherever the chunk
// has made all updates of the log. A commit's step wants every chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "pipeline/chunk_table.h"
#include "pipeline/update.h"

namespace stow {

class DeferredUpdates {
 public:
  explicit DeferredUpdates(const ChunkTable& chunks) : chunks_(chunks) {}

  // Whether no chunk has ever deferred.
  bool is_unused() const { return logs_.empty(); }
  // While idle: whether the chunk, which has one parameter alone, defers. One that lags behind
  // makes its missing updates in the next step that updates it.
  void set(PipelineChunk& chunk, bool defers);
  // Before a step takes the gradient of a parameter: finds the chunks for which it is zero. Reads
  // the whole gradient of chunks that defer; without the lock.
  void inspect(int parameter, const void* grad, DType dtype);
  // The step has a gradient of the parameter; all its chunks are to make the update.
  void record(int parameter, const StepParameter& row, const AdamHyper& hyper);
  // Whether the step leaves the chunk's update out.
  bool leaves_out(const PipelineChunk& chunk) const;

  // The updates that the chunk has still to make, before that with the step's gradient if it
  // `has_gradient`.
  MissedUpdates missed(const PipelineChunk& chunk, bool has_gradient) const;
  bool lags(const PipelineChunk& chunk) const { return missed(chunk, false).count != 0; }
  // It has made all of them.
  void catch_up(PipelineChunk& chunk) const;
  // The number of the parameter's chunks that lag behind.
  std::int64_t lagging(int parameter) const;

 private:
  struct Log {
    std::vector<MissedUpdate> updates;
    bool is_whole = false;  // the step's update is made by all chunks
  };

  const ChunkTable& chunks_;
  std::map<int, Log> logs_;  // by parameter, of those with chunks that defer
};

}  // namespace stow
