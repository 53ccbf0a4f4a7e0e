// The simulated accelerator's run time: streams that are threads, events, memory of its own, and a
// happens-before check of everything that is given to a stream.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 33;  // the default stream and a pool that is handed out in turns

using Clock = std::array<uint64_t, kStreams>;

// Memory that work reads or writes: device addresses, or addresses of pinned host memory.
struct Touch {
  uintptr_t begin = 0, end = 0;
  bool writes = false;
};

// A point in a stream's work. `clock` says all that happened before it.
struct Moment {
  std::atomic<bool> over{false};
  Clock clock{};
  double seconds = 0;  // by the delays of its stream
};
using MomentPtr = std::shared_ptr<Moment>;

struct Settings {
  double copy_seconds = 1e-3;  // that every copy over the link takes, and
  double copy_bytes_per_s = 5e9;
  double op_seconds = 0;        // that every operator takes at least, and
  double seconds_per_flop = 0;  // every product of matrices besides
  size_t memory_bytes = size_t(4) << 30;
  size_t pinned_bytes = SIZE_MAX;  // that may be registered
  uint64_t seed = 0;
};
Settings& settings();
double late(double seconds);  // by the seed: between none and twice of it

// What took its time, by the delays alone: on a stream, or (-1) the host, which waited.
struct Span {
  int64_t stream;
  std::string name;
  double start, stop;  // Python's time.monotonic()
  uint64_t bytes;
};
void trace(bool on);
std::vector<Span> take_trace();

// Since the last take_counts().
struct Counts {
  uint64_t bytes_down = 0, bytes_up = 0;  // over the link
  uint64_t host_waits = 0;                // of the host for a stream or for an event
};
void count_link(bool down, uint64_t bytes);
Counts take_counts();

// --- streams ---
int64_t current_stream();
int64_t exchange_stream(int64_t id);
int64_t next_stream();
// Gives work to a stream; returns at once. What is wrong with its order becomes a hazard.
void submit(int64_t stream, const std::string& name, const std::vector<Touch>& touched,
            std::function<void()> work);
MomentPtr record(int64_t stream);
void block(int64_t stream, const MomentPtr& moment);
bool query(const MomentPtr& moment);
void wait(const MomentPtr& moment);
void wait_stream(int64_t stream);
bool stream_is_idle(int64_t stream);
void wait_device();
void check_failed();  // throws what work has failed with, once
// [Note: Delays] A stream has a clock of its own, which delays alone move on, and sleeps until
// then. What this machine needs besides for a piece of work is made up for by a shorter sleep
// before the next. Work begins at the latest of: the end of the work before it, the moment it was
// given, what it waited for. Results are there behind the sleep. To be called in a stream's thread.
void busy(double seconds);
// The same for bytes over the link, which all streams share in each direction.
void busy_link(bool down, uint64_t bytes);
// What holds its stream up until it is let go of, or for `most_seconds`.
class Hold {
 public:
  explicit Hold(double most_seconds) : most_seconds_(most_seconds) {}
  void block();    // in the stream's thread
  bool release();  // whether the stream was, or would have been, held up until now

 private:
  const double most_seconds_;
  std::mutex mutex_;
  std::condition_variable released_;
  bool over_ = false;
};
double now();

// --- hazards ---
void hazard(const std::string& text);
std::vector<std::string> take_hazards();

// Tells torch that the device is initialized: it asks no other whether memory is pinned.
void initialize();

// --- memory ---
// Device addresses are never mapped for the CPU: work uses the same bytes at another address.
void* inside(const void* device_address);
bool is_device_address(const void* address);
c10::Allocator* device_allocator();
void record_use(const c10::DataPtr& data, int64_t stream);
bool is_pinned(const void* address);
// Registers host memory, as cudaHostRegister does: 0, or CUDA's number of the error.
int register_host(uintptr_t address, size_t nbytes);
int unregister_host(uintptr_t address);
size_t registered_bytes();
void hold_pinned(const void* address, const MomentPtr& until);
at::Generator& generator();  // on the CPU: what random operators of the device draw from
const at::Generator& device_generator();  // the same, as torch knows it
bool forked();

}  // namespace simulated
