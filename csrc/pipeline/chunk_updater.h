// Runs the kernel on a chunk, in whichever memory its states are.
#pragma once

#include <cstdint>

#include "pipeline/pipeline_data.h"

namespace stow {

class ChunkUpdater {
 public:
  ChunkUpdater(PipelineData& data, Isa isa, Team team) : data_(data), isa_(isa), team_(team) {}

  UpdateScope scope_of(const PipelineChunk& chunk) const;
  UpdatePhase phase_of(const PipelineChunk& chunk) const;
  // Gives up the lock meanwhile. Returns the first block whose states are not what was written, or
  // -1.
  std::int64_t update(PipelineChunk& chunk, UpdateScope scope, UpdatePhase phase,
                      PipelineMonitor::Lock& lock);

 private:
  UpdateMemory memory_of(const PipelineChunk& chunk, UpdateScope scope) const;
  int threads() const;

  PipelineData& data_;
  const Isa isa_;
  const Team team_;
};

}  // namespace stow
