// Where the library's own threads run and whose memory they use. The threads that call it are the
// caller's: they are never moved.
#pragma once

#include <cstddef>
#include <vector>

namespace stow {

// Threads of ours that start from now on run on these cores only; empty: where their parent may.
// Throws std::system_error where no thread may run on them.
void set_thread_cores(const std::vector<int>& cores);
std::vector<int> thread_cores();

// Counts the changes made by `set_thread_cores`: threads bound at another number must be restarted.
int thread_cores_version();

// Called by each of our threads before it does anything else.
void bind_thread();

// Pages of the range that are touched from now on come from NUMA node `node` while it has room.
// Returns an errno, or 0.
int prefer_node(void* address, std::size_t bytes, int node);

}  // namespace stow
