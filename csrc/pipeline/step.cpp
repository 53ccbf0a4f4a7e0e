// The pipeline's callers: they begin a step, hand gradients over, and wait.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "pipeline/pipeline_chunk.h"

namespace stow {

namespace {

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

}  // namespace

// --- a step ---

// The update under way reads the caller's gradients: after a failure it must end before the caller
// may free them.
template <class Over>
void Pipeline::sleep_until(std::unique_lock<std::mutex>& lock, Over over) {
  ++waiters_;
  callers_wake_.wait(lock, [&] { return over() && !(failure_.error != 0 && updating_); });
  --waiters_;
}

void Pipeline::prefetch() {
  std::lock_guard lock(mutex_);
  if (stepping_ || prefetching_ || failure_.error != 0) return;
  prefetching_ = true;
  next_ = 0;
  work_ = true;
  scheduler_wakes_.notify_one();
}

void Pipeline::begin(const std::vector<StepParameter>& parameters,
                     const std::vector<AdamHyper>& hypers, const StepSpec& step,
                     const std::vector<char>& expected) {
  std::unique_lock lock(mutex_);
  if (failure_.error != 0) {  // reported by the waits
    sleep_until(lock, [] { return true; });
    return;
  }
  if (stepping_) throw std::logic_error("begin before the last step was published");
  if (parameters.size() < chunks_of_.size()) {
    throw std::invalid_argument("begin: chunks have parameters that are not among these");
  }
  parameters_ = parameters;
  hypers_ = hypers;
  expected_.assign(parameters_.size(), 0);
  if (step.open)
    std::copy_n(expected.begin(), std::min(expected.size(), expected_.size()), expected_.begin());
  unpublished_of_.assign(parameters_.size(), 0);
  pieces_due_of_.assign(parameters_.size(), 0);
  step_ = step;
  prefetching_ = false;
  ready_to_read_.clear();
  ready_.clear();
  ready_resident_.clear();
  acquirable_.clear();
  released_.clear();
  next_ = 0;
  unfinished_ = 0;
  stepping_ = true;
  for (int number : order_) plan_chunk(*chunks_[number]);
  stepping_ = step_.open || unfinished_ != 0;
  work_ = true;
  scheduler_wakes_.notify_one();
}

// Decides what the step is to do with a chunk.
void Pipeline::plan_chunk(Chunk& chunk) {
  chunk.stage = Stage::out;
  chunk.gradients_due = 0;
  chunk.has_gradient = false;
  for (std::size_t s = 0; s < chunk.spec.segments.size(); ++s) {
    const Segment& segment = chunk.spec.segments[s];
    const StepParameter& parameter = parameters_[segment.parameter];
    SegmentGradient& gradient = chunk.gradients[s] = {};
    if (parameter.grad != nullptr) {
      gradient = piece_of(parameter, segment);
      chunk.has_gradient = true;
    } else if (step_.open && expected_[segment.parameter]) {
      gradient.due = true;
      ++chunk.gradients_due;
      ++pieces_due_of_[segment.parameter];
    } else {
      continue;
    }
    ++unpublished_of_[segment.parameter];
  }
  const bool must_capture = step_.capture && !chunk.captured;
  if (!chunk.has_gradient && chunk.gradients_due == 0 && !must_capture) {
    exclude(chunk);
    return;
  }
  ++unfinished_;
  chunk.unwanted = false;
  chunk.stage = Stage::waiting;
  if (chunk.state == ChunkState::ready || chunk.state == ChunkState::reading ||
      chunk.state == ChunkState::resident) {
    chunk.stage = Stage::admitted;
  }
  if (chunk.gradients_due == 0) mark_ready(chunk);
}

// The chunk has no part in this step.
void Pipeline::exclude(Chunk& chunk) {
  chunk.stage = Stage::out;
  if (chunk.state == ChunkState::ready) {
    leave_slot(chunk, state_on_disk(chunk));
  } else if (chunk.state == ChunkState::reading) {
    chunk.unwanted = true;
  }
}

// All gradients that the chunk will get are there.
void Pipeline::mark_ready(Chunk& chunk) {
  chunk.ready = Metered::Clock::now();
  if (chunk.stage == Stage::waiting) {
    if (step_.open) ready_to_read_.push(chunk.number);
  } else if (chunk.state == ChunkState::ready) {
    chunk.stage = Stage::queued;
    ready_.push(chunk.number);
  } else if (chunk.state == ChunkState::resident) {
    chunk.stage = Stage::queued;
    ready_resident_.push(chunk.number);
  }  // else its read is in flight, whose end queues it
}

void Pipeline::add_gradient(int parameter, const void* grad, DType dtype) {
  std::lock_guard lock(mutex_);
  if (failure_.error != 0) return;  // reported by the waits
  if (!stepping_ || !step_.open || !expected_.at(parameter)) {
    throw std::logic_error("add_gradient: no gradient of this parameter is expected");
  }
  expected_[parameter] = 0;
  parameters_[parameter].grad = grad;
  parameters_[parameter].grad_dtype = dtype;
  if (static_cast<std::size_t>(parameter) < chunks_of_.size()) {
    for (int number : chunks_of_[parameter]) {
      Chunk& chunk = *chunks_[number];
      const std::size_t s = segment_of(chunk.spec, parameter);
      const SegmentGradient gradient = piece_of(parameters_[parameter], chunk.spec.segments[s]);
      add_segment_gradient(chunk, s, gradient.data, gradient.dtype);
    }
  }
  work_ = true;
  scheduler_wakes_.notify_one();
}

void Pipeline::add_chunk_gradients(int number, const std::vector<PieceGradient>& pieces) {
  std::lock_guard lock(mutex_);
  if (failure_.error != 0) return;  // reported by the waits
  Chunk& chunk = *chunks_.at(number);
  for (const PieceGradient& piece : pieces) {
    const std::size_t s = segment_of(chunk.spec, piece.parameter);
    if (!stepping_ || !step_.open || !chunk.gradients[s].due) {
      throw std::logic_error("add_chunk_gradients: no gradient of this piece is expected");
    }
    add_segment_gradient(chunk, s, piece.grad, piece.dtype);
    if (pieces_due_of_[piece.parameter] == 0) expected_[piece.parameter] = 0;
  }
  work_ = true;
  scheduler_wakes_.notify_one();
}

// What was due is there, or (null) will not come.
void Pipeline::add_segment_gradient(Chunk& chunk, std::size_t segment, const void* data,
                                    DType dtype) {
  const int parameter = chunk.spec.segments[segment].parameter;
  chunk.gradients[segment] = {static_cast<const char*>(data), dtype, false};
  --pieces_due_of_[parameter];
  if (data != nullptr) {
    chunk.has_gradient = true;
  } else {
    --unpublished_of_[parameter];
  }
  if (--chunk.gradients_due != 0) return;
  if (chunk.has_gradient || (step_.capture && !chunk.captured)) {
    mark_ready(chunk);
  } else {
    exclude(chunk);
    --unfinished_;
  }
}

void Pipeline::close() {
  std::lock_guard lock(mutex_);
  if (failure_.error != 0) return;
  if (!stepping_ || !step_.open) throw std::logic_error("close: no open step");
  std::fill(expected_.begin(), expected_.end(), 0);
  for (const auto& chunk : chunks_) {
    for (std::size_t s = 0; s < chunk->gradients.size() && chunk->gradients_due != 0; ++s) {
      if (chunk->gradients[s].due) add_segment_gradient(*chunk, s, nullptr, DType::f32);
    }
  }
  step_.open = false;
  if (unfinished_ == 0) {
    stepping_ = false;
    set_next_order();
  }
  work_ = true;
  scheduler_wakes_.notify_one();
  callers_wake_.notify_all();
}

AcquiredChunk Pipeline::acquire_chunk(bool wait) {
  std::unique_lock lock(mutex_);
  const double start = now();
  if (wait) {
    sleep_until(lock, [this] { return !acquirable_.empty() || !stepping_ || failure_.error != 0; });
    counters_.wait_seconds += now() - start;
  }
  if (acquirable_.empty() || failure_.error != 0) return {};
  Chunk& chunk = *chunks_[acquirable_.front()];
  acquirable_.pop();
  chunk.stage = Stage::acquired;
  return {chunk.number, chunk.state == ChunkState::resident ? -1 : chunk.slot};
}

void Pipeline::release_chunk(int number) {
  std::lock_guard lock(mutex_);
  Chunk& chunk = *chunks_.at(number);
  if (chunk.stage != Stage::acquired) {
    throw std::logic_error("release_chunk: the chunk was not acquired");
  }
  chunk.stage = Stage::released;
  released_.push(number);
  work_ = true;
  scheduler_wakes_.notify_one();
}

// The order of the next step. What this step's end left in the ring comes first.
void Pipeline::set_next_order() {
  if (order_kind_ == Order::alternating) std::reverse(order_.begin(), order_.end());
  next_ = 0;
}

template <class Over>
Failure Pipeline::wait(Over over) {
  const double start = now();
  std::unique_lock lock(mutex_);
  sleep_until(lock, [&] { return over() || failure_.error != 0; });
  if (failure_.error != 0) stepping_ = false;
  const double stop = now();
  counters_.wait_seconds += stop - start;
  trace_.record({start, stop, Lane::wait, -1, 0});
  return failure_;
}

Failure Pipeline::wait_published() {
  return wait([this] { return !stepping_; });
}

Failure Pipeline::wait_parameters(const std::vector<int>& parameters) {
  return wait([&] {
    return !stepping_ || std::all_of(parameters.begin(), parameters.end(), [this](int parameter) {
      return unpublished_of_.at(parameter) == 0 || expected_[parameter];
    });
  });
}

bool Pipeline::is_published(int parameter) const {
  std::lock_guard lock(mutex_);
  return !stepping_ || unpublished_of_.at(parameter) == 0;
}

Failure Pipeline::wait_chunk(int chunk) {
  return wait(
      [&] { return !stepping_ || chunks_.at(chunk)->stage == Stage::out || !acquirable_.empty(); });
}

bool Pipeline::is_updated(int chunk) const {
  std::lock_guard lock(mutex_);
  return !stepping_ || chunks_.at(chunk)->stage == Stage::out;
}

Failure Pipeline::wait_written() {
  std::unique_lock lock(mutex_);
  sleep_until(lock, [this] {
    if (failure_.error != 0) return true;
    return !stepping_ && std::none_of(chunks_.begin(), chunks_.end(), [](const auto& c) {
      return c->state == ChunkState::writing;
    });
  });
  return failure_;
}

Failure Pipeline::quiesce() {
  std::unique_lock lock(mutex_);
  prefetching_ = false;
  for (const auto& chunk : chunks_) {
    if (!stepping_) exclude(*chunk);
  }
  sleep_until(lock, [this] {
    const bool step_over = !stepping_ || failure_.error != 0;
    return step_over && !anything_in_flight();
  });
  // What was read meanwhile may have stayed in its slot.
  for (const auto& chunk : chunks_) exclude(*chunk);
  return failure_;
}

}  // namespace stow
