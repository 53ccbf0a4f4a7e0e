#include "io/direct.h"

// The kernel's own header: the C library's struct statx may be older than these fields. It and
// <sys/stat.h> cannot be included together.
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#ifndef AT_EMPTY_PATH
#define AT_EMPTY_PATH 0x1000
#endif

namespace stow {

std::int64_t direct_alignment([[maybe_unused]] int fd) {
#ifdef STATX_DIOALIGN
  struct statx facts{};
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) != 0) return 0;
  if ((facts.stx_mask & STATX_DIOALIGN) == 0) return 0;
  return std::max(facts.stx_dio_mem_align, facts.stx_dio_offset_align);
#else
  return 0;
#endif
}

}  // namespace stow
