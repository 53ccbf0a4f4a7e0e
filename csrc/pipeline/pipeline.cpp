#include "pipeline/pipeline.h"

#include <unistd.h>

#include <stdexcept>
#include <string>

namespace stow {

Pipeline::Pipeline(Engine& engine, Isa isa, Order order, Team team)
    : owner_(getpid()),
      data_(order),
      ledger_(data_),
      scheduler_(engine, data_, isa, team),
      progress_(data_, scheduler_),
      undo_(data_, scheduler_) {}

Pipeline::~Pipeline() {
  // The scheduler first: a step without a wait would start new transfers after `quiesce`.
  scheduler_.stop();
  PipelineMonitor::Lock lock = data_.monitor.lock();
  drain(lock);
}

bool Pipeline::in_owner() const { return getpid() == owner_; }

PipelineCounters Pipeline::counters() const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  PipelineCounters counters = data_.counters;
  counters.slots_in_use = data_.slots_in_use();
  counters.slots_high_water = data_.ring.high_water();
  counters.small_high_water = data_.small_ring.high_water();
  return counters;
}

// --- what there is ---

void Pipeline::require_idle(const char* method) const {
  const CurrentStep& step = data_.step;
  if (!step.is_under_way() && !step.is_prefetching() && data_.slots_in_use() == 0) return;
  throw std::logic_error(std::string(method) + " while a step or a prefetch is under way");
}

void Pipeline::set_ring(const RingSpec& ring) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  require_idle("set_ring");
  data_.ring.set(ring.base, ring.slots, ring.slot_bytes);
  data_.small_ring.set(ring.base + ring.slots * ring.slot_bytes, ring.small_slots,
                       ring.small_bytes);
}

int Pipeline::add_chunk(ChunkSpec spec, bool blank, std::vector<std::uint32_t> states,
                        std::vector<std::uint32_t> weights) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  require_idle("add_chunk");
  const int number =
      data_.chunks.add(std::move(spec), blank, std::move(states), std::move(weights)).number;
  data_.order.add(number);
  data_.queues.reserve(data_.chunks.size());
  return number;
}

void Pipeline::set_order(std::vector<int> order) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  if (data_.step.is_under_way()) throw std::logic_error("set_order in a step");
  data_.order.set(std::move(order));
}

std::vector<int> Pipeline::order() const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return data_.order.numbers();
}

void Pipeline::set_caller_chunks(const std::vector<int>& chunks) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  if (data_.step.is_under_way()) throw std::logic_error("set_caller_chunks in a step");
  for (const auto& chunk : data_.chunks) chunk->is_of_caller = false;
  for (int number : chunks) data_.chunks.at(number).is_of_caller = true;
}

// --- a step ---

void Pipeline::prefetch() {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  CurrentStep& step = data_.step;
  if (step.is_under_way() || step.is_prefetching() || data_.monitor.has_failed()) return;
  step.start_prefetch();
  data_.order.restart(data_.ring.slots());
  data_.monitor.wake_scheduler();
}

void Pipeline::begin(const std::vector<StepParameter>& parameters,
                     const std::vector<AdamHyper>& hypers, const StepSpec& step,
                     const std::vector<char>& expected, bool runs) {
  if (!data_.deferred.is_unused() && (step.undoable || step.caller == Caller::updates)) {
    throw std::logic_error("begin: such a step cannot defer updates");
  }
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    data_.deferred.inspect(static_cast<int>(p), parameters[p].grad, parameters[p].grad_dtype);
  }
  PipelineMonitor::Lock lock = data_.monitor.lock();
  if (data_.monitor.has_failed()) {  // reported by the waits
    data_.monitor.wait(lock, [] { return true; });
    return;
  }
  if (data_.step.is_under_way()) {
    throw std::logic_error("begin before the last step was published");
  }
  if (parameters.size() < data_.chunks.parameters()) {
    throw std::invalid_argument("begin: chunks have parameters that are not among these");
  }
  if (step.undoable) undo_.check(parameters, step, expected);
  data_.step.start(parameters, hypers, step, expected);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const StepParameter& row = parameters[p];
    if (row.grad != nullptr) data_.deferred.record(static_cast<int>(p), row, hypers[row.hyper]);
  }
  data_.queues.clear();
  data_.queues.set_newest_first(step.newest_first);
  data_.order.restart(data_.ring.slots(), step.newest_first);
  for (int number : data_.order.numbers()) scheduler_.plan_chunk(data_.chunks.at(number));
  data_.order.keep_participants();
  if (!data_.step.has_unfinished()) data_.step.end();
  if (runs) data_.monitor.wake_scheduler();
}

Failure Pipeline::run() { return scheduler_.run(); }

void Pipeline::add_gradient(int parameter, const void* grad, DType dtype) {
  data_.deferred.inspect(parameter, grad, dtype);
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  if (data_.monitor.has_failed()) return;  // reported by the waits
  CurrentStep& step = data_.step;
  if (!step.takes_gradients() || !step.gradients().is_expected(parameter)) {
    throw std::logic_error("add_gradient: no gradient of this parameter is expected");
  }
  const StepParameter& row = step.set_gradient(parameter, grad, dtype);
  data_.deferred.record(parameter, row, step.hypers()[row.hyper]);
  for (int number : data_.chunks.of(parameter)) {
    PipelineChunk& chunk = data_.chunks.at(number);
    const std::size_t s = segment_of(chunk.spec, parameter);
    const bool leaves_out = !step.spec().capture && data_.deferred.leaves_out(chunk);
    if (leaves_out) chunk.captured = false;
    const SegmentGradient gradient = piece_of(row, chunk.spec.segments[s]);
    scheduler_.add_gradient(chunk, s, leaves_out ? nullptr : gradient.data, gradient.dtype);
  }
  data_.monitor.wake_scheduler();
}

void Pipeline::add_chunk_gradients(int number, const std::vector<PieceGradient>& pieces) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  if (data_.monitor.has_failed()) return;  // reported by the waits
  PipelineChunk& chunk = data_.chunks.at(number);
  if (chunk.defers) throw std::logic_error("add_chunk_gradients: the chunk defers updates");
  for (const PieceGradient& piece : pieces) {
    const std::size_t s = segment_of(chunk.spec, piece.parameter);
    if (!data_.step.takes_gradients() || !chunk.gradients[s].due) {
      throw std::logic_error("add_chunk_gradients: no gradient of this piece is expected");
    }
    scheduler_.add_gradient(chunk, s, piece.grad, piece.dtype);
  }
  data_.monitor.wake_scheduler();
}

void Pipeline::close() {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  if (data_.monitor.has_failed()) return;
  if (!data_.step.takes_gradients()) throw std::logic_error("close: no open step");
  for (const auto& chunk : data_.chunks) {
    for (std::size_t s = 0; s < chunk->gradients.size() && chunk->gradients_due != 0; ++s) {
      if (chunk->gradients[s].due) scheduler_.add_gradient(*chunk, s, nullptr, DType::f32);
    }
  }
  data_.step.close();
  scheduler_.end_finished_step();
  data_.monitor.wake_scheduler();
  data_.monitor.wake_callers();
}

AcquiredChunk Pipeline::acquire_chunk(bool wait) {
  PipelineMonitor& monitor = data_.monitor;
  PipelineMonitor::Lock lock = monitor.lock();
  if (wait) {
    const double start = now();
    monitor.wait(lock, [&] {
      return data_.queues.has_acquirable() || !data_.step.is_under_way() || monitor.has_failed();
    });
    data_.counters.wait_seconds += now() - start;
  }
  PipelineChunk* chunk = monitor.has_failed() ? nullptr : data_.queues.pop_acquirable();
  if (chunk == nullptr) return {};
  return {chunk->number, chunk->state == ChunkState::resident ? -1 : chunk->slot};
}

void Pipeline::release_chunk(int number) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  PipelineChunk& chunk = data_.chunks.at(number);
  if (chunk.stage != StepStage::acquired) {
    throw std::logic_error("release_chunk: the chunk was not acquired");
  }
  data_.queues.push_released(chunk);
  data_.monitor.wake_scheduler();
}

Failure Pipeline::quiesce() {
  PipelineMonitor& monitor = data_.monitor;
  PipelineMonitor::Lock lock = monitor.lock();
  drain(lock);
  drain(lock);  // what the first has begun to write
  return monitor.failure();
}

// Waits for the step and its writes. What is in slots then leaves them, or begins to be written.
void Pipeline::drain(PipelineMonitor::Lock& lock) {
  PipelineMonitor& monitor = data_.monitor;
  data_.step.end_prefetch();
  for (const auto& chunk : data_.chunks) {
    if (!data_.step.is_under_way()) scheduler_.exclude(*chunk);
  }
  monitor.wait(lock, [&] {
    const bool step_over = !data_.step.is_under_way() || monitor.has_failed();
    return step_over && !data_.chunks.any_in_flight();
  });
  // What was read or written meanwhile may have stayed in its slot.
  for (const auto& chunk : data_.chunks) {
    scheduler_.exclude(*chunk);
    scheduler_.let_go(*chunk);
  }
}

}  // namespace stow
