// Asynchronous file I/O: transfers of any length go in, are cut into blocks, kept in flight at a
// depth, and come out with their result read.
//
// [Note: Three steps] Submitting, reaping and callbacks are separate: a backend settles every block
// that the kernel has completed under the engine's lock, and calls `Transfer::done` after it has
// released the lock. So `done` may take the caller's own lock, under which the caller may submit.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/faults.h"
#include "io/transfer.h"
#include "io/write_log.h"

namespace stow {

struct EngineOptions {
  int depth = 32;                      // blocks in flight
  std::int64_t block_bytes = 1 << 20;  // a transfer is cut at multiples of this
  int drives = 1;                      // that its files are on
};

struct EngineCounters {
  std::int64_t bytes_read;
  std::int64_t bytes_written;
  std::int64_t blocks;
  std::int64_t resubmitted;  // blocks that came back short or interrupted
  std::int64_t bounced;      // blocks that went through an aligned buffer of the engine's
};

// [Note: Alignment] O_DIRECT wants memory, offset and length at multiples of the file's `align`.
// Offsets of writes must be so; a block whose memory or length is not goes through an aligned
// buffer, and its tail is padded (a write pads the file with zeros up to the next multiple). A read
// may begin anywhere: its first block begins at the multiple below, and ends where all others are
// at multiples again. Where its memory is at the same place of a unit as the file, one unit at each
// end goes through the buffer, and what is between does not. A buffered file has align 1.
struct FileFacts {
  int fd;
  std::int64_t align;
  bool drop_cache;  // buffered: flush and drop the pages of each block once it is settled
};

struct Block {
  Transfer* transfer = nullptr;
  int fd = -1;
  Op op = Op::read;
  bool drop_cache = false;
  std::int64_t align = 1;
  char* data = nullptr;      // the memory the kernel sees
  std::int64_t length = 0;   // of the request to the kernel (padded)
  std::int64_t offset = 0;   // in the file
  char* user = nullptr;      // set where `data` is a bounce buffer
  std::int64_t skip = 0;     // bytes before the first one of the transfer; of reads alone
  std::int64_t wanted = 0;   // bytes of the transfer in this block
  std::int64_t settled = 0;  // bytes that the kernel has moved
  int stalls = 0;            // answers in a row without progress
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* backend() const = 0;

  // Waits until `done` of every transfer submitted before has been called.
  void drain();

  int add_file(const FileFacts& facts);
  void submit(Transfer* transfer);

  EngineCounters counters() const;
  FaultPlan& faults() { return faults_; }
  WriteLog& write_log() { return write_log_; }
  const EngineOptions& options() const { return options_; }
  bool in_owner() const;  // false in a forked child, where the engine's threads do not exist

 protected:
  explicit Engine(const EngineOptions& options);

  virtual void wake() = 0;  // transfers were queued

  // A block's life. Under mutex_: `take` cuts the next one off the queue; `bounce` is an aligned
  // buffer of block_bytes + 4096 for it (false: nothing is queued, or the next block needs a buffer
  // and `bounce` is null). `settle` reads one result of the kernel (bytes, or -errno): true when
  // the block is over, false when the rest of it must be started again; a transfer that is over is
  // put on `finished`. Not under mutex_: `fill` before a block's first start, `empty` before each
  // settle, `notify` after the last.
  bool take(Block* block, char* bounce);
  static void fill(const Block& block);
  static void empty(const Block& block, std::int64_t result);
  // For blocks with `drop_cache`, after each result: written bytes are flushed and dropped from the
  // page cache. Blocks; returns the errno of a failed flush, which is reported nowhere else.
  static int leave_no_cache(const Block& block);
  bool settle(Block* block, std::int64_t result, Transfer** finished);
  void notify(Transfer* finished);

  bool queued() const { return head_ != nullptr; }

  mutable std::mutex mutex_;
  EngineOptions options_;
  FaultPlan faults_;

 private:
  WriteLog write_log_;
  bool fail(Block* block, int error, Transfer** finished);
  bool finish(Block* block, Transfer** finished);

  std::vector<FileFacts> files_;
  Transfer* head_ = nullptr;
  Transfer* tail_ = nullptr;
  std::int64_t pending_ = 0;
  std::condition_variable all_notified_;
  EngineCounters counters_{};
  pid_t owner_;
};

// Throws std::system_error with the errno of the call that failed (ENOSYS, EPERM, ENOMEM ...).
std::unique_ptr<Engine> make_uring_engine(const EngineOptions& options);
std::unique_ptr<Engine> make_threads_engine(const EngineOptions& options);

// An aligned mapping of the engine's own for bounce buffers; MADV_DONTFORK, because the kernel may
// write to it.
class BounceBuffers {
 public:
  BounceBuffers(int count, std::int64_t block_bytes);
  ~BounceBuffers();
  BounceBuffers(const BounceBuffers&) = delete;
  BounceBuffers& operator=(const BounceBuffers&) = delete;
  char* at(int index) const { return base_ + index * stride_; }

 private:
  char* base_;
  std::int64_t stride_;
  std::int64_t bytes_;
};

}  // namespace stow
