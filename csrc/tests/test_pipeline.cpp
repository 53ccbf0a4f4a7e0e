// The pipeline against flat arrays in memory: bitwise equal for any ring, delay, gap and placement.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "base/pool.h"
#include "check.h"
#include "io/engine.h"
#include "pipeline/pipeline.h"

namespace stow {
namespace {

constexpr std::int64_t kElements = 1024;  // per chunk
constexpr std::int64_t kStream = kElements * 4;
constexpr int kChunks = 6;
constexpr int kResident = 2;  // the last ones
constexpr std::int64_t kAll = kElements * kChunks;

struct FreeDelete {
  void operator()(char* p) const { std::free(p); }
};
using Memory = std::unique_ptr<char, FreeDelete>;

std::vector<float> random_floats(unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(kAll);
  for (float& value : values) value = normal(random);
  return values;
}

AdamHyper hyper_of(int step) {
  return {0.1f, 0.999f, 0.001f, 0.99f, 0.0f, 0.01f * static_cast<float>(step), 10.0f, 1e-8f, 1.0f};
}

// Three parameters of two chunks each; the last one's states stay in memory.
class Rig {
 public:
  Rig(std::unique_ptr<Engine> engine, int slots) : engine_(std::move(engine)) {
    const char* folder = std::getenv("TMPDIR");
    std::string path = std::string(folder != nullptr ? folder : "/var/tmp") + "/stow-test-XXXXXX";
    fd_ = mkstemp(path.data());
    unlink(path.c_str());
    CHECK(ftruncate(fd_, 2 * kStream * kChunks) == 0);
    const int file = engine_->add_file({fd_, 1, false});
    ring_ = Memory(static_cast<char*>(std::aligned_alloc(4096, slots * 2 * kStream)));
    resident_.assign(2 * kElements * kResident, 0.0f);
    const RingSpec ring{ring_.get(), slots, 2 * kStream, kStream};
    pipeline_ = std::make_unique<Pipeline>(*engine_, ring, best_isa());
    for (int c = 0; c < kChunks; ++c) {
      ChunkSpec spec{};
      spec.family = {DType::f32, false};
      spec.segments = {{c / 2, c % 2 * kElements, 0, kElements}};
      spec.elements = kElements;
      const int home = c - (kChunks - kResident);
      spec.file = home < 0 ? file : -1;
      spec.offset = 2 * kStream * c;
      spec.stream_bytes = kStream;
      if (home >= 0) {
        spec.resident[0] = reinterpret_cast<char*>(&resident_[2 * kElements * home]);
        spec.resident[1] = spec.resident[0] + kStream;
      }
      pipeline_->add_chunk(std::move(spec), home < 0 ? ChunkState::blank : ChunkState::resident);
    }
    weights_ = random_floats(1);
    wanted_ = weights_;
    m_.assign(kAll, 0.0f);
    v_.assign(kAll, 0.0f);
  }

  ~Rig() {
    pipeline_.reset();
    engine_.reset();
    close(fd_);
  }

  // One step of both; `skip` has no gradient in it (-1: all have).
  Failure step(int number, int skip) {
    begin(number, skip);
    return pipeline_->wait_published();
  }

  void begin(int number, int skip) {
    gradients_ = random_floats(100 + static_cast<unsigned>(number));
    std::vector<StepParameter> parameters;
    for (int p = 0; p < 3; ++p) {
      const std::int64_t at = p * 2 * kElements;
      const void* gradient = p == skip ? nullptr : &gradients_[at];
      parameters.push_back({&weights_[at], gradient, DType::f32, false, 0});
      if (p == skip) continue;
      AdamArgs args{};
      args.param = &wanted_[at];
      args.grad = &gradients_[at];
      args.m = &m_[at];
      args.v = &v_[at];
      args.n = 2 * kElements;
      args.hyper = hyper_of(number);
      adam_update(args, Isa::scalar);
    }
    pipeline_->begin(parameters, {hyper_of(number)});
  }

  void spoil_gradients() { gradients_.assign(kAll, 1e30f); }

  bool agrees() const {
    return std::memcmp(weights_.data(), wanted_.data(), kAll * sizeof(float)) == 0;
  }
  Pipeline& pipeline() { return *pipeline_; }
  Engine& engine() { return *engine_; }

 private:
  std::unique_ptr<Engine> engine_;
  int fd_ = -1;
  Memory ring_;
  std::vector<float> resident_, weights_, wanted_, gradients_, m_, v_;
  std::unique_ptr<Pipeline> pipeline_;
};

using Make = std::unique_ptr<Engine> (*)(const EngineOptions&);

void test_any_ring_gives_the_same_bits(Make make) {
  for (const int slots : {1, 2, 5}) {
    for (const bool prefetch : {false, true}) {
      Rig rig(make({4, 4096}), slots);
      rig.engine().faults().add({Op::read, 3, 6, 0, 0, 300});
      rig.engine().faults().add({Op::write, 5, 6, 0, 0, 300});
      for (int number = 1; number <= 8; ++number) {
        if (prefetch) rig.pipeline().prefetch();
        CHECK(rig.step(number, number % 5 == 4 ? number % 3 : -1).error == 0);
        CHECK(rig.agrees());
      }
      CHECK(rig.pipeline().quiesce().error == 0);
      const PipelineCounters counters = rig.pipeline().counters();
      CHECK(counters.slots_in_use == 0);
      CHECK(counters.slots_high_water <= slots);
    }
  }
}

void test_quiet_between_steps(Make make) {
  Rig rig(make({4, 4096}), 3);
  CHECK(rig.step(1, -1).error == 0);
  for (int round = 2; round < 20; ++round) {
    rig.pipeline().prefetch();
    if (round % 3 != 0) CHECK(rig.pipeline().quiesce().error == 0);
    if (round % 2 == 0) CHECK(rig.step(round, -1).error == 0);
    CHECK(rig.agrees());
  }
}

// A blank chunk at the head of the order waits for a slot while read-ahead holds them all.
void test_every_chunk_is_updated_once(Make make) {
  for (const int slots : {1, 2, 3}) {
    Rig rig(make({4, 4096}), slots);
    for (int number = 1; number <= 6; ++number) {
      rig.pipeline().prefetch();
      usleep(3000);
      CHECK(rig.step(number, number <= 3 ? 0 : -1).error == 0);
      CHECK(rig.agrees());
    }
  }
}

void test_states_say_where_memory_is(Make make) {
  Rig rig(make({4, 4096}), 3);
  CHECK(rig.pipeline().state(0) == ChunkState::blank);
  CHECK(rig.pipeline().state(kChunks - 1) == ChunkState::resident);
  CHECK(rig.step(1, 0).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  CHECK(rig.pipeline().state(0) == ChunkState::blank);  // no gradient, never written
  CHECK(rig.pipeline().state(2) == ChunkState::stored);
  CHECK(rig.pipeline().counters().bytes_read == 0);  // zeros are not read
}

void test_failures_end_the_step(Make make, Op op, int error) {
  Rig rig(make({2, 4096}), 2);
  CHECK(rig.step(1, -1).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  rig.engine().faults().add({op, 1, 1, error, 0, 0});
  rig.step(2, -1);  // a failed write may come behind it
  const Failure failure = rig.pipeline().quiesce();
  CHECK(failure.error == error);
  CHECK(failure.op == op);
  CHECK(failure.chunk >= 0 && failure.length == 4096);
  CHECK(rig.pipeline().state(failure.chunk) == ChunkState::lost);
  CHECK(rig.step(3, -1).error == error);  // told again, and nothing is updated
  CHECK(rig.pipeline().counters().chunks_updated <= 2 * kChunks);
}

void test_a_failed_prefetch_is_told(Make make) {
  Rig rig(make({2, 4096}), 2);
  CHECK(rig.step(1, -1).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  rig.engine().faults().add({Op::read, 0, 1, EIO, 0, 0});
  rig.pipeline().prefetch();
  while (rig.pipeline().failure().error == 0) usleep(100);  // quiesce could come before the read
  CHECK(rig.pipeline().quiesce().error == EIO);
}

void test_a_step_that_nobody_waits_for(Make make) {
  for (int round = 0; round < 8; ++round) {
    Rig rig(make({2, 4096}), 2);
    CHECK(rig.step(1, -1).error == 0);
    rig.engine().faults().add({Op::write, round, 3, 0, 0, 500});
    rig.begin(2, -1);
    if (round % 2 == 0) {
      CHECK(rig.pipeline().quiesce().error == 0);  // it waits for the step, too
      CHECK(rig.agrees());
      CHECK(rig.pipeline().counters().slots_in_use == 0);
    }
  }  // what is under way ends before its memory does
}

void test_after_a_failure_gradients_are_the_callers(Make make) {
  for (int round = 0; round < 8; ++round) {
    Rig rig(make({2, 4096}), 2);
    CHECK(rig.step(1, -1).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
    rig.engine().faults().add({Op::read, round, 1, EIO, 0, 0});
    CHECK(rig.step(2, -1).error == EIO);
    rig.spoil_gradients();  // the thread sanitizer sees who still reads them
    CHECK(rig.pipeline().quiesce().error == EIO);
  }
}

void test_a_trace_is_bounded() {
  Trace trace;
  trace.record({0, 1, Lane::read, 0, 1});
  CHECK(trace.events().empty() && trace.dropped() == 0);
  trace.start(2);
  for (int i = 0; i < 5; ++i) trace.record({0, 1, Lane::read, i, 1});
  CHECK(trace.events().size() == 2 && trace.dropped() == 3);
}

}  // namespace
}  // namespace stow

int main() {
  using namespace stow;
  set_pool_threads(2);
  std::vector<Make> backends = {make_threads_engine};
  try {
    make_uring_engine({1, 4096});
    backends.push_back(make_uring_engine);
  } catch (const std::system_error& error) {
    std::printf("io_uring is not tested: %s\n", error.what());
  }
  for (const Make make : backends) {
    test_any_ring_gives_the_same_bits(make);
    test_quiet_between_steps(make);
    test_every_chunk_is_updated_once(make);
    test_states_say_where_memory_is(make);
    test_failures_end_the_step(make, Op::read, EIO);
    test_failures_end_the_step(make, Op::write, ENOSPC);
    test_a_failed_prefetch_is_told(make);
    test_a_step_that_nobody_waits_for(make);
    test_after_a_failure_gradients_are_the_callers(make);
  }
  test_a_trace_is_bounded();
  return report();
}
