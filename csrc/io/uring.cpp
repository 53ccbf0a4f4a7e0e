// The io_uring backend: raw system calls over the kernel's own header, one thread that owns the
// ring.
//
// [Note: The ring's thread] It alone touches the rings, so they need no lock. It sleeps in one
// place, io_uring_enter, waiting for an answer; a read of an eventfd is always in flight, so that
// `wake` ends that sleep.
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "base/affinity.h"
#include "io/engine.h"

namespace stow {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
// Blocks in flight that go through buffers, as many as the other backend has: with as many as the
// depth, reads of a file whose tensors lie anywhere would hold 32 MiB for good.
constexpr int kBounced = 8;

[[noreturn]] void refuse(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

// The three mappings of a ring, and the pointers into them.
class Rings {
 public:
  explicit Rings(unsigned entries) {
    io_uring_params params{};
    params.flags = IORING_SETUP_CLAMP;
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
    if (fd_ < 0) refuse(errno, "io_uring_setup");
    try {
      map(params);
    } catch (...) {
      close(fd_);
      throw;
    }
  }

  ~Rings() {
    if (sqes_ != nullptr) munmap(sqes_, sqes_bytes_);
    if (ring_ != nullptr) munmap(ring_, ring_bytes_);
    close(fd_);
  }
  Rings(const Rings&) = delete;
  Rings& operator=(const Rings&) = delete;

  // The caller never has more than `entries` requests in flight, so there is always room.
  io_uring_sqe* next_sqe() {
    const unsigned index = sq_local_tail_++ & sq_mask_;
    sq_array_[index] = index;
    std::memset(&sqes_[index], 0, sizeof(io_uring_sqe));
    ++unsubmitted_;
    return &sqes_[index];
  }

  // Submits what was prepared and waits for at least one answer. Interruptions and a full
  // completion queue are not errors: the caller reaps and comes again.
  void enter() {
    std::atomic_ref<unsigned>(*sq_tail_).store(sq_local_tail_, std::memory_order_release);
    const long n =
        syscall(__NR_io_uring_enter, fd_, unsubmitted_, 1U, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (n >= 0) {
      unsubmitted_ -= static_cast<unsigned>(n);
    } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
      refuse(errno, "io_uring_enter");
    }
  }

  template <typename Take>
  void reap(Take take) {
    unsigned head = *cq_head_;
    const unsigned tail = std::atomic_ref<unsigned>(*cq_tail_).load(std::memory_order_acquire);
    for (; head != tail; ++head) {
      const io_uring_cqe& cqe = cqes_[head & cq_mask_];
      take(cqe.user_data, cqe.res);
    }
    std::atomic_ref<unsigned>(*cq_head_).store(head, std::memory_order_release);
  }

 private:
  void map(const io_uring_params& params) {
    if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0)
      refuse(ENOSYS, "io_uring older than Linux 5.4");
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring_bytes_ = std::max(sq_bytes, cq_bytes);
    sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    ring_ = map_at(ring_bytes_, IORING_OFF_SQ_RING);
    sqes_ = reinterpret_cast<io_uring_sqe*>(map_at(sqes_bytes_, IORING_OFF_SQES));
    sq_tail_ = at<unsigned>(params.sq_off.tail);
    sq_array_ = at<unsigned>(params.sq_off.array);
    sq_mask_ = *at<unsigned>(params.sq_off.ring_mask);
    sq_local_tail_ = *sq_tail_;
    cq_head_ = at<unsigned>(params.cq_off.head);
    cq_tail_ = at<unsigned>(params.cq_off.tail);
    cq_mask_ = *at<unsigned>(params.cq_off.ring_mask);
    cqes_ = at<io_uring_cqe>(params.cq_off.cqes);
  }

  char* map_at(std::size_t bytes, off_t offset) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
    if (p == MAP_FAILED) refuse(errno, "mmap of io_uring");
    madvise(p, bytes, MADV_DONTFORK);
    return static_cast<char*>(p);
  }

  template <typename T>
  T* at(unsigned offset) const {
    return reinterpret_cast<T*>(ring_ + offset);
  }

  int fd_ = -1;
  char* ring_ = nullptr;
  std::size_t ring_bytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  std::size_t sqes_bytes_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned sq_local_tail_ = 0;
  unsigned unsubmitted_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
};

class UringEngine final : public Engine {
 public:
  explicit UringEngine(const EngineOptions& options)
      : Engine(options),
        rings_(static_cast<unsigned>(options.depth) + 1),
        bounce_(std::min(options.depth, kBounced), options.block_bytes),
        blocks_(options.depth) {
    event_ = eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) refuse(errno, "eventfd");
    for (int i = options.depth - 1; i >= 0; --i) free_.push_back(i);
    for (int i = std::min(options.depth, kBounced) - 1; i >= 0; --i)
      unused_.push_back(bounce_.at(i));
    again_.reserve(options.depth);
    answers_.reserve(options.depth + 1);
    try {
      thread_ = std::thread([this] { work(); });
    } catch (...) {
      close(event_);
      throw;
    }
  }

  ~UringEngine() override {
    drain();
    stopping_.store(true);
    wake();
    thread_.join();
    close(event_);
  }

  const char* backend() const override { return "uring"; }

 protected:
  void wake() override {
    const std::uint64_t one = 1;
    // An eventfd write of 1 can only fail when 2^64 - 2 wakes are unread.
    [[maybe_unused]] const ssize_t n = write(event_, &one, sizeof one);
  }

 private:
  struct Answer {
    int slot;
    std::int64_t result;
  };

  void work() {
    bind_thread();
    listen();
    while (!stopping_.load()) {
      start_again();
      start_new();
      if (answers_.empty()) {
        rings_.enter();
        rings_.reap([this](std::uint64_t tag, int result) {
          if (tag == kWakeTag) {
            listen();
          } else {
            answers_.push_back({static_cast<int>(tag), result});
          }
        });
      }
      settle_answers();
    }
  }

  void listen() {
    io_uring_sqe* sqe = rings_.next_sqe();
    sqe->opcode = IORING_OP_READ;
    sqe->fd = event_;
    sqe->addr = reinterpret_cast<std::uint64_t>(&event_value_);
    sqe->len = sizeof event_value_;
    sqe->user_data = kWakeTag;
  }

  void start_again() {
    for (const int slot : again_) start(slot);
    again_.clear();
  }

  void start_new() {
    while (!free_.empty()) {
      const int slot = free_.back();
      {
        std::lock_guard lock(mutex_);
        if (!take(&blocks_[slot], unused_.empty() ? nullptr : unused_.back())) return;
      }
      free_.pop_back();
      if (blocks_[slot].user != nullptr) unused_.pop_back();
      fill(blocks_[slot]);
      start(slot);
    }
  }

  void start(int slot) {
    const Block& block = blocks_[slot];
    const FaultEffect fault = faults_.next(block.op);
    if (fault.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(fault.delay_us));
    if (fault.error != 0) {
      answers_.push_back({slot, -fault.error});
      return;
    }
    std::int64_t length = block.length - block.settled;
    if (fault.max_bytes > 0) length = std::min(length, fault.max_bytes);
    io_uring_sqe* sqe = rings_.next_sqe();
    sqe->opcode = block.op == Op::read ? IORING_OP_READ : IORING_OP_WRITE;
    sqe->fd = block.fd;
    sqe->addr = reinterpret_cast<std::uint64_t>(block.data + block.settled);
    sqe->len = static_cast<std::uint32_t>(length);
    sqe->off = static_cast<std::uint64_t>(block.offset + block.settled);
    sqe->user_data = static_cast<std::uint64_t>(slot);
  }

  void settle_answers() {
    if (answers_.empty()) return;
    for (Answer& answer : answers_) {
      const Block& block = blocks_[answer.slot];
      empty(block, answer.result);
      // On this thread, one after the other: where speed matters, such files go to the threads.
      if (block.drop_cache && answer.result > 0) {
        if (const int error = leave_no_cache(block)) answer.result = -error;
      }
    }
    Transfer* finished = nullptr;
    {
      std::lock_guard lock(mutex_);
      for (const Answer& answer : answers_) {
        const Block& block = blocks_[answer.slot];
        const bool over = settle(&blocks_[answer.slot], answer.result, &finished);
        if (over && block.user != nullptr) unused_.push_back(block.data);
        (over ? free_ : again_).push_back(answer.slot);
      }
    }
    answers_.clear();
    notify(finished);
  }

  Rings rings_;
  BounceBuffers bounce_;
  std::vector<Block> blocks_;
  std::vector<int> free_;      // slots of blocks_ not in flight
  std::vector<char*> unused_;  // buffers of bounce_ that no block has
  std::vector<int> again_;     // slots whose rest must be started again
  std::vector<Answer> answers_;
  int event_ = -1;
  std::uint64_t event_value_ = 0;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(const EngineOptions& options) {
  return std::make_unique<UringEngine>(options);
}

}  // namespace stow
