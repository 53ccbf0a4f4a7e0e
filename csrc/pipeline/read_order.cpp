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

void ReadOrder::restart(std::size_t slots, bool newest_first) {
  slots_ = slots;
  newest_first_ = newest_first;
  ready_to_read_.clear();
  ready_to_read_.set_newest_first(newest_first);
  current_ = numbers_;
  next_ = 0;
  reached_ = -1;
}

void ReadOrder::keep_participants() {
  current_.erase(std::remove_if(current_.begin(), current_.end(),
                                [&](int n) { return chunks_.at(n).stage == StepStage::out; }),
                 current_.end());
  for (std::size_t k = 0; k < current_.size(); ++k) {
    chunks_.at(current_[k]).turn = static_cast<int>(k);
  }
}

std::size_t ReadOrder::slots_ahead() const {
  return newest_first_ ? slots_ - std::max<std::size_t>(1, slots_ / 4) : 0;
}

PipelineChunk* ReadOrder::next(const CurrentStep& step, bool ahead) {
  const bool stepping = step.is_under_way();
  if (stepping) {
    PipelineChunk* due = ahead ? next_due(step) : nullptr;
    if (due != nullptr) return due;
    while (has_ready() && ready_to_read_.front().stage != StepStage::waiting) ready_to_read_.pop();
    if (has_ready() && ready_to_read_.front().needs_slot()) return &ready_to_read_.front();
  }
  for (; next_ < current_.size(); ++next_) {
    PipelineChunk& chunk = chunks_.at(current_[next_]);
    if (stepping) {
      if (chunk.stage != StepStage::waiting || step.holds_back(chunk)) continue;
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

PipelineChunk* ReadOrder::next_due(const CurrentStep& step) {
  if (reached_ < 0) return nullptr;  // in turn, until gradients come
  const int next = reached_ + 1, most = static_cast<int>(slots_);
  const int end = std::min(next + most, static_cast<int>(current_.size()));
  for (int k = end - 1; k >= std::max(0, next - most); --k) {
    PipelineChunk& chunk = chunks_.at(current_[k]);
    const bool is_due = chunk.stage == StepStage::waiting && chunk.gradients_due != 0;
    const bool can_be_read = chunk.state == ChunkState::stored && !chunk.spec.is_small;
    if (is_due && can_be_read && !step.holds_back(chunk)) return &chunk;
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

PipelineChunk* ReadOrder::to_evict(const CurrentStep& step, int last) const {
  PipelineChunk* found = nullptr;
  for (int number : numbers_) {
    PipelineChunk& chunk = chunks_.at(number);
    if (chunk.state != ChunkState::ready || chunk.spec.is_small) continue;
    if (chunk.stage == StepStage::out) return &chunk;
    if (chunk.stage != StepStage::admitted) continue;
    if (step.holds_back(chunk)) return &chunk;
    if (chunk.gradients_due != 0 && chunk.turn <= last) found = &chunk;
  }
  return found;
}

}  // namespace stow
