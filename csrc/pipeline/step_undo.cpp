#include "pipeline/step_undo.h"

#include <cstring>
#include <functional>
#include <stdexcept>

#include "base/pool.h"

namespace stow {

void StepUndo::check(const std::vector<StepParameter>& parameters, const StepSpec& step,
                     const std::vector<char>& expected) {
  if (!step.open || step.caller == Caller::updates) {
    throw std::invalid_argument("begin: such a step cannot be undone");
  }
  for (const auto& chunk : data_.chunks) {
    for (const Segment& segment : chunk->spec.segments) {
      const StepParameter& parameter = parameters[segment.parameter];
      const bool is_kept = parameter.keeps_weight || parameter.backup != nullptr;
      if (expected.at(segment.parameter) && !is_kept) {
        throw std::invalid_argument("begin: an undoable step needs the old weights kept");
      }
    }
    chunk->undo.is_taken = false;
  }
}

void StepUndo::confirm() {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  if (data_.monitor.has_failed()) return;  // reported by the waits
  if (!data_.step.is_undoable()) throw std::logic_error("confirm: no undoable step");
  data_.step.confirm();
  for (const auto& chunk : data_.chunks) {
    const bool waits = chunk->stage == StepStage::waiting || chunk->stage == StepStage::admitted;
    if (waits && !chunk->can_undo() && chunk->gradients_due == 0) scheduler_.mark_ready(*chunk);
  }
  data_.monitor.wake_scheduler();
}

Failure StepUndo::undo() {
  PipelineMonitor& monitor = data_.monitor;
  PipelineMonitor::Lock lock = monitor.lock();
  if (!monitor.has_failed() && !data_.step.is_undoable()) {
    throw std::logic_error("undo: no undoable step");
  }
  data_.step.end();  // nothing more is read or updated
  monitor.wait(lock, [&] { return !monitor.is_updating() && !data_.chunks.any_in_flight(); });
  if (monitor.has_failed()) return monitor.failure();
  data_.queues.clear();
  for (const auto& chunk : data_.chunks) {
    const bool is_taken = chunk->undo.is_taken;
    scheduler_.exclude(*chunk);
    if (!is_taken) continue;
    put_back_weights(*chunk);
    chunk->restore();
  }
  return monitor.failure();
}

// The old weights of what the step has updated.
void StepUndo::put_back_weights(const PipelineChunk& chunk) {
  const std::int64_t width = size_of(chunk.spec.family.param_dtype);
  const auto body = [&](std::int64_t index) {
    const UpdateBlock& block = chunk.parts.blocks[index];
    for (std::size_t p = block.first_piece; p < block.last_piece; ++p) {
      const BlockPart& piece = chunk.parts.pieces[p];
      const Segment& segment = chunk.spec.segments[piece.segment];
      if (chunk.gradients[piece.segment].data == nullptr) continue;
      const StepParameter& parameter = data_.step.parameters()[segment.parameter];
      if (parameter.keeps_weight) continue;  // it may have no memory now
      const std::int64_t first = (segment.parameter_offset + piece.offset) * width;
      std::memcpy(static_cast<char*>(parameter.param) + first,
                  static_cast<const char*>(parameter.backup) + first, piece.count * width);
    }
  };
  pool().run(static_cast<std::int64_t>(chunk.parts.blocks.size()), std::cref(body), 0);
}

}  // namespace stow
