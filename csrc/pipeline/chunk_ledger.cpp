#include "pipeline/chunk_ledger.h"

#include <cstring>
#include <stdexcept>

namespace stow {

ChunkState ChunkLedger::state(int chunk) const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return data_.chunks.at(chunk).state;
}

DiskPosition ChunkLedger::place(int chunk) const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return data_.chunks.at(chunk).place;
}

DiskPosition ChunkLedger::target(int chunk) const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return data_.chunks.at(chunk).target;
}

void ChunkLedger::set_spare(int chunk, DiskPosition spare) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  data_.chunks.at(chunk).spare = spare;
}

void ChunkLedger::set_target(int chunk, DiskPosition target) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  PipelineChunk& c = data_.chunks.at(chunk);
  // A slot may have been filled for the weights alone, for the states stay where they are.
  if (c.state == ChunkState::writing || c.stage != StepStage::out) {
    throw std::logic_error("set_target before the step has written it");
  }
  c.target = target;
}

bool ChunkLedger::captured(int chunk) const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return data_.chunks.at(chunk).captured;
}

void ChunkLedger::forget_capture(int parameter) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  for (int number : data_.chunks.of(parameter)) {
    PipelineChunk& chunk = data_.chunks.at(number);
    chunk.captured = chunk.capturing = false;
  }
}

const ChunkChecksums& ChunkLedger::checksums(int chunk) const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return data_.chunks.at(chunk).checksums;
}

void ChunkLedger::rewritten(int chunk, char* const* streams) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  PipelineChunk& c = data_.chunks.at(chunk);
  for (std::size_t b = 0; b < c.parts.blocks.size(); ++b) {
    c.checksums.states[b] = block_checksum(c.parts.layout, c.parts.blocks[b], streams);
  }
  c.captured = false;
  if (c.state == ChunkState::resident) return;
  if (c.has_own_memory()) {
    for (int k = 0; k < c.parts.layout.streams; ++k) {
      std::memcpy(c.spec.resident[k], streams[k], c.parts.layout.parts[k].length(c.spec.elements));
    }
    c.state = ChunkState::resident;
    return;
  }
  c.place = c.target;
  c.state = ChunkState::stored;
}

bool ChunkLedger::intact(int chunk, char* const* streams) const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  const PipelineChunk& c = data_.chunks.at(chunk);
  for (std::size_t b = 0; b < c.parts.blocks.size(); ++b) {
    const std::uint32_t sum = block_checksum(c.parts.layout, c.parts.blocks[b], streams);
    if (sum != c.checksums.states[b]) return false;
  }
  return true;
}

void ChunkLedger::record_weight(int parameter, const void* weight) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  for (int number : data_.chunks.of(parameter)) {
    PipelineChunk& chunk = data_.chunks.at(number);
    const auto segment = static_cast<std::int32_t>(segment_of(chunk.spec, parameter));
    record_segment(chunk.spec, chunk.parts, chunk.checksums, segment, weight, false);
  }
}

void ChunkLedger::forget_weight(int parameter) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  for (int number : data_.chunks.of(parameter)) {
    PipelineChunk& chunk = data_.chunks.at(number);
    for (std::size_t p = 0; p < chunk.parts.pieces.size(); ++p) {
      const Segment& segment = chunk.spec.segments[chunk.parts.pieces[p].segment];
      if (segment.parameter == parameter) chunk.checksums.is_recorded[p] = 0;
    }
  }
}

bool ChunkLedger::unchanged(int parameter, const void* weight) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  for (int number : data_.chunks.of(parameter)) {
    PipelineChunk& chunk = data_.chunks.at(number);
    const auto segment = static_cast<std::int32_t>(segment_of(chunk.spec, parameter));
    if (!record_segment(chunk.spec, chunk.parts, chunk.checksums, segment, weight, true)) {
      return false;
    }
  }
  return true;
}

void ChunkLedger::set_deferring(const std::vector<int>& chunks, bool defers) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  if (data_.step.is_under_way()) throw std::logic_error("set_deferring in a step");
  for (int number : chunks) data_.deferred.set(data_.chunks.at(number), defers);
}

void ChunkLedger::want(const std::vector<int>& chunks) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  if (data_.step.is_under_way()) throw std::logic_error("want in a step");
  for (int number : chunks) data_.chunks.at(number).is_wanted = true;
}

std::int64_t ChunkLedger::lagging(int parameter) const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return data_.deferred.lagging(parameter);
}

}  // namespace stow
