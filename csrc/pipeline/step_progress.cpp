#include "pipeline/step_progress.h"

#include <algorithm>

namespace stow {

template <class Over>
Failure StepProgress::wait(Over over) {
  const double start = now();
  PipelineMonitor& monitor = data_.monitor;
  PipelineMonitor::Lock lock = monitor.lock();
  const auto ended = [&] { return over() || monitor.has_failed(); };
  if (data_.takes_help() && !ended()) {
    scheduler_.run_until(lock, ended);
  } else {
    monitor.wait(lock, ended);
    data_.record_wait(start);
  }
  if (monitor.has_failed()) data_.step.end();
  return monitor.failure();
}

Failure StepProgress::wait_published() {
  return wait([this] { return !data_.step.is_under_way(); });
}

Failure StepProgress::wait_parameters(const std::vector<int>& parameters) {
  const StepGradients& gradients = data_.step.gradients();
  const auto settled = [&](int parameter) {
    return gradients.is_published(parameter) || gradients.is_expected(parameter);
  };
  return wait([&] {
    return !data_.step.is_under_way() || std::all_of(parameters.begin(), parameters.end(), settled);
  });
}

bool StepProgress::is_published(int parameter) const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return !data_.step.is_under_way() || data_.step.gradients().is_published(parameter);
}

bool StepProgress::is_updated(int chunk) const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return !data_.step.is_under_way() || data_.chunks.at(chunk).stage == StepStage::out;
}

Failure StepProgress::wait_chunk(int chunk) {
  return wait(
      [&] { return !data_.step.is_under_way() || data_.chunks.at(chunk).stage == StepStage::out; });
}

std::int64_t StepProgress::changes() const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return data_.monitor.changes();
}

Failure StepProgress::wait_change(std::int64_t seen) {
  return wait([&] { return data_.monitor.changes() != seen; });
}

void StepProgress::signal() {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  data_.monitor.wake_callers();
}

Failure StepProgress::wait_written() {
  PipelineMonitor& monitor = data_.monitor;
  PipelineMonitor::Lock lock = monitor.lock();
  monitor.wait(lock, [&] {
    return monitor.has_failed() || (!data_.step.is_under_way() && !data_.chunks.any_writing());
  });
  return monitor.failure();
}

bool StepProgress::is_over() const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return !data_.step.is_under_way() && !data_.monitor.is_updating();
}

Failure StepProgress::failure() const {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  return data_.monitor.failure();
}

}  // namespace stow
