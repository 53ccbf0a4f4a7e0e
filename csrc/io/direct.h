// What a filesystem wants of direct I/O.
#pragma once

#include <cstdint>

namespace stow {

// The alignment that memory, offsets and lengths of direct transfers on `fd` need, in bytes; 0
// where the filesystem or the kernel (older than 6.1) does not report it.
std::int64_t direct_alignment(int fd);

}  // namespace stow
