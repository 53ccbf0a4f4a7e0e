#include "io/engine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <system_error>

namespace stow {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr int kMaxStalls = 16;

std::int64_t round_up(std::int64_t value, std::int64_t align) {
  return (value + align - 1) / align * align;
}

bool aligned(const void* pointer, std::int64_t align) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(align) == 0;
}

}  // namespace

BounceBuffers::BounceBuffers(int count, std::int64_t block_bytes)
    : stride_(round_up(block_bytes, kPage) + kPage) {
  bytes_ = stride_ * count;
  void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "mmap of bounce buffers");
  base_ = static_cast<char*>(base);
  madvise(base_, bytes_, MADV_DONTFORK);
}

BounceBuffers::~BounceBuffers() { munmap(base_, bytes_); }

Engine::Engine(const EngineOptions& options) : options_(options), owner_(getpid()) {}

bool Engine::in_owner() const { return getpid() == owner_; }

int Engine::add_file(const FileFacts& facts) {
  std::lock_guard lock(mutex_);
  files_.push_back(facts);
  return static_cast<int>(files_.size()) - 1;
}

EngineCounters Engine::counters() const {
  std::lock_guard lock(mutex_);
  return counters_;
}

void Engine::submit(Transfer* transfer) {
  {
    std::lock_guard lock(mutex_);
    if (transfer->file < 0 || transfer->file >= static_cast<int>(files_.size())) {
      throw std::invalid_argument("no file has the number " + std::to_string(transfer->file));
    }
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() - (1 << 30);
    if (transfer->offset < 0 || transfer->length < 0 ||
        transfer->offset > kMost - transfer->length) {
      throw std::invalid_argument("no bytes are at offset " + std::to_string(transfer->offset));
    }
    transfer->cut = 0;
    transfer->in_flight = 0;
    transfer->moved = 0;
    transfer->error = 0;
    transfer->next = nullptr;
    (tail_ == nullptr ? head_ : tail_->next) = transfer;
    tail_ = transfer;
    ++pending_;
  }
  wake();
}

bool Engine::take(Block* block, char* bounce) {
  Transfer* t = head_;
  if (t == nullptr) return false;
  const FileFacts& file = files_[static_cast<std::size_t>(t->file)];
  const std::int64_t begin = t->offset + t->cut;
  const std::int64_t skip = t->op == Op::read && t->length > 0 ? begin % file.align : 0;
  std::int64_t wanted = std::min(options_.block_bytes - skip, t->length - t->cut);
  if (t->op == Op::read && aligned(t->data + t->cut - skip, file.align)) {
    // Blocks of their own for the two ends, which need a copy: the middle needs none.
    if (skip > 0) {
      wanted = std::min(file.align - skip, wanted);
    } else if (wanted > file.align) {
      wanted -= wanted % file.align;
    }
  }
  const std::int64_t length = round_up(skip + wanted, file.align);
  const bool needs_bounce = length != wanted || !aligned(t->data + t->cut, file.align);
  if (needs_bounce && bounce == nullptr) return false;
  *block = Block{};
  block->transfer = t;
  block->fd = file.fd;
  block->op = t->op;
  block->align = file.align;
  block->drop_cache = file.drop_cache;
  block->skip = skip;
  block->wanted = wanted;
  block->length = length;
  block->offset = begin - skip;
  block->data = t->data + t->cut;
  if (needs_bounce) {
    block->user = block->data;
    block->data = bounce;
    ++counters_.bounced;
  }
  t->cut += wanted;
  ++t->in_flight;
  ++counters_.blocks;
  if (t->cut >= t->length) {
    head_ = t->next;
    if (head_ == nullptr) tail_ = nullptr;
    t->next = nullptr;
  }
  return true;
}

void Engine::fill(const Block& block) {
  if (block.user == nullptr || block.op != Op::write) return;
  std::memcpy(block.data, block.user, block.wanted);
  std::memset(block.data + block.wanted, 0, block.length - block.wanted);
}

void Engine::empty(const Block& block, std::int64_t result) {
  if (block.user == nullptr || block.op != Op::read) return;
  if (result >= 0 && block.settled + result >= block.skip + block.wanted) {
    std::memcpy(block.user, block.data + block.skip, block.wanted);
  }
}

int Engine::leave_no_cache(const Block& block) {
  if (block.op == Op::write) {
    constexpr unsigned kWriteAndWait =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    // EINVAL, ENOSYS, ESPIPE: this cannot be done here, which loses no byte.
    if (sync_file_range(block.fd, block.offset, block.length, kWriteAndWait) != 0 &&
        errno != EINVAL && errno != ENOSYS && errno != ESPIPE) {
      return errno;
    }
  }
  posix_fadvise(block.fd, block.offset, block.length, POSIX_FADV_DONTNEED);
  return 0;
}

bool Engine::settle(Block* block, std::int64_t result, Transfer** finished) {
  if (result == -EINTR || result == -EAGAIN) {
    ++counters_.resubmitted;
    return ++block->stalls > kMaxStalls ? fail(block, static_cast<int>(-result), finished) : false;
  }
  if (result < 0) return fail(block, static_cast<int>(-result), finished);
  // The padding of a read may lie past the end of the file; that of a write must be written.
  const std::int64_t needed = block->op == Op::read ? block->skip + block->wanted : block->length;
  if (block->settled + result < needed) {
    // Only whole units count: a direct transfer can go on at a multiple of the alignment alone.
    result -= result % block->align;
    if (result == 0 && ++block->stalls > kMaxStalls) {
      // A read at the end of the file answers 0 for ever; a write that moves nothing has no other
      // name either.
      return fail(block, block->op == Op::read ? kEndOfFile : EIO, finished);
    }
    if (result > 0) block->stalls = 0;
    block->settled += result;
    ++counters_.resubmitted;
    return false;
  }
  block->settled += result;
  if (block->op == Op::write) {
    write_log_.add(block->transfer->file, block->offset, block->data, block->length);
  }
  return finish(block, finished);
}

bool Engine::fail(Block* block, int error, Transfer** finished) {
  Transfer* t = block->transfer;
  const std::int64_t offset = block->offset + block->settled;
  if (t->error == 0 || offset < t->error_offset) {
    t->error = error;
    t->error_offset = offset;
    t->error_length = block->length - block->settled;
  }
  block->wanted = 0;  // nothing of it counts as moved
  return finish(block, finished);
}

bool Engine::finish(Block* block, Transfer** finished) {
  Transfer* t = block->transfer;
  t->moved += block->wanted;
  (block->op == Op::read ? counters_.bytes_read : counters_.bytes_written) += block->settled;
  --t->in_flight;
  if (t->error != 0 && t->cut < t->length) {
    // The rest of a failed transfer is not started: it is the head of the queue, because only heads
    // are cut.
    t->cut = t->length;
    head_ = t->next;
    if (head_ == nullptr) tail_ = nullptr;
  }
  if (t->in_flight == 0 && t->cut >= t->length) {
    t->next = *finished;
    *finished = t;
  }
  return true;
}

void Engine::notify(Transfer* finished) {
  std::int64_t notified = 0;
  while (finished != nullptr) {
    Transfer* next = finished->next;
    finished->done(finished);  // from here on the transfer is the caller's
    finished = next;
    ++notified;
  }
  if (notified == 0) return;
  std::lock_guard lock(mutex_);
  pending_ -= notified;
  if (pending_ == 0) all_notified_.notify_all();
}

void Engine::drain() {
  std::unique_lock lock(mutex_);
  all_notified_.wait(lock, [this] { return pending_ == 0; });
}

}  // namespace stow
