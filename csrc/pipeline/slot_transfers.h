// Reads and writes of chunks, between their slots and the disk.
#pragma once

#include <functional>

#include "io/engine.h"
#include "pipeline/pipeline_data.h"

namespace stow {

class SlotTransfers {
 public:
  // All parts of a chunk were moved, or (`failed`) one of them was not. Called with the lock held,
  // on a thread of the engine; the transition out of reading or writing is the callee's.
  using OnEnd = std::function<void(PipelineChunk& chunk, Op op, bool failed)>;

  // `engine` and `data` outlive the transfers.
  SlotTransfers(Engine& engine, PipelineData& data, OnEnd on_end)
      : engine_(engine), data_(data), on_end_(std::move(on_end)) {}

  // The states, from the chunk's place.
  void read(PipelineChunk& chunk);
  // `parts` parts from the first one on, to its target.
  void write(PipelineChunk& chunk, int first_part, int parts);

 private:
  void submit(PipelineChunk& chunk, Op op, DiskPosition place, int first_part, int parts);
  static void on_transfer(Transfer* transfer);
  void end(PipelineChunk& chunk, const Transfer& transfer);

  Engine& engine_;
  PipelineData& data_;
  const OnEnd on_end_;
};

}  // namespace stow
