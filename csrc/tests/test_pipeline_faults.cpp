// What becomes of a pipeline when the disk fails or lies, and when nobody waits for it.
#include <cerrno>

#include "base/pool.h"
#include "pipeline_cases.h"

namespace stow {
namespace {

void test_failures_end_the_step(Make make, Op op, int error, const StepSpec& spec) {
  doing("failures");
  for (const Order order : kOrders) {
    Rig rig(make({2, 4096}), with(2, order));
    CHECK(rig.step(1).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
    rig.engine().faults().add({op, 1, 1, error, 0, 0});
    rig.begin(2, rig.training().all_but(), spec);
    if (spec.open) {
      for (const int p : {2, 0, 1}) rig.add_gradient(p);
      rig.pipeline().close();
    }
    rig.pipeline().progress().wait_published();  // a failed write may come behind it
    const Failure failure = rig.pipeline().quiesce();
    CHECK(failure.error == error);
    CHECK(failure.op == op);
    CHECK(failure.chunk >= 0 && failure.length == 4096);
    CHECK(rig.pipeline().ledger().state(failure.chunk) == ChunkState::failed);
    CHECK(rig.step(3).error == error);  // told again, and nothing is updated
    CHECK(rig.pipeline().progress().wait_parameters({0}).error == error);
    CHECK(rig.pipeline().progress().wait_written().error == error);
    rig.begin(4, rig.training().all_but(), kOpen);
    rig.add_gradient(0);
    rig.pipeline().close();
    CHECK(rig.pipeline().counters().chunks_updated <= 2 * kChunks);
  }
}

void test_failures_in_an_open_step_reach_who_waits_for_one(Make make, Op op) {
  doing("failures in open steps");
  for (int round = 0; round < 6; ++round) {
    Rig rig(make({2, 4096}), with(2, Order::given, {4, 5}));
    CHECK(rig.step(1).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
    rig.engine().faults().add({op, round % 3, 1, EIO, 0, 0});
    rig.begin(2, rig.training().all_but(), kOpen);
    rig.add_gradient(1);
    const int error = rig.pipeline().progress().wait_parameters({1}).error;
    CHECK(error == 0 || error == EIO);
    rig.add_gradient(0);
    if (round >= 3) rig.add_gradient(2);
    CHECK(rig.pipeline().progress().wait_parameters({0, 1}).error == EIO ||
          rig.pipeline().quiesce().error == EIO);
    rig.training().spoil_gradients();
  }
}

void test_a_failed_prefetch_is_told(Make make) {
  doing("failed prefetch");
  Rig rig(make({2, 4096}), with(2));
  CHECK(rig.step(1).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  rig.engine().faults().add({Op::read, 0, 1, EIO, 0, 0});
  rig.pipeline().prefetch();
  CHECK(soon([&] { return rig.pipeline().progress().failure().error != 0; }));
  CHECK(rig.pipeline().quiesce().error == EIO);
}

// Eight megabytes of states at resident are being updated when a read fails, and no write follows.
void test_a_failure_beside_an_update_reaches_who_waits(Make make) {
  doing("failure beside an update");
  for (int round = 0; round < 10; ++round) {
    RigOptions options = with(1, Order::given, {1});
    options.capacity = 1 << 20;
    options.shapes.assign(2, Shape{{}, options.capacity});
    Rig rig(make({2, 1 << 20}), options);
    CHECK(rig.step(1).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
    rig.engine().faults().add({Op::read, 0, 1, 0, 0, 100 * round});
    rig.engine().faults().add({Op::read, 0, 1, EIO, 0, 0});
    rig.begin(2, rig.training().all_but(), {});
    const Failure failure = round % 2 ? rig.pipeline().progress().wait_published()
                                      : rig.pipeline().progress().wait_written();
    CHECK(failure.error == EIO);
    rig.training().spoil_gradients();
  }
}

void test_after_a_failure_gradients_are_the_callers(Make make) {
  doing("gradients after failures");
  for (int round = 0; round < 8; ++round) {
    for (const StepSpec& spec : {StepSpec{}, kOpen, kBackground}) {
      Rig rig(make({2, 4096}), with(2));
      CHECK(rig.step(1).error == 0);
      CHECK(rig.pipeline().quiesce().error == 0);
      rig.engine().faults().add({Op::read, round, 1, EIO, 0, 0});
      rig.begin(2, rig.training().all_but(), spec);
      if (spec.open) {
        for (const int p : {0, 1, 2}) rig.add_gradient(p);
        rig.pipeline().close();
      }
      CHECK((round % 2 ? rig.pipeline().progress().wait_published()
                       : rig.pipeline().progress().wait_written())
                .error == EIO);
      rig.training().spoil_gradients();  // the thread sanitizer sees who still reads them
      CHECK(rig.pipeline().quiesce().error == EIO);
    }
  }
}

void test_a_step_that_nobody_waits_for(Make make) {
  doing("nobody waits");
  for (int round = 0; round < 8; ++round) {
    Rig rig(make({2, 4096}), with(2));
    CHECK(rig.step(1).error == 0);
    rig.engine().faults().add({Op::write, round, 3, 0, 0, 500});
    rig.begin(2, rig.training().all_but());
    if (round % 2 == 0) check_all(rig);  // quiesce waits for the step, too
  }  // what is under way ends before its memory does
}

// Each is destroyed at some point of its life.
void test_what_is_under_way_ends_before_its_memory_does(Make make) {
  doing("destruction");
  for (int round = 0; round < 12; ++round) {
    for (const StepSpec& spec : {StepSpec{}, kBackground, kCapture, kOpen, kOpenCapture}) {
      Rig rig(make({2, 4096}), durable(2, kOrders[round % 2], {1, 4}));
      CHECK(rig.step(1).error == 0);
      rig.engine().faults().add({Op::write, round % 5, 3, 0, 0, 300});
      rig.engine().faults().add({Op::read, round % 3, 3, 0, 0, 300});
      if (round % 3 == 0) rig.pipeline().quiesce();
      if (round % 3 == 1) rig.pipeline().prefetch();
      rig.begin(2, rig.training().all_but(round % 4 - 1), spec);
      if (spec.open) {
        for (int p = 2; p > round % 3; --p) {
          if (p != round % 4 - 1) rig.add_gradient(p);
        }
        if (round % 4 == 3) rig.pipeline().close();
      }
      usleep(static_cast<useconds_t>(100 * round));
      rig.destroy_pipeline();
      rig.training().spoil_gradients();
    }
  }
}

// A caller that updates chunks sees the failure, and never acquires damaged states.
void test_failures_end_a_step_with_caller_updates(Make make) {
  doing("failures, acquired");
  std::mt19937 random(9);
  for (int round = 0; round < 12; ++round) {
    Rig rig(make({4, 4096}), with(2, Order::given, {}));
    CHECK(rig.step(1).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
    const bool damage = round % 2 == 0;
    const int chunk = round % kChunks;
    if (damage) {
      rig.file().flip_byte(rig.file().place_in(0, chunk).offset + 5);
    } else {
      rig.engine().faults().add({Op::read, round, 1, EIO, 0, 0});
    }
    rig.begin(2, rig.training().all_but(), round < 6 ? kOutside : kOutsideCapture);
    AcquiredChunk given = rig.pipeline().acquire_chunk(true);
    for (; given.chunk >= 0; given = rig.pipeline().acquire_chunk(true)) {
      CHECK(!damage || given.chunk != chunk);
      rig.update_one(given);
      rig.pipeline().release_chunk(given.chunk);
    }
    const int error = damage ? kDamaged : EIO;
    CHECK(rig.pipeline().progress().wait_published().error == error);
    CHECK(rig.pipeline().acquire_chunk(false).chunk == -1);
    CHECK(rig.pipeline().quiesce().error == error);
    CHECK(rig.step(3).error == error);
  }
}

// Chunks that somebody holds when the pipeline goes are his to forget.
void test_a_pipeline_may_go_while_a_chunk_is_acquired(Make make) {
  doing("destroyed, acquired");
  for (int round = 0; round < 6; ++round) {
    Rig rig(make({2, 4096}), durable(2, kOrders[round % 2], {1, 4}));
    CHECK(rig.step(1).error == 0);
    rig.begin(2, rig.training().all_but(), round % 3 == 0 ? kOutsideCapture : kOutside);
    const AcquiredChunk given = rig.pipeline().acquire_chunk(true);
    CHECK(given.chunk >= 0);
    if (round % 2 == 0) rig.update_one(given);
    if (round > 3) rig.pipeline().release_chunk(given.chunk);
    rig.destroy_pipeline();
  }
}

// One byte of one stream is not what was written.
void test_damage_is_told_with_its_place(Make make) {
  doing("damage");
  RigOptions options = with(2, Order::given, {});
  options.capacity = kUpdateBlock + 2048;
  options.shapes.assign(3, Shape{{}, options.capacity});
  for (int round = 0; round < 12; ++round) {
    Rig rig(make({4, 1 << 16}), options);
    CHECK(rig.step(1).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
    const int chunk = round % 3;
    const Layout layout(rig.file().spec(chunk));
    const Layout::Part& part = layout.parts[round / 3 % 2];
    const int block = round % 2;
    const std::int64_t at = part.at(block * kUpdateBlock) + 41 * round;
    rig.file().flip_byte(rig.file().place_in(0, chunk).offset + part.file_at + at);
    const StepSpec spec = round < 4 ? StepSpec{} : round < 8 ? kOpen : kBackground;
    if (round % 5 == 0) rig.pipeline().prefetch();
    rig.begin(2, rig.training().all_but(), spec);
    if (spec.open) {
      for (const int p : {2, 1, 0}) rig.add_gradient(p);
      rig.pipeline().close();
    }
    const Failure failure = rig.pipeline().progress().wait_published();
    CHECK(failure.error == kDamaged && failure.op == Op::read && failure.chunk == chunk);
    CHECK(failure.file == rig.file().place_in(0, chunk).file);
    const std::int64_t begin = layout.parts[0].at(block * kUpdateBlock);
    CHECK(failure.offset == rig.file().place_in(0, chunk).offset + begin);
    CHECK(failure.length == (block == 0 ? 4 * kUpdateBlock : 4 * 2048));
    rig.training().spoil_gradients();
    CHECK(rig.pipeline().quiesce().error == kDamaged);
    CHECK(rig.pipeline().ledger().state(chunk) == ChunkState::failed);
    CHECK(rig.pipeline().counters().slots_in_use == 0);
    CHECK(rig.step(3).error == kDamaged);
  }
}

void test_padding_and_gaps_are_told_apart(Make make) {
  doing("padding");
  RigOptions options = with(2, Order::given, {});
  options.shapes.assign(2, Shape{{}, 1000});
  options.gap = 24 + 256;
  options.capacity = 2048 + 512;
  Rig rig(make({4, 4096}), options);
  CHECK(rig.step(1).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  // What pads a stream to whole blocks of the disk nobody reads ...
  const Layout layout(rig.file().spec(0));
  CHECK(layout.parts[0].length(rig.file().spec(0).elements) < layout.parts[0].bytes);
  rig.file().flip_byte(rig.file().place_in(0, 0).offset + layout.parts[0].bytes - 1);
  CHECK(rig.step(2).error == 0);
  check_all(rig);
  // ... but what lies between two parameters is part of the chunk.
  rig.file().flip_byte(rig.file().place_in(0, 0).offset + 4 * 1010);
  CHECK(rig.step(3).error == kDamaged);
}

void test_a_commit_checks_what_it_carries(Make make) {
  doing("damaged and carried");
  Rig rig(make({4, 4096}), durable(2, Order::given, {}));
  CHECK(rig.step(1, -1, kCapture).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  const std::vector<char> before = rig.file().read_area(0);
  std::mt19937 random(3);
  rig.rewrite(1, random);
  rig.file().flip_byte(rig.file().place_in(0, 3).offset + 77);
  // Nobody looks at states that stay where they are.
  CHECK(rig.step(2, {1, 0, 0}, kCapture).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  for (int c = 0; c < kChunks; ++c) rig.aim(1, c);
  rig.rewrite(1, random);
  CHECK(rig.step(3, {0, 0, 0}, kCapture).error == kDamaged);
  CHECK(rig.pipeline().progress().failure().chunk == 3);
}

void test_a_wrong_checksum_from_before_is_damage(Make make) {
  doing("wrong checksum");
  for (const bool resident : {false, true}) {
    Rig rig(make({4, 4096}), durable(2, Order::given, {}));
    CHECK(rig.step(1, -1, kCapture).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
    Pipeline other(rig.engine(), best_isa(), Order::given, {1, 1});
    std::vector<char> memory(1 << 20);
    other.set_ring({reinterpret_cast<char*>(
                        (reinterpret_cast<std::uintptr_t>(memory.data()) + 4095) / 4096 * 4096),
                    1, 1 << 18});
    ChunkSpec spec = rig.file().spec(2);
    spec.place = rig.pipeline().ledger().place(2);
    std::vector<char> m(4096), v(4096);
    if (resident) spec.resident[0] = m.data();
    if (resident) spec.resident[1] = v.data();
    std::vector<std::uint32_t> sums = rig.pipeline().ledger().checksums(2).states;
    sums[0] ^= 1;
    other.add_chunk(spec, false, sums);
    std::vector<float> weight(2048), gradient(2048);
    const StepParameter absent{weight.data(), nullptr, DType::f32, false, 0, 0};
    const StepParameter given{weight.data(), gradient.data(), DType::f32, false, 0, 0};
    other.begin({absent, given}, {hyper_of(2)}, {}, {});
    CHECK(other.progress().wait_published().error == kDamaged);
  }
}

}  // namespace
}  // namespace stow

int main() {
  using namespace stow;
  set_pool_threads(2);
  for (const Make make : backends()) {
    for (const StepSpec& spec : {StepSpec{}, kOpen, kBackground}) {
      test_failures_end_the_step(make, Op::read, EIO, spec);
      test_failures_end_the_step(make, Op::write, ENOSPC, spec);
    }
    test_failures_in_an_open_step_reach_who_waits_for_one(make, Op::read);
    test_failures_in_an_open_step_reach_who_waits_for_one(make, Op::write);
    test_a_failed_prefetch_is_told(make);
    test_a_failure_beside_an_update_reaches_who_waits(make);
    test_after_a_failure_gradients_are_the_callers(make);
    test_a_step_that_nobody_waits_for(make);
    test_what_is_under_way_ends_before_its_memory_does(make);
    test_failures_end_a_step_with_caller_updates(make);
    test_a_pipeline_may_go_while_a_chunk_is_acquired(make);
    test_damage_is_told_with_its_place(make);
    test_padding_and_gaps_are_told_apart(make);
    test_a_commit_checks_what_it_carries(make);
    test_a_wrong_checksum_from_before_is_damage(make);
  }
  return report();
}
