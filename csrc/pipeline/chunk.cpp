#include "pipeline/chunk.h"

#include <algorithm>

#include "base/checksum.h"

namespace stow {
namespace {

// [Note: Chunk states] Row: from; column: to; in the order of the enum.
constexpr bool kLegal[8][8] = {
    // resident blank  stored reading ready  updating writing failed
    {false, false, false, false, false, false, true, false},   // resident: a commit copies it out
    {false, false, true, false, true, false, false, false},    // blank: zeros need no read
    {false, false, true, true, true, false, false, true},      // stored: ready, for a weight alone
    {false, false, false, false, true, false, false, true},    // reading
    {false, true, true, false, false, true, true, false},      // ready: evicted, or updated
    {true, false, false, false, true, false, true, true},      // updating: or it stays in its slot
    {true, true, true, false, true, false, false, true},       // writing: may stay in its slot
    {false, false, false, false, false, false, false, false},  // failed
};

std::int64_t padded(std::int64_t bytes) {
  return (bytes + kStreamAlign - 1) / kStreamAlign * kStreamAlign;
}

}  // namespace

bool legal(ChunkState from, ChunkState to) {
  return kLegal[static_cast<int>(from)][static_cast<int>(to)];
}

std::int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

Layout::Layout(const ChunkSpec& spec) {
  StreamSpec specs[kMaxStreams];
  const Family& family = spec.family;
  streams = streams_of(family.param_dtype, family.format, family.amsgrad, family.ema, specs);
  std::int64_t at = 0;
  for (int k = 0; k <= streams; ++k) {
    Part& part = parts[k];
    if (k < streams) {
      which[k] = specs[k].stream;
      part.width = specs[k].bytes;
      part.per = specs[k].per;
    } else {
      part.width = static_cast<int>(size_of(family.param_dtype));
      part.per = 1;
    }
    part.bytes = padded(part.length(spec.elements));
    part.file_at = at;
    part.slot_at = at + k * (spec.is_small ? 0 : kStagger);
    at += part.bytes;
  }
}

ChunkParts::ChunkParts(const ChunkSpec& spec) : layout(spec) {
  std::size_t segment = 0;
  for (std::int64_t begin = 0; begin < spec.elements; begin += kUpdateBlock) {
    const std::int64_t end = std::min(begin + kUpdateBlock, spec.elements);
    UpdateBlock block{begin, end, pieces.size(), 0, false};
    std::int64_t covered = 0;
    for (; segment < spec.segments.size(); ++segment) {
      const Segment& s = spec.segments[segment];
      const std::int64_t low = std::max(begin, s.chunk_offset);
      const std::int64_t high = std::min(end, s.chunk_offset + s.count);
      if (low < high) {
        pieces.push_back({static_cast<std::int32_t>(segment), low - s.chunk_offset, high - low});
        covered += high - low;
      }
      if (s.chunk_offset + s.count > end) break;  // it continues in the next block
    }
    block.last_piece = pieces.size();
    block.whole = covered == end - begin;
    blocks.push_back(block);
  }
}

std::uint32_t block_checksum(const Layout& layout, const UpdateBlock& block, char* const* streams) {
  std::uint32_t sum = 0;
  for (int k = 0; k < layout.streams; ++k) {
    const Layout::Part& part = layout.parts[k];
    sum = checksum(streams[k] + part.at(block.begin), part.length(block.end - block.begin), sum);
  }
  return sum;
}

}  // namespace stow
