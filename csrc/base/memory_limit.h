// A limit of the process's resident memory, kept where tensors get theirs.
#pragma once

#include <cstddef>

namespace stow {

class CachingAllocator;

// The most bytes that the process may have in memory; 0: no limit.
void set_memory_limit(std::size_t bytes);
std::size_t memory_limit();
// The process's own, and files and shared memory as far as they were mapped when the limit was set.
// 0: unknown.
std::size_t resident_bytes();

// Return whether a new block fits below the limit. Where it does not, freed memory that allocators
// keep goes back to the system first, and may make room.
bool fits_limit(CachingAllocator& allocator, std::size_t bytes);
bool large_fits_limit(CachingAllocator& allocator, std::size_t bytes);  // in pages of cached ones
bool small_fits_limit(CachingAllocator& allocator, std::size_t bytes);  // in the C library's heap

}  // namespace stow
