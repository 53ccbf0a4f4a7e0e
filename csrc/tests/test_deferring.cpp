// Chunks that defer updates with a zero gradient have, once they catch up, the bits of those that
// defer nothing.
#include <numeric>
#include <stdexcept>

#include "base/pool.h"
#include "pipeline_cases.h"

namespace stow {
namespace {

const std::vector<Shape> kShapes = {{{}, 8 * 1024},
                                    {{DType::bf16, StateFormat::split, false}, 4 * 1024},
                                    {{DType::f32, StateFormat::fp32, true}, 4 * 1024},
                                    {{DType::bf16, StateFormat::fp32, false, true}, 3 * 1024},
                                    {{DType::bf16, StateFormat::int8, false}, 4 * 1024},
                                    {{}, 900}};

std::vector<int> all_of(Rig& rig) {
  std::vector<int> chunks(rig.file().chunks());
  std::iota(chunks.begin(), chunks.end(), 0);
  return chunks;
}

std::vector<int> some_of(Rig& rig, std::mt19937& random, unsigned of_ten) {
  std::vector<int> chunks;
  for (int c = 0; c < rig.file().chunks(); ++c) {
    if (random() % 10 < of_ten) chunks.push_back(c);
  }
  return chunks;
}

// Those of one parameter alone.
std::vector<int> single(Rig& rig) {
  std::vector<int> chunks;
  for (int c = 0; c < rig.file().chunks(); ++c) {
    if (rig.file().spec(c).segments.size() == 1) chunks.push_back(c);
  }
  return chunks;
}

std::int64_t lagging(Rig& rig) {
  std::int64_t found = 0;
  for (int p = 0; p < rig.training().size(); ++p) found += rig.pipeline().ledger().lagging(p);
  return found;
}

// Whole steps and open ones, commits, prefetches, and chunks that catch up in between.
void test_the_bits_are_the_same(Make make) {
  doing("deferring");
  for (unsigned seed = 0; seed < 24; ++seed) {
    doing("deferring", seed);
    std::mt19937 random(seed);
    RigOptions options = durable(1 + static_cast<int>(random() % 4), kOrders[seed % 2], {1, 4});
    options.shapes = kShapes;
    options.small_slots = seed % 3 == 0 ? 0 : 1 + static_cast<int>(random() % 12);
    Rig rig(make({4, 4096}), options);
    rig.pipeline().ledger().set_deferring(single(rig), true);
    std::int64_t most = 0;
    for (int number = 1; number <= 30; ++number) {
      rig.leave_untouched(some_of(rig, random, 7));
      std::vector<char> due = rig.training().all_but(
          static_cast<int>(random() % 12) - 1 < 6 ? static_cast<int>(random() % 6) : -1);
      StepSpec spec{.open = random() % 3 == 0, .capture = random() % 6 == 0};
      if (random() % 2 == 0) rig.pipeline().prefetch();
      if (spec.open) {
        rig.begin(number, due, spec);
        for (int p = 0; p < rig.training().size(); ++p) {
          if (due[p] && random() % 8 != 0) rig.add_gradient(p);
        }
        rig.pipeline().close();
        CHECK(rig.pipeline().progress().wait_published().error == 0);
      } else {
        CHECK(rig.step(number, due, spec).error == 0);
      }
      most = std::max(most, lagging(rig));
      if (spec.capture) {
        CHECK(lagging(rig) == 0);
        CHECK(rig.pipeline().progress().wait_written().error == 0);
        CHECK(all_captured(rig) && captures_agree(rig));
        CHECK(rig.training().agrees());
      }
      if (random() % 5 == 0) rig.catch_up(some_of(rig, random, 5));
      if (random() % 9 == 0) {
        rig.catch_up(all_of(rig));
        check_all(rig);
      }
      if (random() % 11 == 0) rig.pipeline().ledger().set_deferring(single(rig), random() % 4 != 0);
    }
    CHECK(most > 0);
    rig.catch_up(all_of(rig));
    CHECK(lagging(rig) == 0);
    check_all(rig);
  }
}

void test_what_is_deferred_is_not_moved(Make make) {
  doing("deferring moves less");
  RigOptions options = with(2, Order::given, {});
  options.shapes.assign(1, Shape{{}, 16 * 1024});
  Rig rig(make({4, 4096}), options);
  const std::int64_t chunk = Layout(rig.file().spec(0)).state_bytes();
  rig.pipeline().ledger().set_deferring(all_of(rig), true);
  CHECK(rig.step(1).error == 0);
  std::vector<int> untouched = all_of(rig);
  untouched.erase(untouched.begin() + 3);
  rig.leave_untouched(untouched);
  CHECK(rig.pipeline().quiesce().error == 0);
  const PipelineCounters before = rig.pipeline().counters();
  for (int number = 2; number <= 11; ++number) {
    rig.pipeline().prefetch();
    CHECK(rig.step(number).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
  }
  PipelineCounters after = rig.pipeline().counters();
  CHECK(after.bytes_read - before.bytes_read == 10 * chunk);
  CHECK(after.bytes_written - before.bytes_written == 10 * chunk);
  CHECK(rig.pipeline().ledger().lagging(0) == rig.file().chunks() - 1);
  CHECK(!rig.training().agrees());
  rig.catch_up({0, 1});
  CHECK(rig.pipeline().quiesce().error == 0);
  CHECK(rig.pipeline().counters().bytes_read - after.bytes_read == 2 * chunk);
  CHECK(rig.pipeline().ledger().lagging(0) == rig.file().chunks() - 3);
  rig.catch_up(all_of(rig));
  check_all(rig);
}

// Chunks that have caught up wait in their slots for the step, and are read and written once.
void test_what_is_read_before_a_step_is_moved_once(Make make) {
  doing("small slots");
  RigOptions options = with(1, Order::given, {});
  options.shapes.assign(1, Shape{{}, 16 * 1024});
  options.small_slots = 4;
  Rig rig(make({4, 4096}), options);
  const std::int64_t chunk = Layout(rig.file().spec(0)).state_bytes();
  rig.pipeline().ledger().set_deferring(all_of(rig), true);
  CHECK(rig.step(1).error == 0);
  rig.leave_untouched(all_of(rig));
  CHECK(rig.step(2).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  PipelineCounters before = rig.pipeline().counters();
  rig.catch_up({3, 4, 5});
  CHECK(rig.pipeline().progress().wait_written().error == 0);
  CHECK(rig.pipeline().counters().bytes_read - before.bytes_read == 3 * chunk);
  CHECK(rig.pipeline().counters().bytes_written == before.bytes_written);
  std::vector<int> untouched = all_of(rig);
  untouched.erase(untouched.begin() + 3, untouched.begin() + 5);
  rig.leave_untouched(untouched);
  CHECK(rig.step(3).error == 0);
  CHECK(rig.pipeline().progress().wait_written().error == 0);
  CHECK(rig.pipeline().counters().bytes_read - before.bytes_read == 3 * chunk);
  CHECK(rig.pipeline().counters().bytes_written - before.bytes_written == 2 * chunk);
  CHECK(rig.pipeline().quiesce().error == 0);  // the third is written too
  CHECK(rig.pipeline().counters().bytes_written - before.bytes_written == 3 * chunk);
  CHECK(rig.pipeline().counters().slots_in_use == 0);
  // More than there are slots for: those that came first are written.
  before = rig.pipeline().counters();
  rig.catch_up({6, 7, 8, 9, 10, 11, 12});
  CHECK(rig.pipeline().progress().wait_written().error == 0);
  CHECK(rig.pipeline().counters().bytes_read - before.bytes_read == 7 * chunk);
  const std::int64_t written = rig.pipeline().counters().bytes_written - before.bytes_written;
  CHECK(written >= 3 * chunk && written <= 7 * chunk);
  CHECK(rig.pipeline().counters().small_high_water == 4);
  rig.catch_up(all_of(rig));
  check_all(rig);
}

// The place of a chunk that has left an update out is not that of the next commit: a commit writes
// elsewhere, so that the last one stays whole.
void test_what_is_left_out_is_not_captured(Make make) {
  doing("deferred and captured");
  for (const bool open : {false, true}) {
    RigOptions options = durable(2, Order::given, {});
    options.shapes.assign(1, Shape{{}, 3 * 1024});
    Rig rig(make({4, 4096}), options);
    rig.pipeline().ledger().set_deferring(all_of(rig), true);
    CHECK(rig.step(1, -1, kCapture).error == 0);
    CHECK(rig.pipeline().progress().wait_written().error == 0);
    CHECK(all_captured(rig));
    rig.leave_untouched({0, 2});
    rig.begin(2, {0}, open ? kOpen : StepSpec{});
    if (open) rig.pipeline().close();
    CHECK(rig.pipeline().progress().wait_published().error == 0);
    CHECK(all_captured(rig));  // no gradient, no update
    rig.begin(3, {1}, open ? kOpen : StepSpec{});
    if (open) rig.add_gradient(0);
    if (open) rig.pipeline().close();
    CHECK(rig.pipeline().progress().wait_published().error == 0);
    for (int c = 0; c < 3; ++c) CHECK(!rig.pipeline().ledger().captured(c));
    rig.catch_up(all_of(rig));
    check_all(rig);
  }
}

// What has to be made up for at once is bounded.
void test_all_catch_up_now_and_then(Make make) {
  doing("deferring is bounded");
  RigOptions options = with(2, Order::given, {});
  options.shapes.assign(1, Shape{{}, 2 * 1024});
  Rig rig(make({4, 4096}), options);
  rig.pipeline().ledger().set_deferring(all_of(rig), true);
  rig.leave_untouched({0});
  int caught_up = 0;
  for (int number = 1; number <= 600; ++number) {
    CHECK(rig.step(number).error == 0);
    caught_up += rig.pipeline().ledger().lagging(0) == 0 ? 1 : 0;
  }
  CHECK(caught_up == 2);
  rig.catch_up(all_of(rig));
  check_all(rig);
}

void test_wrong_calls_are_refused(Make make) {
  doing("deferring refuses");
  RigOptions options = with(2, Order::alternating, {});
  options.shapes = {{{}, 700}, {{}, 700}};
  Rig rig(make({4, 4096}), options);
  CHECK(throws<std::invalid_argument>([&] { rig.pipeline().ledger().set_deferring({0}, true); }));
  Rig other(make({4, 4096}), with(2));
  other.pipeline().ledger().set_deferring({0}, true);
  CHECK(throws<std::logic_error>([&] { other.begin(1, {1, 1, 1}, kOutside); }));
  other.begin(1, {1, 1, 1}, kOpen);
  CHECK(throws<std::logic_error>([&] { other.pipeline().ledger().set_deferring({0}, false); }));
  CHECK(throws<std::logic_error>([&] { other.pipeline().ledger().want({0}); }));
  CHECK(throws<std::logic_error>([&] { other.add_chunk_gradients(0, {1, 1, 1}); }));
  other.pipeline().close();
  CHECK(other.pipeline().progress().wait_published().error == 0);
}

}  // namespace
}  // namespace stow

int main() {
  using namespace stow;
  set_pool_threads(2);
  for (const Make make : backends()) {
    test_the_bits_are_the_same(make);
    test_what_is_deferred_is_not_moved(make);
    test_what_is_read_before_a_step_is_moved_once(make);
    test_what_is_left_out_is_not_captured(make);
    test_all_catch_up_now_and_then(make);
    test_wrong_calls_are_refused(make);
  }
  return report();
}
