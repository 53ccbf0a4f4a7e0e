#include "pipeline/deferred_updates.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "base/pool.h"

namespace stow {
namespace {

// All chunks catch up when the log has so many updates: what a step may have to make up for is
// bounded, for a read of each state in so many steps.
constexpr std::size_t kMostUpdates = 256;
constexpr std::int64_t kGradientsPerTask = 64;  // chunks whose gradients one thread looks at

// Whether all bits are zero. A negative zero is a gradient.
bool all_zero(const char* data, std::int64_t bytes) {
  constexpr std::int64_t kStride = 512;
  for (; bytes >= kStride; data += kStride, bytes -= kStride) {
    std::uint64_t words[kStride / 8];
    std::memcpy(words, data, kStride);
    std::uint64_t any = 0;
    for (const std::uint64_t word : words) any |= word;
    if (any != 0) return false;
  }
  char any = 0;
  for (std::int64_t k = 0; k < bytes; ++k) any = static_cast<char>(any | data[k]);
  return any == 0;
}

}  // namespace

void DeferredUpdates::set(PipelineChunk& chunk, bool defers) {
  if (chunk.spec.segments.size() != 1) {
    throw std::invalid_argument("a chunk that defers has one parameter");
  }
  chunk.defers = defers;
  chunk.is_untouched = false;
  logs_[chunk.spec.segments.front().parameter];
}

void DeferredUpdates::inspect(int parameter, const void* grad, DType dtype) {
  if (grad == nullptr || logs_.count(parameter) == 0) return;
  const std::vector<int>& numbers = chunks_.of(parameter);
  const auto total = static_cast<std::int64_t>(numbers.size());
  const auto body = [&](std::int64_t task) {
    const std::int64_t end = std::min(total, (task + 1) * kGradientsPerTask);
    for (std::int64_t k = task * kGradientsPerTask; k < end; ++k) {
      PipelineChunk& chunk = chunks_.at(numbers[k]);
      if (!chunk.defers) continue;
      const Segment& segment = chunk.spec.segments.front();
      const std::int64_t width = size_of(dtype);
      const char* data = static_cast<const char*>(grad) + segment.parameter_offset * width;
      chunk.is_untouched = all_zero(data, segment.count * width);
    }
  };
  pool().run((total + kGradientsPerTask - 1) / kGradientsPerTask, std::cref(body), 0);
}

void DeferredUpdates::record(int parameter, const StepParameter& row, const AdamHyper& hyper) {
  const auto found = logs_.find(parameter);
  if (found == logs_.end()) return;
  Log& log = found->second;
  if (lagging(parameter) == 0) {
    log.updates.clear();
    for (const int number : chunks_.of(parameter)) chunks_.at(number).updates_done = 0;
  }
  log.updates.push_back({hyper, row.key});
  // A new master begins as the weight, so it is not zero.
  log.is_whole = row.seed_master || log.updates.size() >= kMostUpdates;
}

bool DeferredUpdates::leaves_out(const PipelineChunk& chunk) const {
  if (!chunk.defers || !chunk.is_untouched) return false;
  return !logs_.at(chunk.spec.segments.front().parameter).is_whole;
}

MissedUpdates DeferredUpdates::missed(const PipelineChunk& chunk, bool has_gradient) const {
  const auto found = logs_.find(chunk.spec.segments.front().parameter);
  if (found == logs_.end() || chunk.spec.segments.size() != 1) return {};
  const std::vector<MissedUpdate>& updates = found->second.updates;
  const std::size_t end = updates.size() - (has_gradient ? 1 : 0);
  if (chunk.updates_done >= end) return {};
  return {updates.data() + chunk.updates_done, end - chunk.updates_done};
}

void DeferredUpdates::catch_up(PipelineChunk& chunk) const {
  const auto found = logs_.find(chunk.spec.segments.front().parameter);
  if (found != logs_.end()) chunk.updates_done = found->second.updates.size();
}

std::int64_t DeferredUpdates::lagging(int parameter) const {
  std::int64_t found = 0;
  for (const int number : chunks_.of(parameter)) found += lags(chunks_.at(number)) ? 1 : 0;
  return found;
}

}  // namespace stow
