// The checksum of everything that is kept on disk.
#pragma once

#include <cstdint>

namespace stow {

// [Note: The checksum] Four CRC32C (Castagnoli, reflected, no final inversion) side by side: the
// 8-byte word i of the bytes goes to number i % 4, what is left at the end byte by byte to number
// 0; then the others are taken through number 0 in order, as upper halves of words. Number k begins
// with ~seed + k. One CRC alone waits for itself (three cycles a word); four keep the unit busy.
// The same bits with and without the processor's instruction. Passing one answer on as the next
// one's seed chains ranges.
std::uint32_t checksum(const void* data, std::int64_t nbytes, std::uint32_t seed);

// Of bytes that stay in this process's files: the checksum of the checksums of blocks of 1 MiB.
// From memory one thread reads half of what two do, so blocks are divided among the team that torch
// computes with ([Note: torch's team]), where the calling thread may have it.
std::uint32_t checksum_by_blocks(const void* data, std::int64_t nbytes);

// `checksum` without the processor's instruction; the tests compare.
std::uint32_t checksum_portable(const void* data, std::int64_t nbytes, std::uint32_t seed);

}  // namespace stow
