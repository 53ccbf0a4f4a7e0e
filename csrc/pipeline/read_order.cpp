#include "pipeline/read_order.h"

#include <algorithm>
#include <stdexcept>

namespace stow {

void ReadOrder::add(int number) {
  numbers_.push_back(number);
  ready_to_read_.reserve(numbers_.size());
}

void ReadOrder::set(std::vector<int> numbers) {
  std::vector<int> sorted = numbers;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t k = 0; k < sorted.size(); ++k) {
    if (sorted[k] != static_cast<int>(k)) throw std::invalid_argument("set_order: each chunk once");
  }
  if (sorted.size() != chunks_.size()) throw std::invalid_argument("set_order: all chunks");
  numbers_ = std::move(numbers);
  next_ = 0;
}

void ReadOrder::set_next_order() {
  if (alternates()) std::reverse(numbers_.begin(), numbers_.end());
  next_ = 0;
}

void ReadOrder::restart(bool newest_first) {
  ready_to_read_.clear();
  ready_to_read_.set_newest_first(newest_first);
  current_ = numbers_;
  next_ = next_due_ = 0;
}

void ReadOrder::keep_participants() {
  current_.erase(std::remove_if(current_.begin(), current_.end(),
                                [&](int n) { return chunks_.at(n).stage == StepStage::out; }),
                 current_.end());
}

PipelineChunk* ReadOrder::next(const CurrentStep& step, std::size_t ahead) {
  const bool stepping = step.is_under_way();
  if (stepping) {
    if (PipelineChunk* due = next_due(ahead)) return due;
    while (has_ready() && ready_to_read_.front().stage != StepStage::waiting) ready_to_read_.pop();
    if (has_ready() && ready_to_read_.front().needs_slot()) return &ready_to_read_.front();
  }
  for (; next_ < current_.size(); ++next_) {
    PipelineChunk& chunk = chunks_.at(current_[next_]);
    if (stepping) {
      if (chunk.stage != StepStage::waiting) continue;
      // There is nothing to read ahead of it, or it is perhaps not needed.
      if ((chunk.blank() || chunk.defers) && chunk.gradients_due != 0) continue;
    } else if (chunk.state != ChunkState::stored && chunk.state != ChunkState::writing) {
      continue;
    }
    if (!stepping && chunk.defers) continue;
    // The end of its write sees to it.
    if (chunk.has_own_memory() && chunk.state == ChunkState::writing) continue;
    return chunk.needs_slot() ? &chunk : nullptr;
  }
  return nullptr;
}

PipelineChunk* ReadOrder::next_due(std::size_t ahead) {
  if (ahead == 0) return nullptr;
  const auto at = [this](std::size_t k) -> PipelineChunk& { return chunks_.at(current_[k]); };
  while (next_due_ < current_.size() && at(next_due_).gradients_due == 0) ++next_due_;
  for (std::size_t k = std::min(next_due_ + ahead, current_.size()); k > next_due_; --k) {
    PipelineChunk& chunk = at(k - 1);
    const bool can_be_read = chunk.state == ChunkState::stored && !chunk.spec.is_small;
    if (can_be_read && chunk.stage == StepStage::waiting && chunk.gradients_due != 0) return &chunk;
  }
  return nullptr;
}

void ReadOrder::pop(const PipelineChunk& chunk) {
  if (has_ready() && &ready_to_read_.front() == &chunk) ready_to_read_.pop();
}

bool ReadOrder::has_more_than(std::size_t slots) const {
  std::size_t found = 0;
  for (std::size_t k = next_; k < current_.size() && found <= slots; ++k) {
    const PipelineChunk& chunk = chunks_.at(current_[k]);
    found += chunk.stage == StepStage::waiting && chunk.needs_slot() ? 1 : 0;
  }
  return found > slots;
}

PipelineChunk* ReadOrder::to_evict(bool may_wait) const {
  PipelineChunk* last = nullptr;
  for (int number : numbers_) {
    PipelineChunk& chunk = chunks_.at(number);
    if (chunk.state != ChunkState::ready || chunk.spec.is_small) continue;
    if (chunk.stage == StepStage::out) return &chunk;
    const bool waits = chunk.stage == StepStage::admitted && chunk.gradients_due != 0;
    if (waits && may_wait) last = &chunk;
  }
  return last;
}

}  // namespace stow
