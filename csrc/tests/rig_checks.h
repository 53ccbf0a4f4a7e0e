// What must hold of a rig: memory and disk are what the flat training says.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/checksum.h"
#include "pipeline_rig.h"

namespace stow {

// While idle: every chunk's states are those of the flat arrays.
inline bool states_agree(Rig& rig) {
  for (int c = 0; c < rig.file().chunks(); ++c) {
    const Layout layout(rig.file().spec(c));
    const ChunkState state = rig.pipeline().ledger().state(c);
    const std::vector<char> bytes = state == ChunkState::stored
                                        ? rig.file().read(rig.pipeline().ledger().place(c), layout)
                                        : std::vector<char>();
    for (const Segment& s : rig.file().spec(c).segments) {
      for (int k = 0; k < layout.streams; ++k) {
        const Layout::Part& part = layout.parts[k];
        const char* wanted =
            rig.training().at(s.parameter).states[static_cast<int>(layout.which[k])].data() +
            part.at(s.parameter_offset);
        const std::int64_t length = part.length(s.count);
        bool same = false;
        if (state == ChunkState::resident) {
          same = std::memcmp(rig.file().spec(c).resident[k] + part.at(s.chunk_offset), wanted,
                             length) == 0;
        } else if (state == ChunkState::stored) {
          same = std::memcmp(&bytes[part.file_at + part.at(s.chunk_offset)], wanted, length) == 0;
        } else if (state == ChunkState::blank) {
          same = std::all_of(wanted, wanted + length, [](char byte) { return byte == 0; });
        }
        if (!same) return false;
      }
    }
  }
  return true;
}

// Whether the chunk's place holds its states, wherever they are now, and its weights.
inline bool on_disk(Rig& rig, int number) {
  const ChunkParts parts(rig.file().spec(number));
  const Layout& layout = parts.layout;
  const std::vector<char> bytes = rig.file().read(rig.pipeline().ledger().place(number), layout);
  const ChunkChecksums& checksums = rig.pipeline().ledger().checksums(number);
  char* streams[kMaxStreams] = {};
  for (int k = 0; k < layout.streams; ++k) {
    streams[k] = const_cast<char*>(bytes.data()) + layout.parts[k].file_at;
  }
  const Layout::Part& weight = layout.weight();
  for (std::size_t b = 0; b < parts.blocks.size(); ++b) {
    const UpdateBlock& block = parts.blocks[b];
    const char* at = &bytes[weight.file_at + weight.at(block.begin)];
    const std::uint32_t sum = checksum(at, weight.length(block.end - block.begin), 0);
    if (!rig.is_reopened() && sum != checksums.weights[b]) return false;
  }
  std::vector<char> gaps(
      bytes.begin() + weight.file_at,
      bytes.begin() + weight.file_at + weight.length(rig.file().spec(number).elements));
  for (const Segment& s : rig.file().spec(number).segments) {
    const auto begin = gaps.begin() + weight.at(s.chunk_offset);
    std::fill(begin, begin + weight.length(s.count), 0);
  }
  if (std::any_of(gaps.begin(), gaps.end(), [](char byte) { return byte != 0; })) return false;
  const bool blank = rig.pipeline().ledger().state(number) == ChunkState::blank;
  if (!blank && !rig.pipeline().ledger().intact(number, streams)) return false;
  for (const Segment& s : rig.file().spec(number).segments) {
    const TrainedParameter& it = rig.training().at(s.parameter);
    if (std::memcmp(&bytes[weight.file_at + weight.at(s.chunk_offset)],
                    &it.weight[weight.at(s.parameter_offset)], weight.length(s.count)) != 0) {
      return false;
    }
    for (int k = 0; k < layout.streams && !blank; ++k) {
      const Layout::Part& part = layout.parts[k];
      if (std::memcmp(&bytes[part.file_at + part.at(s.chunk_offset)],
                      &it.states[static_cast<int>(layout.which[k])][part.at(s.parameter_offset)],
                      part.length(s.count)) != 0) {
        return false;
      }
    }
  }
  return true;
}

// While idle: what the pipeline says is on disk, states and weights of now, is there.
inline bool captures_agree(Rig& rig) {
  for (int c = 0; c < rig.file().chunks(); ++c) {
    if (rig.pipeline().ledger().captured(c) && !on_disk(rig, c)) return false;
  }
  return true;
}

inline bool all_captured(Rig& rig) {
  for (int c = 0; c < rig.file().chunks(); ++c) {
    if (!rig.pipeline().ledger().captured(c)) return false;
  }
  return true;
}

inline void check_all(Rig& rig) {
  CHECK(rig.pipeline().quiesce().error == 0);
  CHECK(rig.pipeline().counters().slots_in_use == 0);
  CHECK(rig.training().agrees());
  CHECK(states_agree(rig));
}

}  // namespace stow
