// The chunks of a pipeline, by number and by parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pipeline/pipeline_chunk.h"

namespace stow {

class ChunkTable {
 public:
  // As Pipeline::add_chunk.
  PipelineChunk& add(ChunkSpec spec, bool blank, std::vector<std::uint32_t> states,
                     std::vector<std::uint32_t> weights);

  PipelineChunk& at(int number) const { return *chunks_.at(number); }
  std::size_t size() const { return chunks_.size(); }
  auto begin() const { return chunks_.begin(); }
  auto end() const { return chunks_.end(); }

  // The numbers of the chunks that have something of the parameter.
  const std::vector<int>& of(int parameter) const;
  // One more than the highest parameter of any chunk.
  std::size_t parameters() const { return chunks_of_.size(); }

  bool any_in_flight() const;
  bool any_writing() const;

 private:
  std::vector<std::unique_ptr<PipelineChunk>> chunks_;
  std::vector<std::vector<int>> chunks_of_;  // by parameter
};

}  // namespace stow
