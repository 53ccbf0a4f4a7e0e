#include "pipeline/update.h"

#include <atomic>
#include <cstring>
#include <functional>

#include "base/checksum.h"
#include "base/pool.h"

namespace stow {
namespace {

constexpr float kZeros[kUpdateBlock] = {};

class BlockUpdate {
 public:
  BlockUpdate(const UpdateTask& task, const std::vector<StepParameter>& parameters,
              const std::vector<AdamHyper>& hypers, Isa isa)
      : task_(task), parameters_(parameters), hypers_(hypers), isa_(isa) {}

  // While the block is in the cache. False: the states are not what was written.
  bool run(std::int64_t index) const {
    const UpdateBlock& block = task_.parts.blocks[index];
    const Layout& layout = task_.parts.layout;
    if (task_.phase != UpdatePhase::after) {
      if (task_.states == SlotStates::unverified &&
          block_checksum(layout, block, task_.memory.states) != task_.checksums.states[index]) {
        return false;
      }
      if (task_.states == SlotStates::zero && !task_.idle) clear(block);
      if (task_.phase == UpdatePhase::before) return true;
    }
    if (!task_.idle) {
      for (std::size_t p = block.first_piece; p < block.last_piece; ++p) update(p);
    }
    if (task_.sum)
      task_.checksums.states[index] = block_checksum(layout, block, task_.memory.states);
    if (task_.memory.copy[0] != nullptr) copy_states(block);
    if (task_.memory.weight != nullptr) capture(index, block);
    return true;
  }

 private:
  void clear(const UpdateBlock& block) const {
    for (int k = 0; k < task_.parts.layout.streams; ++k) {
      const Layout::Part& part = task_.parts.layout.parts[k];
      std::memset(task_.memory.states[k] + part.at(block.begin), 0,
                  part.length(block.end - block.begin));
    }
  }

  void update(std::size_t index) const {
    const BlockPart& piece = task_.parts.pieces[index];
    const Segment& segment = task_.spec.segments[piece.segment];
    const StepParameter& parameter = parameters_[segment.parameter];
    const SegmentGradient& gradient = task_.gradients[piece.segment];
    if (gradient.data == nullptr && task_.missed.count == 0) return;
    const Family& family = task_.spec.family;
    AdamArgs args{};
    args.first = segment.parameter_offset + piece.offset;
    args.param = static_cast<char*>(parameter.param) + args.first * size_of(family.param_dtype);
    args.n = piece.count;
    if (parameter.backup != nullptr) {
      const std::int64_t width = size_of(family.param_dtype);
      std::memcpy(static_cast<char*>(parameter.backup) + args.first * width, args.param,
                  args.n * width);
    }
    if (task_.phase == UpdatePhase::both) compute(args, piece);
    // An fp32 weight is its own master: writes by others need not be detected.
    if (family.param_dtype == DType::f32) return;
    task_.checksums.recorded[index] = checksum(args.param, 2 * piece.count, 0);
    task_.checksums.is_recorded[index] = 1;
  }

  void compute(AdamArgs& args, const BlockPart& piece) const {
    const Segment& segment = task_.spec.segments[piece.segment];
    const StepParameter& parameter = parameters_[segment.parameter];
    const SegmentGradient& gradient = task_.gradients[piece.segment];
    const Family& family = task_.spec.family;
    const Layout& layout = task_.parts.layout;
    for (int k = 0; k < layout.streams; ++k) {
      args.states[static_cast<int>(layout.which[k])] =
          task_.memory.states[k] + layout.parts[k].at(segment.chunk_offset + piece.offset);
    }
    args.param_dtype = family.param_dtype;
    args.format = family.format;
    args.amsgrad = family.amsgrad;
    args.ema = family.ema;
    args.grad = kZeros;
    args.grad_dtype = DType::f32;
    for (std::size_t k = 0; k < task_.missed.count; ++k) {
      args.key = task_.missed.first[k].key;
      args.hyper = task_.missed.first[k].hyper;
      adam_update(args, isa_);
    }
    if (gradient.data == nullptr) return;
    args.grad = gradient.data + piece.offset * size_of(gradient.dtype);
    args.grad_dtype = gradient.dtype;
    args.key = parameter.key;
    args.seed_master = parameter.seed_master;
    args.hyper = hypers_[parameter.hyper];
    adam_update(args, isa_);
  }

  void copy_states(const UpdateBlock& block) const {
    for (int k = 0; k < task_.parts.layout.streams; ++k) {
      const Layout::Part& part = task_.parts.layout.parts[k];
      const std::int64_t at = part.at(block.begin);
      std::memcpy(task_.memory.copy[k] + at, task_.memory.states[k] + at,
                  part.length(block.end - block.begin));
    }
  }

  void capture(std::int64_t index, const UpdateBlock& block) const {
    const std::int64_t width = task_.parts.layout.weight().width;
    char* out = task_.memory.weight;
    if (!block.whole) std::memset(out + block.begin * width, 0, (block.end - block.begin) * width);
    for (std::size_t p = block.first_piece; p < block.last_piece; ++p) {
      const BlockPart& piece = task_.parts.pieces[p];
      const Segment& segment = task_.spec.segments[piece.segment];
      const char* from = static_cast<const char*>(parameters_[segment.parameter].param);
      std::memcpy(out + (segment.chunk_offset + piece.offset) * width,
                  from + (segment.parameter_offset + piece.offset) * width, piece.count * width);
    }
    task_.checksums.weights[index] =
        checksum(out + block.begin * width, (block.end - block.begin) * width, 0);
  }

  const UpdateTask& task_;
  const std::vector<StepParameter>& parameters_;
  const std::vector<AdamHyper>& hypers_;
  Isa isa_;
};

}  // namespace

std::int64_t update_chunk(const UpdateTask& task, const std::vector<StepParameter>& parameters,
                          const std::vector<AdamHyper>& hypers, Isa isa, int threads) {
  const BlockUpdate update(task, parameters, hypers, isa);
  const auto blocks = static_cast<std::int64_t>(task.parts.blocks.size());
  std::atomic<std::int64_t> damaged{blocks};
  const auto body = [&](std::int64_t index) {
    if (update.run(index)) return;
    std::int64_t first = damaged.load();
    while (index < first && !damaged.compare_exchange_weak(first, index)) {
    }
  };
  // By reference: the capture is too large for std::function to hold without allocating.
  pool().run(blocks, std::cref(body), threads);
  return damaged.load() == blocks ? -1 : damaged.load();
}

bool record_segment(const ChunkSpec& spec, const ChunkParts& parts, ChunkChecksums& checksums,
                    std::int32_t segment, const void* weight, bool compare) {
  const std::int64_t width = parts.layout.weight().width;
  for (std::size_t p = 0; p < parts.pieces.size(); ++p) {
    const BlockPart& piece = parts.pieces[p];
    if (piece.segment != segment) continue;
    const std::int64_t first = spec.segments[segment].parameter_offset + piece.offset;
    const std::uint32_t sum =
        checksum(static_cast<const char*>(weight) + first * width, piece.count * width, 0);
    if (compare) {
      if (checksums.is_recorded[p] == 0 || checksums.recorded[p] != sum) return false;
    } else {
      checksums.recorded[p] = sum;
      checksums.is_recorded[p] = 1;
    }
  }
  return true;
}

}  // namespace stow
