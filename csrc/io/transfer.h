// One read or write of any length between memory and a file.
#pragma once

#include <cstdint>

namespace stow {

enum class Op : std::uint8_t { read, write };

// The `error` of a read that met the end of the file. No errno will do: ENODATA, the nearest, is
// what a drive's unreadable sector looks like.
inline constexpr int kEndOfFile = -1;

// The caller owns a Transfer and keeps it, and the memory it names, until `done` has been called.
// `done` runs on a thread of the engine after the completion queue was read; it must be short and
// must not submit.
struct Transfer {
  int file = -1;
  Op op = Op::read;
  char* data = nullptr;
  std::int64_t length = 0;
  std::int64_t offset = 0;
  void (*done)(Transfer*) = nullptr;
  void* context = nullptr;

  // The result, valid in and after `done`. `error` is an errno or kEndOfFile. Blocks are settled in
  // any order: of several errors the one at the lowest offset is reported.
  int error = 0;
  std::int64_t error_offset = 0;
  std::int64_t error_length = 0;
  std::int64_t moved = 0;

  // The engine's.
  std::int64_t cut = 0;  // bytes handed out as blocks so far
  int in_flight = 0;     // blocks handed out and not settled
  Transfer* next = nullptr;
};

}  // namespace stow
