#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

namespace simulated {
namespace {

double number(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atof(text) : otherwise;
}

struct Access {
  uintptr_t begin, end;
  int64_t stream;
  uint64_t tick;
  bool writes;
  std::string name;
};

// Memory of the device, or pinned memory of the host.
struct Block {
  uintptr_t address = 0;
  size_t size = 0;
  int64_t stream = 0;  // that it was allocated on
  bool pinned = false, live = false, registered = false;
  std::set<int64_t> used_by;
  std::vector<MomentPtr> until;
  std::vector<Access> seen;
};

// Memory that its stream may use again, and who was at work on it when it was freed.
struct Freed {
  Block* block;
  std::vector<Access> users;
};

struct Task {
  std::string name;
  std::function<void()> work;
  double given = 0;
};

struct Queue {
  std::deque<Task> tasks;
  std::vector<Freed> freed;
  std::condition_variable more;
  bool started = false;
  uint64_t given = 0, done = 0;
  Clock clock{};
};

// Everything lives until the process ends: threads may be at work when destructors run.
struct State {
  std::mutex mutex;
  std::condition_variable progress;
  std::array<Queue, kStreams> queues;
  Clock host{};
  int64_t next = 0;
  std::string failed;
  std::vector<std::string> hazards;
  Counts counts;
  bool tracing = false;
  std::vector<Span> spans;
  double link_over[2] = {0, 0};        // by direction: when what was given to it is over
  uint64_t drawn = 0;                  // delays
  std::map<uintptr_t, Block*> blocks;  // by address, pinned ones too
  std::map<std::pair<int64_t, size_t>, std::vector<Block*>> free;
  std::vector<Block*> limbo;
  uintptr_t base = 0, inner = 0, top = 0;
  size_t registered = 0;  // bytes of host memory
  c10::CachingDeviceAllocator::DeviceStats stats;
};
constexpr size_t kReserved = size_t(64) << 30;

State& state() {
  static State* made = [] {
    auto* s = new State;
    auto map = [](int protection) {
      void* at =
          mmap(nullptr, kReserved, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "the simulated accelerator finds no room for its memory");
      return reinterpret_cast<uintptr_t>(at);
    };
    s->base = s->top = map(PROT_NONE);
    s->inner = map(PROT_READ | PROT_WRITE);
    return s;
  }();
  return *made;
}
using Lock = std::unique_lock<std::mutex>;

bool in_child = false;
thread_local int64_t current = 0;
thread_local double clock_of_stream = 0;
thread_local int64_t served = -1;
thread_local std::string at_work;

void add_span(State& s, int64_t stream, const std::string& name, double start, double stop,
              uint64_t bytes) {
  if (s.tracing) s.spans.push_back({stream, name, start, stop, bytes});
}

void sleep_until(double moment) {
  const double left = moment - now();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) into[i] = std::max(into[i], other[i]);
}

Block* block_at(State& s, uintptr_t address) {
  auto found = s.blocks.upper_bound(address);
  if (found == s.blocks.begin()) return nullptr;
  Block* block = std::prev(found)->second;
  return address < block->address + block->size ? block : nullptr;
}

std::string named(int64_t stream) { return "stream " + std::to_string(stream); }

void add_hazard(State& s, std::string text) {
  if (s.hazards.size() < 1000) s.hazards.push_back(std::move(text));
}

// Looks whether what others did to this memory happened before, and remembers the access.
void look(State& s, int64_t stream, const std::string& name, const Touch& touch) {
  if (touch.begin == touch.end) return;
  Block* block = block_at(s, touch.begin);
  if (!block) return;
  const Clock& clock = s.queues[stream].clock;
  if (!block->live) add_hazard(s, name + " on " + named(stream) + " touches freed memory");
  std::vector<Access> kept;
  for (auto& old : block->seen) {
    const bool meets = old.begin < touch.end && touch.begin < old.end;
    const bool before = clock[old.stream] >= old.tick;
    if (meets && !before && (old.writes || touch.writes)) {
      add_hazard(s, name + (touch.writes ? " writes" : " reads") + " on " + named(stream) +
                        " what " + old.name + (old.writes ? " writes" : " reads") + " on " +
                        named(old.stream) + ", and nothing orders them");
      continue;
    }
    const bool covered = touch.begin <= old.begin && old.end <= touch.end;
    if (!(before && covered && (touch.writes || !old.writes))) kept.push_back(std::move(old));
  }
  kept.push_back({touch.begin, touch.end, stream, clock[stream], touch.writes, name});
  block->seen = std::move(kept);
}

void serve(int64_t id) {
  auto& s = state();
  auto& queue = s.queues[id];
  served = id;
  for (;;) {
    Task task;
    {
      Lock lock(s.mutex);
      queue.more.wait(lock, [&] { return !queue.tasks.empty(); });
      task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
    }
    clock_of_stream = std::max(clock_of_stream, task.given);
    at_work = task.name;
    try {
      task.work();
    } catch (const std::exception& error) {
      Lock lock(s.mutex);
      if (s.failed.empty()) s.failed = task.name + ": " + error.what();
    }
    task.work = nullptr;
    Lock lock(s.mutex);
    ++queue.done;
    s.progress.notify_all();
  }
}

void give(State& s, int64_t id, const std::string& name, std::function<void()> work) {
  TORCH_CHECK(!in_child, "the simulated accelerator cannot be used in a forked process");
  auto& queue = s.queues[id];
  if (!queue.started) {
    queue.started = true;
    std::thread(serve, id).detach();
  }
  queue.tasks.push_back({name, std::move(work), now()});
  ++queue.given;
  queue.more.notify_one();
}

void take_back(State& s, int64_t id);

void submit_locked(State& s, int64_t id, const std::string& name, const std::vector<Touch>& touched,
                   std::function<void()> work) {
  auto& queue = s.queues[id];
  take_back(s, id);
  join(queue.clock, s.host);
  ++queue.clock[id];
  for (const auto& touch : touched) look(s, id, name, touch);
  give(s, id, name, std::move(work));
}

MomentPtr record_locked(State& s, int64_t id) {
  auto moment = std::make_shared<Moment>();
  join(s.queues[id].clock, s.host);
  moment->clock = s.queues[id].clock;
  give(s, id, "event", [moment] {
    moment->seconds = clock_of_stream;
    moment->over = true;
  });
  return moment;
}

// --- memory of the device ---

size_t rounded(size_t nbytes) { return (nbytes + 511) / 512 * 512; }

void poison(State& s, Block* block) {
  void* at = reinterpret_cast<void*>(block->address - s.base + s.inner);
  const size_t size = block->size;
  submit_locked(s, block->stream, "reuse of memory", {}, [at, size] { memset(at, 0xFF, size); });
}

// Poisons what was freed, before the stream is given anything else: who of other streams is still
// at work on it had a record_stream to make, unless this stream has waited for them by now.
void take_back(State& s, int64_t id) {
  auto& queue = s.queues[id];
  join(queue.clock, s.host);
  for (const auto& [block, users] : std::exchange(queue.freed, {})) {
    for (const auto& old : users)
      if (queue.clock[old.stream] < old.tick)
        add_hazard(s, "memory of " + named(id) + " is freed while " + old.name +
                          (old.writes ? " writes" : " reads") + " it on " + named(old.stream) +
                          ", without record_stream");
    poison(s, block);
  }
}

void release(State& s, Block* block) {
  std::vector<Access> users;
  for (auto& old : block->seen)
    if (!block->used_by.count(old.stream)) users.push_back(std::move(old));
  block->used_by.clear();
  block->until.clear();
  block->seen.clear();
  s.queues[block->stream].freed.push_back({block, std::move(users)});
  s.free[{block->stream, block->size}].push_back(block);
}

bool is_over(const MomentPtr& moment) { return moment->over; }

void empty_limbo(State& s) {
  std::vector<Block*> kept;
  for (Block* block : s.limbo) {
    if (!std::all_of(block->until.begin(), block->until.end(), is_over)) {
      kept.push_back(block);
    } else if (block->pinned) {
      s.blocks.erase(block->address);
      munmap(reinterpret_cast<void*>(block->address), block->size);
      delete block;
    } else {
      release(s, block);
    }
  }
  s.limbo = std::move(kept);
}

void count(State& s, int64_t nbytes) {
  auto& all = s.stats;
  const size_t aggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  for (auto* bytes : {&all.allocated_bytes, &all.active_bytes, &all.requested_bytes})
    nbytes > 0 ? (*bytes)[aggregate].increase(nbytes) : (*bytes)[aggregate].decrease(-nbytes);
  nbytes > 0 ? all.allocation[aggregate].increase(1) : all.allocation[aggregate].decrease(1);
}

void free_device(void* context) {
  auto& s = state();
  auto* block = static_cast<Block*>(context);
  if (in_child) return;
  Lock lock(s.mutex);
  block->live = false;
  count(s, -static_cast<int64_t>(block->size));
  for (int64_t id : block->used_by)
    if (id != block->stream) block->until.push_back(record_locked(s, id));
  if (block->until.empty()) {
    release(s, block);
  } else {
    s.limbo.push_back(block);
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  bool initialized() override { return true; }

  c10::DataPtr allocate(size_t asked) override {
    const c10::Device device(kDevice, 0);
    if (asked == 0) return {nullptr, nullptr, &free_device_or_nothing, device};
    auto& s = state();
    Lock lock(s.mutex);
    empty_limbo(s);
    const size_t size = rounded(asked);
    const int64_t stream = current_stream();
    take_back(s, stream);
    auto& free = s.free[{stream, size}];
    Block* block = nullptr;
    auto& held = s.stats.allocated_bytes[0];
    if (held.current + size > settings().memory_bytes) {
      ++s.stats.num_ooms;
      lock.unlock();
      TORCH_CHECK_WITH(OutOfMemoryError, false, "the simulated accelerator has no room for ", size,
                       " bytes: ", held.current, " are allocated");
    }
    if (!free.empty()) {
      block = free.back();
      free.pop_back();
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, s.top + size <= s.base + kReserved,
                       "the simulated accelerator has used all its addresses");
      block = new Block;
      block->address = s.top;
      block->size = size;
      block->stream = stream;
      s.top += size;
      s.blocks[block->address] = block;
      s.stats.reserved_bytes[0].increase(size);
      poison(s, block);
    }
    block->live = true;
    // Who uses it on another stream is to wait for what this one did with the memory before.
    block->seen.push_back({block->address, block->address + size, stream,
                           s.queues[stream].clock[stream], true, "the use of it before"});
    count(s, static_cast<int64_t>(size));
    return {reinterpret_cast<void*>(block->address), block, &free_device_or_nothing, device};
  }

  static void free_device_or_nothing(void* context) {
    if (context) free_device(context);
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    const auto a = reinterpret_cast<uintptr_t>(to), b = reinterpret_cast<uintptr_t>(from);
    submit(current_stream(), "clone of a storage", {{a, a + nbytes, true}, {b, b + nbytes, false}},
           [=] { memcpy(inside(to), inside(from), nbytes); });
  }

  void emptyCache(c10::MempoolId_t) override {
    auto& s = state();
    wait_device();
    Lock lock(s.mutex);
    empty_limbo(s);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data, stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(state().mutex);
    return state().stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex) override {
    auto& s = state().stats;
    Lock lock(state().mutex);
    for (auto* each : {&s.allocated_bytes, &s.active_bytes, &s.requested_bytes, &s.reserved_bytes,
                       &s.allocation})
      for (auto& stat : *each) stat.reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const size_t all = settings().memory_bytes;
    return {all - state().stats.allocated_bytes[0].current, all};
  }
};

// --- pinned memory of the host ---

void free_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block || in_child) return;
  auto& s = state();
  Lock lock(s.mutex);
  block->live = false;
  s.limbo.push_back(block);
  empty_limbo(s);  // unmapped as soon as no copy uses it: whoever still does is stopped
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
    auto* block = new Block;
    block->size = (nbytes + 4095) / 4096 * 4096;
    void* at =
        mmap(nullptr, block->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no room for ", nbytes, " bytes of pinned memory");
    block->address = reinterpret_cast<uintptr_t>(at);
    block->pinned = block->live = true;
    Lock lock(state().mutex);
    state().blocks[block->address] = block;
    return {at, block, &free_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    memcpy(to, from, nbytes);
  }
  bool record_event(void* address, void*, c10::Stream stream) override {
    hold_pinned(address, record(stream.id()));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

// --- what torch asks a device for ---

struct Event {
  MomentPtr last;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one simulated accelerator");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return in_child ? 0 : 1; }
  c10::Stream of(int64_t id) const { return c10::Stream(c10::Stream::UNSAFE, getDevice(), id); }
  c10::Stream getStream(c10::Device) const override { return of(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return of(next_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return of(next_stream());
  }
  c10::Stream exchangeStream(c10::Stream s) const override { return of(exchange_stream(s.id())); }
  bool queryStream(const c10::Stream& s) const override { return stream_is_idle(s.id()); }
  void synchronizeStream(const c10::Stream& s) const override { wait_stream(s.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_device(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->last = simulated::record(s.id());
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) simulated::block(s.id(), static_cast<Event*>(event)->last);
  }
  bool queryEvent(void* event) const override {
    return !event || query(static_cast<Event*>(event)->last);
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait(static_cast<Event*>(event)->last);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(b)->last->seconds - static_cast<Event*>(a)->last->seconds);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    record_use(data, s.id());
  }
};

// Its state is that of a generator on the CPU: what device work has drawn is waited for.
struct Randomness final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Randomness(at::Generator g)
      : GeneratorImpl({kDevice, 0}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(g)) {}
  void set_current_seed(uint64_t seed) override {
    wait_device();
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& s) override {
    wait_device();
    inner.unsafeGetGeneratorImpl()->set_state(s);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    wait_device();
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Randomness* clone_impl() const override { return new Randomness(inner.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !in_child; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return in_child ? 0 : 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return {kDevice, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return device_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Randomness>(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto made = device_memory.allocate(size);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept) device_memory.copy_data(made.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(size);
  }
};

const bool registered = [] {
  c10::SetAllocator(kDevice, &device_memory);
  at::setHostAllocator(kDevice, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(nullptr, nullptr, [] { in_child = true; });
  return true;
}();
c10::impl::DeviceGuardImplRegistrar guard(kDevice, new Guard);

}  // namespace

void initialize() { at::globalContext().lazyInitDevice(kDevice); }

Settings& settings() {
  static Settings* made = [] {
    auto* s = new Settings;
    s->copy_seconds = number("SIMULATED_COPY_US", 1000) * 1e-6;
    s->copy_bytes_per_s = number("SIMULATED_LINK_GBS", 5) * 1e9;
    s->op_seconds = number("SIMULATED_OP_US", 0) * 1e-6;
    s->seed = static_cast<uint64_t>(number("SIMULATED_SEED", 0));
    s->memory_bytes = static_cast<size_t>(number("SIMULATED_MEMORY_MIB", 4096)) << 20;
    return s;
  }();
  return *made;
}

double now() {
  using std::chrono::steady_clock;
  return std::chrono::duration<double>(steady_clock::now().time_since_epoch()).count();
}

double late(double seconds) {
  auto& s = state();
  uint64_t drawn;
  {
    Lock lock(s.mutex);
    drawn = ++s.drawn;
  }
  uint64_t x = settings().seed * 0x9E3779B97F4A7C15u + drawn * 0xBF58476D1CE4E5B9u;  // splitmix
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return seconds * static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-52;
}

void count_link(bool down, uint64_t bytes) {
  Lock lock(state().mutex);
  (down ? state().counts.bytes_down : state().counts.bytes_up) += bytes;
}

Counts take_counts() {
  Lock lock(state().mutex);
  return std::exchange(state().counts, {});
}

void busy(double seconds) {
  if (seconds <= 0) return;
  const double start = clock_of_stream;
  clock_of_stream += seconds;
  {
    Lock lock(state().mutex);
    add_span(state(), served, at_work, start, clock_of_stream, 0);
  }
  sleep_until(clock_of_stream);
}

void busy_link(bool down, uint64_t bytes) {
  const double seconds = static_cast<double>(bytes) / settings().copy_bytes_per_s;
  {
    auto& s = state();
    Lock lock(s.mutex);
    double& over = s.link_over[down ? 1 : 0];
    const double start = std::max(clock_of_stream, over);
    over = clock_of_stream = start + seconds;
    add_span(s, served, at_work, start, over, bytes);
  }
  sleep_until(clock_of_stream);
}

void Hold::block() {
  Lock lock(mutex_);
  released_.wait_for(lock, std::chrono::duration<double>(most_seconds_), [&] { return over_; });
  over_ = true;
}

bool Hold::release() {
  Lock lock(mutex_);
  released_.notify_all();
  return !std::exchange(over_, true);
}

void trace(bool on) {
  Lock lock(state().mutex);
  state().tracing = on;
  state().spans.clear();
}

std::vector<Span> take_trace() {
  Lock lock(state().mutex);
  return std::exchange(state().spans, {});
}

int64_t current_stream() { return current; }
int64_t exchange_stream(int64_t id) { return std::exchange(current, id); }
int64_t next_stream() {
  Lock lock(state().mutex);
  return 1 + state().next++ % (kStreams - 1);
}

void submit(int64_t stream, const std::string& name, const std::vector<Touch>& touched,
            std::function<void()> work) {
  auto& s = state();
  Lock lock(s.mutex);
  submit_locked(s, stream, name, touched, std::move(work));
}

MomentPtr record(int64_t stream) {
  Lock lock(state().mutex);
  return record_locked(state(), stream);
}

void block(int64_t stream, const MomentPtr& moment) {
  if (!moment) return;
  auto& s = state();
  Lock lock(s.mutex);
  join(s.queues[stream].clock, moment->clock);
  give(s, stream, "wait", [moment] {
    auto& s = state();
    Lock lock(s.mutex);
    s.progress.wait(lock, [&] { return moment->over.load(); });
    clock_of_stream = std::max(clock_of_stream, moment->seconds);
  });
}

bool query(const MomentPtr& moment) {
  if (!moment) return true;
  if (!moment->over) return false;
  Lock lock(state().mutex);
  join(state().host, moment->clock);
  return true;
}

void wait(const MomentPtr& moment) {
  if (moment) {
    auto& s = state();
    Lock lock(s.mutex);
    ++s.counts.host_waits;
    const double start = now();
    s.progress.wait(lock, [&] { return moment->over.load(); });
    add_span(s, -1, "host waits", start, now(), 0);
    join(s.host, moment->clock);
  }
  check_failed();
}

void wait_stream(int64_t stream) { wait(record(stream)); }

bool stream_is_idle(int64_t stream) {
  auto& s = state();
  Lock lock(s.mutex);
  auto& queue = s.queues[stream];
  if (queue.done != queue.given) return false;
  join(s.host, queue.clock);
  return true;
}

void wait_device() {
  for (int64_t id = 0; id < kStreams; ++id) {
    bool used;
    {
      Lock lock(state().mutex);
      used = state().queues[id].started;
    }
    if (used) wait_stream(id);
  }
}

void check_failed() {
  std::string failed;
  {
    Lock lock(state().mutex);
    failed.swap(state().failed);
  }
  TORCH_CHECK(failed.empty(), "work of the simulated accelerator failed: ", failed);
}

void hazard(const std::string& text) {
  Lock lock(state().mutex);
  add_hazard(state(), text);
}

std::vector<std::string> take_hazards() {
  Lock lock(state().mutex);
  return std::exchange(state().hazards, {});
}

bool is_device_address(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at >= state().base && at < state().base + kReserved;
}

void* inside(const void* address) {
  if (!address) return nullptr;
  TORCH_CHECK(is_device_address(address), "this is no address of the simulated accelerator");
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) - state().base +
                                 state().inner);
}

c10::Allocator* device_allocator() { return &device_memory; }

void record_use(const c10::DataPtr& data, int64_t stream) {
  auto& s = state();
  Lock lock(s.mutex);
  Block* block = block_at(s, reinterpret_cast<uintptr_t>(data.get()));
  if (block && !block->pinned && block->live) block->used_by.insert(stream);
}

int register_host(uintptr_t address, size_t nbytes) {
  constexpr int kInvalid = 1, kNoMemory = 2, kAlready = 712;
  auto& s = state();
  if (!nbytes) return kInvalid;
  Lock lock(s.mutex);
  const auto next = s.blocks.lower_bound(address);
  if (block_at(s, address) || (next != s.blocks.end() && next->first < address + nbytes))
    return kAlready;
  if (s.registered + nbytes > settings().pinned_bytes) return kNoMemory;
  auto* block = new Block;
  block->address = address;
  block->size = nbytes;
  block->pinned = block->live = block->registered = true;
  s.blocks[address] = block;
  s.registered += nbytes;
  return 0;
}

int unregister_host(uintptr_t address) {
  constexpr int kNotRegistered = 713;
  auto& s = state();
  Lock lock(s.mutex);
  const auto found = s.blocks.find(address);
  if (found == s.blocks.end() || !found->second->registered) return kNotRegistered;
  Block* block = found->second;
  if (!std::all_of(block->until.begin(), block->until.end(), is_over))
    add_hazard(s, "host memory is unregistered while a copy uses it");
  s.registered -= block->size;
  s.blocks.erase(found);
  delete block;
  return 0;
}

size_t registered_bytes() {
  Lock lock(state().mutex);
  return state().registered;
}

bool is_pinned(const void* address) {
  auto& s = state();
  Lock lock(s.mutex);
  Block* block = block_at(s, reinterpret_cast<uintptr_t>(address));
  return block && block->pinned && block->live;
}

void hold_pinned(const void* address, const MomentPtr& until) {
  auto& s = state();
  Lock lock(s.mutex);
  Block* block = block_at(s, reinterpret_cast<uintptr_t>(address));
  if (!block || !block->pinned) return;
  auto& held = block->until;
  held.erase(std::remove_if(held.begin(), held.end(), is_over), held.end());
  held.push_back(until);
}

at::Generator& generator() {
  static auto* made = new at::Generator(at::detail::createCPUGenerator(0));
  return *made;
}

const at::Generator& device_generator() {
  static auto* made = new at::Generator(at::make_generator<Randomness>(generator()));
  return *made;
}

bool forked() { return in_child; }

}  // namespace simulated
