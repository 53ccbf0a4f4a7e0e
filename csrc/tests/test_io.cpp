// Both backends against a reference buffer: any length, any alignment, every fault.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"
#include "io/engine.h"

namespace stow {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kFileBytes = 1 << 20;

// A transfer that one thread waits for.
class Waited {
 public:
  Waited(Engine& engine, int file, Op op, char* data, std::int64_t length, std::int64_t offset) {
    transfer_.file = file;
    transfer_.op = op;
    transfer_.data = data;
    transfer_.length = length;
    transfer_.offset = offset;
    transfer_.context = this;
    transfer_.done = [](Transfer* t) { static_cast<Waited*>(t->context)->finish(); };
    engine.submit(&transfer_);
  }

  const Transfer& wait() {
    std::unique_lock lock(mutex_);
    over_.wait(lock, [this] { return done_; });
    return transfer_;
  }

 private:
  void finish() {
    std::lock_guard lock(mutex_);
    done_ = true;
    over_.notify_all();
  }

  Transfer transfer_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool done_ = false;
};

// A file without a name, direct where the filesystem can.
class Scratch {
 public:
  explicit Scratch(bool may_be_direct = true) {
    const char* folder = std::getenv("TMPDIR");
    std::string path = std::string(folder != nullptr ? folder : "/var/tmp") + "/stow-test-XXXXXX";
    fd_ = mkstemp(path.data());
    CHECK(fd_ >= 0);
    unlink(path.c_str());
    CHECK(ftruncate(fd_, kFileBytes) == 0);
    direct_ = may_be_direct && fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_DIRECT) == 0;
  }
  ~Scratch() { close(fd_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  FileFacts facts() const { return {fd_, direct_ ? kPage : 1, !direct_}; }
  int fd() const { return fd_; }

 private:
  int fd_;
  bool direct_;
};

struct FreeDelete {
  void operator()(char* p) const { std::free(p); }
};
using Memory = std::unique_ptr<char, FreeDelete>;

Memory aligned_memory(std::int64_t bytes) {
  return Memory(static_cast<char*>(std::aligned_alloc(kPage, bytes)));
}

void fill(char* data, std::int64_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  for (std::int64_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(random());
}

using Make = std::unique_ptr<Engine> (*)(const EngineOptions&);

void test_any_length_and_alignment(Make make) {
  const auto engine = make({4, 2 * kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  const Memory sent = aligned_memory(kFileBytes);
  const Memory back = aligned_memory(kFileBytes);
  fill(sent.get(), kFileBytes, 1);
  std::mt19937 random(2);
  for (int round = 0; round < 60; ++round) {
    const std::int64_t shift = round % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % 63);
    const std::int64_t length = static_cast<std::int64_t>(random() % 40000);
    const std::int64_t offset = kPage * static_cast<std::int64_t>(random() % 200);
    Waited write(*engine, file, Op::write, sent.get() + shift, length, offset);
    CHECK(write.wait().error == 0 && write.wait().moved == length);
    std::memset(back.get(), 0x5a, kFileBytes);
    Waited read(*engine, file, Op::read, back.get() + shift, length, offset);
    CHECK(read.wait().error == 0 && read.wait().moved == length);
    CHECK(std::memcmp(sent.get() + shift, back.get() + shift, length) == 0);
    CHECK(back.get()[shift + length] == 0x5a);  // not a byte past the end
  }
}

void test_reads_begin_at_any_byte(Make make, std::int64_t most) {
  const auto engine = make({4, 2 * kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  const Memory sent = aligned_memory(kFileBytes);
  const Memory back = aligned_memory(kFileBytes);
  fill(sent.get(), kFileBytes, 7);
  Waited write(*engine, file, Op::write, sent.get(), kFileBytes, 0);
  CHECK(write.wait().error == 0);
  if (most > 0) engine->faults().add({Op::read, 0, -1, 0, most, 0});
  std::mt19937 random(8);
  for (int round = 0; round < 60; ++round) {
    const std::int64_t offset = static_cast<std::int64_t>(random() % (kFileBytes - 40000));
    const std::int64_t length = 1 + static_cast<std::int64_t>(random() % 40000);
    // The same place in a page as in the file: the middle needs no copy.
    const std::int64_t shift =
        round % 3 == 0 ? offset % kPage : static_cast<std::int64_t>(random() % 63);
    std::memset(back.get(), 0x5a, kFileBytes);
    Waited read(*engine, file, Op::read, back.get() + shift, length, offset);
    CHECK(read.wait().error == 0 && read.wait().moved == length);
    CHECK(std::memcmp(sent.get() + offset, back.get() + shift, length) == 0);
    CHECK(shift == 0 || back.get()[shift - 1] == 0x5a);
    CHECK(back.get()[shift + length] == 0x5a);
  }
  Waited last(*engine, file, Op::read, back.get(), 1, kFileBytes - 1);
  CHECK(last.wait().error == 0 && back.get()[0] == sent.get()[kFileBytes - 1]);
  Waited past(*engine, file, Op::read, back.get(), 2, kFileBytes - 1);
  CHECK(past.wait().error == kEndOfFile);
}

void test_short_transfers_are_finished(Make make, Op op) {
  const auto engine = make({3, 4 * kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  const Memory sent = aligned_memory(16 * kPage);
  const Memory back = aligned_memory(16 * kPage);
  fill(sent.get(), 16 * kPage, 3);
  engine->faults().add({op, 0, -1, 0, kPage, 0});
  Waited write(*engine, file, Op::write, sent.get(), 16 * kPage, 0);
  CHECK(write.wait().error == 0);
  Waited read(*engine, file, Op::read, back.get(), 16 * kPage, 0);
  CHECK(read.wait().error == 0);
  CHECK(std::memcmp(sent.get(), back.get(), 16 * kPage) == 0);
  CHECK(engine->counters().resubmitted == 12);  // four blocks, each three times short
}

void test_errors_name_their_place(Make make, Op op, int error) {
  const auto engine = make({1, kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  const Memory memory = aligned_memory(8 * kPage);
  fill(memory.get(), 8 * kPage, 4);
  engine->faults().add({op, 2, 1, error, 0, 0});
  Waited failed(*engine, file, op, memory.get(), 8 * kPage, 4 * kPage);
  CHECK(failed.wait().error == error);
  CHECK(failed.wait().error_offset == 6 * kPage);
  CHECK(failed.wait().error_length == kPage);
  CHECK(failed.wait().moved < 8 * kPage);
  Waited after(*engine, file, Op::write, memory.get(), 8 * kPage, 0);
  CHECK(after.wait().error == 0);  // the engine goes on
}

void test_of_many_errors_the_lowest_is_told(Make make, Op op) {
  const auto engine = make({4, kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  const Memory memory = aligned_memory(8 * kPage);
  fill(memory.get(), 8 * kPage, 5);
  for (int round = 0; round < 10; ++round) {
    engine->faults().add({op, 0, 1, 0, 0, 2000});  // the first block is late: others fail before it
    engine->faults().add({op, 0, -1, EIO, 0, 0});
    Waited failed(*engine, file, op, memory.get(), 8 * kPage, 4 * kPage);
    CHECK(failed.wait().error == EIO);
    CHECK(failed.wait().error_offset == 4 * kPage);
    engine->faults().clear();
  }
}

void test_interruptions_are_tried_again(Make make) {
  const auto engine = make({2, kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  const Memory memory = aligned_memory(kPage);
  fill(memory.get(), kPage, 5);
  engine->faults().add({Op::write, 0, 3, EINTR, 0, 0});
  Waited some(*engine, file, Op::write, memory.get(), kPage, 0);
  CHECK(some.wait().error == 0);
  engine->faults().add({Op::write, 0, -1, EAGAIN, 0, 0});
  Waited endless(*engine, file, Op::write, memory.get(), kPage, 0);
  CHECK(endless.wait().error == EAGAIN);
}

void test_reading_past_the_end(Make make) {
  const auto engine = make({2, 2 * kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  const Memory memory = aligned_memory(4 * kPage);
  Waited read(*engine, file, Op::read, memory.get(), 4 * kPage, kFileBytes - kPage);
  CHECK(read.wait().error == kEndOfFile);
}

void test_the_tail_of_a_file_that_is_no_multiple(Make make) {
  const auto engine = make({2, 2 * kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  const Memory sent = aligned_memory(4 * kPage);
  const Memory back = aligned_memory(4 * kPage);
  fill(sent.get(), 4 * kPage, 6);
  Waited write(*engine, file, Op::write, sent.get(), 4 * kPage, 0);
  CHECK(write.wait().error == 0);
  CHECK(ftruncate(scratch.fd(), 3 * kPage + 100) == 0);
  Waited read(*engine, file, Op::read, back.get(), 3 * kPage + 100, 0);
  CHECK(read.wait().error == 0);
  CHECK(std::memcmp(sent.get(), back.get(), 3 * kPage + 100) == 0);
  Waited more(*engine, file, Op::read, back.get(), 3 * kPage + 101, 0);
  CHECK(more.wait().error == kEndOfFile);
}

void test_an_unreadable_sector_is_no_end(Make make) {
  const auto engine = make({2, kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  const Memory memory = aligned_memory(kPage);
  engine->faults().add({Op::read, 0, 1, ENODATA, 0, 0});
  Waited read(*engine, file, Op::read, memory.get(), kPage, 0);
  CHECK(read.wait().error == ENODATA);
  CHECK(ENODATA != kEndOfFile);
}

bool is_refused(Engine& engine, int file, std::int64_t length, std::int64_t offset) {
  Transfer transfer;
  transfer.file = file;
  transfer.length = length;
  transfer.offset = offset;
  try {
    engine.submit(&transfer);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_no_such_file(Make make) {
  const auto engine = make({2, kPage});
  for (const int number : {-1, 0, 7}) CHECK(is_refused(*engine, number, 0, 0));
  engine->drain();  // nothing is owed
}

void test_no_such_bytes(Make make) {
  const auto engine = make({2, kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  CHECK(is_refused(*engine, file, -1, 0));
  CHECK(is_refused(*engine, file, 1, -1));
  CHECK(is_refused(*engine, file, 1, kMost));
  CHECK(is_refused(*engine, file, kMost, 1));
  engine->drain();
}

void test_the_page_cache_is_left_empty(Make make) {
  constexpr std::int64_t kPages = kFileBytes / kPage;
  const auto engine = make({4, 16 * kPage});
  const Scratch scratch(false);
  posix_fadvise(scratch.fd(), 0, 0, POSIX_FADV_RANDOM);
  const int file = engine->add_file({scratch.fd(), 1, true});
  const Memory memory = aligned_memory(kFileBytes);
  fill(memory.get(), kFileBytes, 8);
  for (const Op op : {Op::write, Op::read}) {
    Waited moved(*engine, file, op, memory.get(), kFileBytes, 0);
    CHECK(moved.wait().error == 0);
    void* view = mmap(nullptr, kFileBytes, PROT_READ, MAP_SHARED, scratch.fd(), 0);
    std::vector<unsigned char> present(kPages);
    CHECK(mincore(view, kFileBytes, present.data()) == 0);
    munmap(view, kFileBytes);
    CHECK(std::count_if(present.begin(), present.end(), [](auto p) { return p & 1; }) < 16);
  }
}

void test_a_bad_descriptor(Make make) {
  const auto engine = make({2, kPage});
  const int file = engine->add_file({-1, 1, false});
  const Memory memory = aligned_memory(kPage);
  Waited read(*engine, file, Op::read, memory.get(), kPage, 0);
  CHECK(read.wait().error == EBADF);
}

void test_many_threads_submit(Make make) {
  const auto engine = make({8, kPage});
  const Scratch scratch;
  const int file = engine->add_file(scratch.facts());
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const Memory sent = aligned_memory(4 * kPage);
      const Memory back = aligned_memory(4 * kPage);
      for (unsigned round = 0; round < 20; ++round) {
        fill(sent.get(), 4 * kPage, round * 4 + static_cast<unsigned>(t));
        const std::int64_t offset = t * 4 * kPage;
        Waited write(*engine, file, Op::write, sent.get(), 4 * kPage, offset);
        if (write.wait().error != 0) ++wrong;
        Waited read(*engine, file, Op::read, back.get(), 4 * kPage, offset);
        if (read.wait().error != 0) ++wrong;
        if (std::memcmp(sent.get(), back.get(), 4 * kPage) != 0) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

void test_drain_and_teardown_wait(Make make) {
  const Scratch scratch;
  const Memory memory = aligned_memory(32 * kPage);
  fill(memory.get(), 32 * kPage, 7);
  std::atomic<int> told{0};
  std::vector<Transfer> transfers(32);
  {
    const auto engine = make({4, kPage});
    const int file = engine->add_file(scratch.facts());
    engine->faults().add({Op::write, 0, 4, 0, 0, 2000});
    for (int i = 0; i < 32; ++i) {
      transfers[i].file = file;
      transfers[i].op = Op::write;
      transfers[i].data = memory.get() + i * kPage;
      transfers[i].length = kPage;
      transfers[i].offset = i * kPage;
      transfers[i].context = &told;
      transfers[i].done = [](Transfer* t) { ++*static_cast<std::atomic<int>*>(t->context); };
      engine->submit(&transfers[i]);
      if (i == 15) {
        engine->drain();
        CHECK(told == 16);
      }
    }
  }
  CHECK(told == 32);
  for (const Transfer& t : transfers) CHECK(t.error == 0 && t.moved == kPage);
}

}  // namespace
}  // namespace stow

int main() {
  using namespace stow;
  std::vector<Make> backends = {make_threads_engine};
  try {
    make_uring_engine({1, 4096});
    backends.push_back(make_uring_engine);
  } catch (const std::system_error& error) {
    std::printf("io_uring is not tested: %s\n", error.what());
  }
  for (const Make make : backends) {
    test_any_length_and_alignment(make);
    test_reads_begin_at_any_byte(make, 0);
    test_reads_begin_at_any_byte(make, kPage);
    test_short_transfers_are_finished(make, Op::read);
    test_short_transfers_are_finished(make, Op::write);
    for (const int error : {EIO, ENOSPC, EACCES}) {
      test_errors_name_their_place(make, Op::read, error);
      test_errors_name_their_place(make, Op::write, error);
    }
    test_of_many_errors_the_lowest_is_told(make, Op::read);
    test_of_many_errors_the_lowest_is_told(make, Op::write);
    test_interruptions_are_tried_again(make);
    test_reading_past_the_end(make);
    test_the_tail_of_a_file_that_is_no_multiple(make);
    test_an_unreadable_sector_is_no_end(make);
    test_no_such_file(make);
    test_no_such_bytes(make);
    test_the_page_cache_is_left_empty(make);
    test_a_bad_descriptor(make);
    test_many_threads_submit(make);
    test_drain_and_teardown_wait(make);
  }
  return report();
}
