// A chunk: the piece of optimizer states that moves and is updated as one.
#pragma once

#include <cstdint>
#include <vector>

#include "io/transfer.h"
#include "kernels/kernels.h"

namespace stow {

// Elements that one thread updates at a time, and that have one checksum: all of their streams stay
// in the core's own cache from the verifying pass to the summing one.
inline constexpr std::int64_t kUpdateBlock = 1 << 14;
inline constexpr std::int64_t kStreamAlign = 4096;  // of a stream, in a file and in a slot
// Between streams in a slot, so that they never sit a power of two apart, if they are not in a
// small slot: there they are one transfer.
inline constexpr std::int64_t kStagger = 3 * kStreamAlign;
inline constexpr int kMaxParts = kMaxStreams + 1;  // the streams, and the weight in a commit

// Where a chunk's states are, and which memory they have.
enum class ChunkState : std::uint8_t {
  resident,  // in memory of their own
  blank,     // never updated: zero by definition; no memory
  stored,    // on disk; no memory
  reading,   // a slot, a read in flight
  ready,     // a slot that holds what is on disk
  updating,  // a slot, the kernel is on it
  writing,   // a slot, a write in flight
  failed,    // the disk failed: neither copy can be trusted
};

// A set of parameters whose states have the same streams.
struct Family {
  DType param_dtype = DType::f32;
  StateFormat format = StateFormat::fp32;
  bool amsgrad = false;
  bool ema = false;
};

// A run of one parameter's elements in a chunk.
struct Segment {
  std::int32_t parameter;
  std::int64_t parameter_offset;  // elements
  std::int64_t chunk_offset;      // elements
  std::int64_t count;             // elements
};

// Where a chunk begins on disk; file -1: nowhere.
struct DiskPosition {
  int file = -1;
  std::int64_t offset = 0;
  bool operator==(const DiskPosition&) const = default;
};

struct ChunkSpec {
  Family family;
  std::vector<Segment> segments;  // by chunk_offset; a parameter has one at most
  std::int64_t elements = 0;      // padding included
  DiskPosition place;
  bool is_small = false;  // it passes through the ring of small slots
  // Where each stream stays in memory; null: it does not.
  char* resident[kMaxStreams] = {};
};

// [Note: Extents] On disk a chunk is its streams one after the other, each padded to kStreamAlign,
// and behind them room for the weights of the same elements, which commits write. In a slot the
// same parts stand kStagger further apart, if they are not small.
struct Layout {
  explicit Layout(const ChunkSpec& spec);

  struct Part {
    int width;             // bytes of ...
    int per;               // ... so many elements
    std::int64_t file_at;  // from the chunk's place
    std::int64_t slot_at;  // from the slot's begin
    std::int64_t bytes;    // padded

    std::int64_t at(std::int64_t element) const { return element / per * width; }
    std::int64_t length(std::int64_t elements) const { return (elements + per - 1) / per * width; }
  };

  int streams;
  Stream which[kMaxStreams];
  Part parts[kMaxParts];  // [streams] is the weight

  const Part& weight() const { return parts[streams]; }
  std::int64_t state_bytes() const { return weight().file_at; }
};

// A part of a segment inside one block.
struct BlockPart {
  std::int32_t segment;
  std::int64_t offset;  // elements from the segment's start
  std::int64_t count;
};

// kUpdateBlock elements of a chunk, the last one fewer: what one thread updates, and what has a
// checksum.
struct UpdateBlock {
  std::int64_t begin, end;  // elements of the chunk
  std::size_t first_piece, last_piece;
  bool whole;  // its pieces leave no gap
};

// What blocks and pieces are known to be; written by the thread that updates a block.
struct ChunkChecksums {
  std::vector<std::uint32_t> states;    // per block, of all its streams
  std::vector<std::uint32_t> weights;   // per block, of the weight as a commit wrote it
  std::vector<std::uint32_t> recorded;  // per piece, of the weight that our last update left
  std::vector<char> is_recorded;        // per piece
};

struct ChunkParts {
  explicit ChunkParts(const ChunkSpec& spec);

  Layout layout;
  std::vector<BlockPart> pieces;
  std::vector<UpdateBlock> blocks;
};

bool legal(ChunkState from, ChunkState to);
std::int64_t size_of(DType dtype);

// The checksum of one block over `streams`.
std::uint32_t block_checksum(const Layout& layout, const UpdateBlock& block, char* const* streams);

}  // namespace stow
