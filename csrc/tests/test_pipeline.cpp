// The pipeline against flat arrays in memory: bitwise equal for any ring, order, delay and
// placement. What goes wrong: test_pipeline_faults; random schedules: test_schedules.
#include <numeric>
#include <stdexcept>
#include <utility>

#include "base/pool.h"
#include "pipeline_cases.h"

namespace stow {
namespace {

// --- whole steps ---

void test_any_ring_gives_the_same_bits(Make make) {
  doing("any ring");
  for (const Order order : kOrders) {
    for (const int slots : {1, 2, 5, 9}) {
      for (const bool prefetch : {false, true}) {
        RigOptions options = with(slots, order);
        options.gap = 96;
        options.shapes = {{{}, 2048},
                          {{DType::bf16, StateFormat::split, false}, 3001},
                          {{}, 1111},
                          {{DType::f32, StateFormat::fp32, true}, 2500},
                          {{DType::bf16, StateFormat::fp32, false, true}, 1025},
                          {{DType::bf16, StateFormat::int8, false}, 2047}};
        Rig rig(make({4, 4096}), options);
        rig.engine().faults().add({Op::read, 3, 6, 0, 0, 300});
        rig.engine().faults().add({Op::write, 5, 6, 0, 0, 300});
        for (int number = 1; number <= 8; ++number) {
          if (prefetch) rig.pipeline().prefetch();
          CHECK(rig.step(number, number % 5 == 4 ? number % 3 : -1).error == 0);
          CHECK(rig.training().agrees());
        }
        check_all(rig);
        CHECK(rig.pipeline().counters().slots_high_water <= slots);
      }
    }
  }
}

// Chunks of more than one block, which threads share and checksums cover one by one.
void test_chunks_of_many_blocks(Make make) {
  doing("many blocks");
  RigOptions options = with(2, Order::alternating, {1});
  options.capacity = 3 * kUpdateBlock / 2;
  options.shapes = {{{}, 2 * kUpdateBlock + 7}, {{}, kUpdateBlock - 40}};
  options.gap = 32;
  Rig rig(make({4, 1 << 16}), options);
  for (int number = 1; number <= 4; ++number) CHECK(rig.step(number, number == 2).error == 0);
  check_all(rig);
}

void test_quiet_between_steps(Make make) {
  doing("quiet between steps");
  Rig rig(make({4, 4096}), with(3));
  CHECK(rig.step(1).error == 0);
  for (int round = 2; round < 20; ++round) {
    rig.pipeline().prefetch();
    if (round % 3 != 0) CHECK(rig.pipeline().quiesce().error == 0);
    if (round % 2 == 0) CHECK(rig.step(round).error == 0);
    CHECK(rig.training().agrees());
  }
  check_all(rig);
}

// A blank chunk at the head of the order waits for a slot while read-ahead holds them all.
void test_every_chunk_is_updated_once(Make make) {
  doing("updated once");
  for (const Order order : kOrders) {
    for (const int slots : {1, 2, 3}) {
      Rig rig(make({4, 4096}), with(slots, order));
      for (int number = 1; number <= 6; ++number) {
        rig.pipeline().prefetch();
        usleep(3000);
        CHECK(rig.step(number, number <= 3 ? 0 : -1).error == 0);
        CHECK(rig.training().agrees());
      }
      CHECK(rig.pipeline().counters().chunks_updated == 3 * 4 + 3 * 6);
      check_all(rig);
    }
  }
}

void test_states_say_where_memory_is(Make make) {
  doing("states");
  Rig rig(make({4, 4096}), with(3));
  CHECK(rig.pipeline().ledger().state(0) == ChunkState::blank);
  CHECK(rig.pipeline().ledger().state(kChunks - 1) == ChunkState::resident);
  CHECK(rig.step(1, 0).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  CHECK(rig.pipeline().ledger().state(0) == ChunkState::blank);  // no gradient, never written
  CHECK(rig.pipeline().ledger().state(2) == ChunkState::stored);
  CHECK(rig.pipeline().counters().bytes_read == 0);  // zeros are not read
}

// What a step's end left in the ring is not read again, written out already or not.
void test_the_next_step_begins_with_what_the_ring_holds(Make make) {
  doing("spared");
  for (const int slots : {1, 2, 4, 6}) {
    for (const bool hasty : {true, false}) {
      Rig rig(make({4, 4096}), with(slots, Order::alternating, {}));
      rig.engine().faults().add({Op::write, 0, -1, 0, 0, 300});
      const std::int64_t all = rig.file().stored_bytes();
      for (int number = 1; number <= 5; ++number) {
        CHECK(rig.step(number).error == 0);
        if (!hasty) CHECK(rig.pipeline().progress().wait_written().error == 0);
        if (!hasty && number % 2 == 0) rig.pipeline().prefetch();
      }
      const PipelineCounters counters = rig.pipeline().counters();
      // A step that begins beside the last one's writes takes some out of turn.
      const bool in_turn = !hasty || slots == kChunks;
      CHECK(counters.bytes_spared <= 4 * all * slots / kChunks);
      CHECK(counters.bytes_spared >= 4 * all * (in_turn ? slots : 1) / kChunks);
      CHECK(counters.bytes_read + counters.bytes_spared == 4 * all);
      check_all(rig);
      CHECK(rig.pipeline().counters().bytes_written == 5 * all);
      CHECK(rig.step(6).error == 0);  // the ring was let go: everything is read
      CHECK(rig.pipeline().counters().bytes_spared == counters.bytes_spared);
    }
  }
}

void test_given_orders_are_kept(Make make) {
  doing("given order");
  Rig rig(make({4, 4096}), with(1, Order::given, {}));
  const std::vector<int> order = {3, 0, 5, 1, 4, 2};
  rig.pipeline().set_order(order);
  rig.pipeline().trace().start(1000);
  for (int number = 1; number <= 3; ++number) {
    CHECK(rig.step(number).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
  }
  std::vector<int> updated;
  for (const Event& event : rig.pipeline().trace().events()) {
    if (event.lane == Lane::update) updated.push_back(event.chunk);
  }
  for (int step = 0; step < 3; ++step) {
    CHECK(std::equal(order.begin(), order.end(), updated.begin() + 6 * step));
  }
  CHECK(throws<std::invalid_argument>([&] { rig.pipeline().set_order({0, 1, 2, 3, 4, 4}); }));
  CHECK(throws<std::invalid_argument>([&] { rig.pipeline().set_order({0, 1, 2}); }));
  check_all(rig);
}

void test_wrong_calls_are_refused(Make make) {
  doing("wrong calls");
  Rig rig(make({4, 4096}), durable(2, Order::given));
  Pipeline& pipeline = rig.pipeline();
  CHECK(throws<std::logic_error>([&] { pipeline.close(); }));
  CHECK(throws<std::logic_error>([&] { pipeline.add_gradient(0, nullptr, DType::f32); }));
  CHECK(throws<std::invalid_argument>([&] { pipeline.begin({}, {}, {}, {}); }));
  CHECK(throws<std::invalid_argument>([&] {
    ChunkSpec spec = rig.file().spec(0);
    spec.place = rig.file().place_in(0, 0);
    pipeline.add_chunk(spec, false, {});  // stored, and nobody says what its checksums are
  }));
  CHECK(throws<std::invalid_argument>(
      [&] { pipeline.add_chunk(rig.file().spec(0), true, {1, 2, 3}); }));
  const auto is_refused = [&](std::int32_t parameter, std::int64_t from, std::int64_t to,
                              std::int64_t count) {
    ChunkSpec spec = rig.file().spec(0);
    spec.segments.push_back({parameter, from, to, count});
    return throws<std::invalid_argument>([&] { pipeline.add_chunk(spec, true, {}); });
  };
  const std::int64_t elements = rig.file().spec(0).elements;
  CHECK(is_refused(-1, 0, elements, 0));
  CHECK(is_refused(0, -1, elements, 0));
  CHECK(is_refused(0, 0, elements, 1));
  CHECK(is_refused(0, 0, elements + 1, 0));
  CHECK(is_refused(0, 0, elements, std::int64_t{1} << 62));
  CHECK(is_refused(0, 0, 0, 1));  // it lies over those before
  rig.begin(1, rig.training().all_but(2), kOpen);
  CHECK(throws<std::logic_error>([&] { rig.begin(1, rig.training().all_but(), {}); }));
  rig.add_gradient(0);
  CHECK(throws<std::logic_error>([&] { pipeline.add_gradient(0, nullptr, DType::f32); }));  // twice
  CHECK(throws<std::logic_error>(
      [&] { pipeline.add_gradient(2, nullptr, DType::f32); }));  // unexpected
  // It could be in the middle of its write, or its slot be without its states.
  CHECK(throws<std::logic_error>([&] { rig.aim(1, 2); }));
  CHECK(throws<std::logic_error>([&] { pipeline.set_ring({}); }));
  pipeline.close();
  CHECK(throws<std::logic_error>([&] { pipeline.close(); }));
}

// --- open steps ---

void test_gradients_land_in_any_order(Make make) {
  doing("any order");
  for (const Order order : kOrders) {
    for (const int slots : {1, 2, 3}) {
      RigOptions options = with(slots, order, {0, 5});
      options.shapes.assign(4, Shape{{}, 1700});  // chunks share parameters
      Rig rig(make({4, 4096}), options);
      std::vector<int> turn(4);
      std::iota(turn.begin(), turn.end(), 0);
      int number = 0;
      do {
        if (number % 3 == 0) rig.pipeline().prefetch();
        rig.begin(++number, rig.training().all_but(), kOpen);
        for (const int p : turn) {
          rig.add_gradient(p);
          if (number % 4 == p) usleep(300);
        }
        rig.pipeline().close();
        CHECK(rig.pipeline().progress().wait_published().error == 0);
        CHECK(rig.training().agrees());
      } while (std::next_permutation(turn.begin(), turn.end()));
      check_all(rig);
      const PipelineCounters counters = rig.pipeline().counters();
      CHECK(counters.chunks_updated == 24 * rig.file().chunks());
      // Whoever waited in vain for his gradient, and made room, was read once more.
      CHECK(counters.bytes_read + counters.bytes_spared >= 23 * rig.file().stored_bytes());
    }
  }
}

// Each chunk's gradients in turn, from memory that is used again when the chunk is updated.
void test_gradients_land_chunk_by_chunk(Make make) {
  doing("chunk by chunk");
  for (const StepSpec& spec : {kOpen, kOpenCapture}) {
    for (const bool backwards : {false, true}) {
      RigOptions options = spec.capture ? durable(2, Order::given, {0, 5}) : with(2);
      options.shapes.assign(4, Shape{{}, 1700});  // chunks share parameters
      Rig rig(make({4, 4096}), options);
      for (int number = 1; number <= 6; ++number) {
        const int late = number % 3 == 0 ? 1 : -1;  // one that never comes
        if (spec.capture) {
          for (int c = 0; c < rig.file().chunks(); ++c) rig.aim(number % 2, c);
        }
        rig.begin(number, rig.training().all_but(), spec);
        for (int k = 0; k < rig.file().chunks(); ++k) {
          const int c = backwards ? rig.file().chunks() - 1 - k : k;
          rig.add_chunk_gradients(c, rig.training().all_but(late));
          if (number % 2 == 0) {
            CHECK(rig.pipeline().progress().wait_chunk(c).error == 0);
            CHECK(rig.pipeline().progress().is_updated(c));
            rig.spoil_pieces(c);
          }
        }
        rig.pipeline().close();
        CHECK(rig.pipeline().progress().wait_published().error == 0);
        CHECK(rig.training().agrees());
        if (spec.capture) CHECK(rig.pipeline().progress().wait_written().error == 0);
      }
      check_all(rig);
    }
  }
}

void test_a_piece_comes_once(Make make) {
  doing("pieces twice");
  RigOptions options = with(2, Order::alternating, {});
  options.shapes.assign(2, Shape{{}, 1700});
  Rig rig(make({4, 4096}), options);
  const auto add = [&](int parameter) {
    rig.pipeline().add_chunk_gradients(0, {{parameter, &rig, DType::f32}});
  };
  CHECK(throws<std::logic_error>([&] { add(0); }));
  rig.begin(1, rig.training().all_but(), kOpen);
  rig.add_chunk_gradients(0, rig.training().all_but());
  CHECK(throws<std::logic_error>([&] { add(0); }));
  CHECK(throws<std::out_of_range>([&] { add(1); }));
  for (int c = 1; c < rig.file().chunks(); ++c)
    rig.add_chunk_gradients(c, rig.training().all_but());
  rig.pipeline().close();
  CHECK(rig.pipeline().progress().wait_published().error == 0);
  CHECK(rig.training().agrees());
}

// The ring is full of chunks that were read ahead when the last one's gradient comes first.
void test_a_chunk_makes_room_for_one_that_has_its_gradient(Make make) {
  doing("eviction");
  RigOptions options = with(2, Order::given, {});
  options.shapes.assign(6, Shape{{}, 1024});
  Rig rig(make({4, 4096}), options);
  CHECK(rig.step(1).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  rig.begin(2, rig.training().all_but(), kOpen);
  CHECK(soon([&] { return rig.pipeline().ledger().state(1) == ChunkState::ready; }));
  for (const int p : {5, 4, 3, 2, 1, 0}) {
    rig.add_gradient(p);
    CHECK(rig.pipeline().progress().wait_parameters({p}).error == 0);  // before the others come
    CHECK(rig.pipeline().progress().is_published(p));
    CHECK(rig.training().at(p).agrees());
    CHECK(p == 0 || !rig.pipeline().progress().is_published(0));
  }
  rig.pipeline().close();
  CHECK(rig.pipeline().progress().wait_published().error == 0);
  check_all(rig);
  CHECK(rig.pipeline().counters().chunks_updated == 12);
}

// Of two slots one is for the chunk whose gradients come next, whoever has theirs.
void test_a_chunk_is_read_before_its_gradient(Make make) {
  doing("ahead of gradients");
  RigOptions options = with(2, Order::given, {});
  options.shapes.assign(6, Shape{{}, 1024});
  Rig rig(make({4, 4096}), options);
  CHECK(rig.step(1).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  const auto reads = [&](int chunk) {
    return rig.pipeline().ledger().state(chunk) == ChunkState::reading;
  };
  rig.engine().faults().add({Op::read, 0, 4, 0, 0, 300000});  // the first two chunks
  rig.pipeline().trace().start(1000);
  rig.begin(2, rig.training().all_but(), {.open = true, .newest_first = true});
  CHECK(soon([&] { return reads(0) && reads(1); }));
  for (const int p : {0, 1, 2, 3}) rig.add_gradient(p);
  CHECK(soon([&] { return rig.pipeline().progress().is_published(2); }));
  for (const int p : {4, 5}) rig.add_gradient(p);
  rig.pipeline().close();
  CHECK(rig.pipeline().progress().wait_published().error == 0);
  check_all(rig);
  std::vector<int> read;
  for (const Event& event : rig.pipeline().trace().events()) {
    if (event.lane == Lane::read) read.push_back(event.chunk);
  }
  // The last one of the window comes before the oldest of those that have their gradients.
  CHECK(std::find(std::find(read.begin(), read.end(), 5), read.end(), 2) != read.end());
}

// A chunk that the gradients of later ones have passed by gives its slot up to them.
void test_a_late_chunk_makes_room(Make make) {
  doing("late gradients");
  RigOptions options = with(2, Order::given, {});
  options.shapes.assign(6, Shape{{}, 1024});
  Rig rig(make({4, 4096}), options);
  CHECK(rig.step(1).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  rig.pipeline().trace().start(1000);
  rig.begin(2, rig.training().all_but(), {.open = true, .newest_first = true});
  CHECK(soon([&] { return rig.pipeline().ledger().state(0) == ChunkState::ready; }));
  rig.engine().faults().add({Op::read, 0, 4, 0, 0, 50000});  // meanwhile the others come
  for (const int p : {1, 2, 3, 4, 5}) rig.add_gradient(p);
  for (const int p : {1, 2, 3, 4, 5}) {
    CHECK(soon([&] { return rig.pipeline().progress().is_published(p); }));
  }
  rig.add_gradient(0);
  rig.pipeline().close();
  CHECK(rig.pipeline().progress().wait_published().error == 0);
  check_all(rig);
  int reads = 0;
  for (const Event& event : rig.pipeline().trace().events()) {
    reads += event.lane == Lane::read && event.chunk == 0 ? 1 : 0;
  }
  CHECK(reads == 2);
}

// The same where what fills the ring has no part in the step, or must only pass through it.
void test_whoever_idles_in_the_ring_makes_room(Make make) {
  doing("idle in the ring");
  for (const bool capture : {false, true}) {
    RigOptions options = durable(2, Order::alternating, {3});
    options.shapes.assign(4, Shape{{}, 1024});
    Rig rig(make({4, 4096}), options);
    CHECK(rig.step(1, {1, 1, 0, 1}).error == 0);
    rig.begin(2, {0, 0, 1, 1}, capture ? kOpenCapture : kOpen);
    CHECK(rig.pipeline().progress().is_published(0));
    usleep(3000);
    for (const int p : {2, 3}) {
      rig.add_gradient(p);
      CHECK(rig.pipeline().progress().wait_parameters({p}).error == 0);
    }
    rig.pipeline().close();
    CHECK(rig.pipeline().progress().wait_published().error == 0);
    check_all(rig);
    CHECK(captures_agree(rig));
  }
  // Read-ahead holds every slot when a resident chunk's turn in a commit comes.
  RigOptions options = durable(2, Order::given, {0});
  options.shapes.assign(4, Shape{{}, 1024});
  Rig rig(make({4, 4096}), options);
  CHECK(rig.step(1).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  rig.begin(2, rig.training().all_but(), kOpenCapture);
  CHECK(soon([&] { return rig.pipeline().ledger().state(2) == ChunkState::ready; }));
  for (const int p : {0, 3, 2, 1}) {
    rig.add_gradient(p);
    CHECK(rig.pipeline().progress().wait_parameters({p}).error == 0);
  }
  rig.pipeline().close();
  CHECK(rig.pipeline().progress().wait_written().error == 0);
  check_all(rig);
  CHECK(all_captured(rig) && captures_agree(rig));
}

void test_expected_gradients_may_stay_out(Make make) {
  doing("missing gradients");
  for (const Order order : kOrders) {
    for (int missing = 0; missing < 8; ++missing) {
      for (const bool capture : {false, true}) {
        Rig rig(make({4, 4096}), durable(2, order, {1, 4}));
        for (int number = 1; number <= 4; ++number) {
          rig.begin(number, rig.training().all_but(number == 3 ? 1 : -1),
                    capture ? kOpenCapture : kOpen);
          for (int p = 0; p < 3; ++p) {
            if ((missing >> p & 1) == 0 && !(number == 3 && p == 1)) rig.add_gradient(p);
          }
          if (number == 2) usleep(1000);
          rig.pipeline().close();
          for (int p = 0; p < 3; ++p) {  // who got none waits for nobody
            if (missing >> p & 1) CHECK(rig.pipeline().progress().is_published(p));
          }
          CHECK(rig.pipeline().progress().wait_published().error == 0);
          for (int p = 0; p < 3; ++p) CHECK(rig.pipeline().progress().is_published(p));
          CHECK(rig.training().agrees());
          if (!capture) continue;
          CHECK(rig.pipeline().progress().wait_written().error == 0);
          CHECK(all_captured(rig));
          CHECK(captures_agree(rig));
        }
        check_all(rig);
      }
    }
  }
}

// --- captures ---

void test_a_commit_has_states_and_weights(Make make) {
  doing("captures");
  for (const Order order : kOrders) {
    for (const int slots : {1, 2, 6}) {
      RigOptions options = durable(slots, order, {1, 4});
      options.shapes = {{{}, 2048},
                        {{DType::bf16, StateFormat::split, false}, 3001},
                        {{}, 1111},
                        {{DType::bf16, StateFormat::int8, false}, 999}};
      options.gap = 64;
      Rig rig(make({4, 4096}), options);
      CHECK(!all_captured(rig));
      for (int number = 1; number <= 6; ++number) {
        // Now and then nobody has a gradient: the commit alone.
        std::vector<char> due = rig.training().all_but(number % 4);
        if (number == 1 || number == 4) due.assign(due.size(), 0);
        CHECK(rig.step(number, due, kCapture).error == 0);
        CHECK(rig.pipeline().progress().wait_written().error == 0);
        CHECK(all_captured(rig));
        CHECK(captures_agree(rig));
        if (number == 3) CHECK(rig.step(103).error == 0);
        if (number == 5) rig.reopen();
      }
      check_all(rig);
    }
  }
}

void test_a_commit_writes_what_the_disk_has_not(Make make) {
  doing("carried");
  RigOptions options = durable(2, Order::given, {3});
  options.shapes.assign(4, Shape{{}, 1024});
  Rig rig(make({4, 4096}), options);
  const Layout layout(rig.file().spec(0));
  const std::int64_t states = layout.state_bytes();
  const std::int64_t weight = layout.weight().bytes;
  std::int64_t written = 0;
  const auto newly = [&] {
    CHECK(rig.pipeline().progress().wait_written().error == 0);
    const std::int64_t now = rig.pipeline().counters().bytes_written;
    return now - std::exchange(written, now);
  };
  const std::vector<char> none(4, 0);
  CHECK(rig.step(1, {1, 0, 0, 0}).error == 0);
  CHECK(newly() == states);
  CHECK(rig.pipeline().ledger().captured(0) == false);
  // 0: weights alone; 1, 2: blank, weights alone; 3: its memory and its weights.
  CHECK(rig.step(2, none, kCapture).error == 0);
  CHECK(newly() == 4 * weight + states);
  CHECK(rig.pipeline().ledger().state(1) == ChunkState::blank);
  CHECK(rig.pipeline().ledger().state(3) == ChunkState::resident);
  CHECK(all_captured(rig) && captures_agree(rig));
  CHECK(rig.pipeline().counters().bytes_read == 0);
  // Nothing has changed: nothing is written.
  CHECK(rig.step(3, none, kCapture).error == 0);
  CHECK(newly() == 0);
  // Somebody wrote one weight.
  std::mt19937 random(5);
  rig.rewrite(0, random);
  CHECK(!rig.pipeline().ledger().captured(0) && rig.pipeline().ledger().captured(1));
  CHECK(rig.step(4, none, kCapture).error == 0);
  CHECK(newly() == weight);
  CHECK(all_captured(rig) && captures_agree(rig));
  // Chunk 0 goes elsewhere: it is read, checked and written whole; the old place is left alone.
  const std::vector<char> before = rig.file().read_area(0);
  for (std::size_t c = 0; c < 4; ++c) rig.aim(1, c);
  rig.rewrite(0, random);
  CHECK(rig.step(5, {0, 1, 0, 1}, kCapture).error == 0);
  CHECK(newly() == 3 * (states + weight));
  CHECK(rig.file().read_area(0) == before);
  CHECK(rig.pipeline().ledger().place(0) == rig.file().place_in(1, 0));
  CHECK(rig.pipeline().ledger().place(1) == rig.file().place_in(1, 1));
  CHECK(rig.pipeline().ledger().place(2) == rig.file().place_in(0, 2));  // had nothing new
  CHECK(rig.pipeline().ledger().place(3) == rig.file().place_in(1, 3));
  CHECK(all_captured(rig) && captures_agree(rig));
  check_all(rig);
}

void test_a_target_moves_the_next_write_alone(Make make) {
  doing("targets");
  for (const Order order : kOrders) {
    for (const int slots : {2, 6}) {
      Rig rig(make({4, 4096}), durable(slots, order));
      for (int number = 1; number <= 8; ++number) {
        const std::vector<char> before = rig.file().read_area((number + 1) % 2);
        for (int c = 0; c < rig.file().chunks(); ++c) {
          CHECK(rig.pipeline().progress().wait_written().error == 0);
          rig.aim(number % 2, c);
        }
        if (number % 3 == 0) rig.pipeline().prefetch();  // from the old place
        CHECK(rig.step(number, -1, kCapture).error == 0);
        CHECK(rig.pipeline().progress().wait_written().error == 0);
        CHECK(rig.file().read_area((number + 1) % 2) == before);
        for (int c = 0; c < rig.file().chunks(); ++c) {
          CHECK(rig.pipeline().ledger().place(c) == rig.file().place_in(number % 2, c));
        }
        CHECK(all_captured(rig) && captures_agree(rig));
      }
      check_all(rig);
    }
  }
}

void test_a_weight_written_behind_a_commit_is_not_captured(Make make) {
  doing("forgotten capture");
  Rig rig(make({4, 4096}), durable(6, Order::given, {}));
  rig.engine().faults().add({Op::write, 0, 2, 0, 0, 20000});
  CHECK(rig.step(1, -1, kCapture).error == 0);
  std::mt19937 random(9);
  rig.rewrite(0, random);  // its chunks are being written now
  CHECK(rig.pipeline().progress().wait_written().error == 0);
  CHECK(!rig.pipeline().ledger().captured(0) && !rig.pipeline().ledger().captured(1));
  CHECK(rig.pipeline().ledger().captured(2));
  CHECK(rig.step(2, std::vector<char>(3, 0), kCapture).error == 0);
  CHECK(rig.pipeline().progress().wait_written().error == 0);
  CHECK(all_captured(rig) && captures_agree(rig));
}

void test_another_pipeline_goes_on_where_one_ended(Make make) {
  doing("reopen");
  for (const bool is_durable : {false, true}) {
    RigOptions options = is_durable ? durable(2, Order::given, {1, 4}) : with(2);
    options.shapes[1].family = {DType::bf16, StateFormat::split, false};
    Rig rig(make({4, 4096}), options);
    for (int number = 1; number <= 9; ++number) {
      CHECK(rig.step(number, number == 1 ? 2 : -1, is_durable ? kCapture : StepSpec{}).error == 0);
      if (number % 2 == 1) rig.reopen();
      for (int p = 0; p < 3; ++p) {
        if (rig.training().at(p).is_16_bit())
          CHECK(rig.unchanged(p) == rig.training().at(p).recorded);
      }
    }
    check_all(rig);
  }
}

// --- in the background ---

void test_nobody_has_to_wait_while_a_step_runs(Make make) {
  doing("background");
  for (const bool resident_first : {false, true}) {
    // With all states at resident no write's end wakes who waits.
    for (const std::vector<int>& resident : {std::vector<int>{0, 1, 2, 3, 4, 5}, kHome, {}}) {
      Rig rig(make({4, 4096}), with(2, Order::given, resident));
      StepSpec spec = kBackground;
      spec.resident_first = resident_first;
      for (int number = 1; number <= 12; ++number) {
        rig.begin(number, rig.training().all_but(), spec);
        if (number % 4 == 0)
          CHECK(rig.pipeline().progress().wait_parameters({number % 3}).error == 0);
        if (number % 4 == 0) CHECK(rig.training().at(number % 3).agrees());
        if (number % 4 == 1) CHECK(rig.pipeline().progress().wait_written().error == 0);
        if (number % 4 == 2) CHECK(rig.pipeline().quiesce().error == 0);
        if (number % 4 != 0 && number % 4 != 3) CHECK(rig.training().agrees());
        CHECK(rig.pipeline().progress().wait_published().error == 0);
        CHECK(rig.training().agrees());
      }
      check_all(rig);
    }
  }
}

// [Note: Help] in scheduler.h.
void test_updates_wait_for_a_caller_who_helps(Make make) {
  doing("help");
  RigOptions options;
  options.shapes.assign(6, Shape{{}, 900});
  options.slots = 8;
  Rig rig(make({2, 4096}), options);
  Pipeline& pipeline = rig.pipeline();
  const auto updated = [&] { return pipeline.counters().chunks_updated; };
  CHECK(rig.step(1).error == 0);  // there is something to read from now on
  CHECK(pipeline.quiesce().error == 0);
  for (const bool waits : {false, true}) {
    const std::int64_t before = updated();
    rig.engine().faults().add({Op::read, 4, 2, 0, 0, 1000000});
    rig.begin(waits ? 3 : 2, rig.training().all_but(), {.caller = Caller::helps});
    usleep(50000);
    CHECK(updated() == before);  // something is being read: the scheduler's thread updates nothing
    pipeline.help();
    CHECK(updated() > before);
    CHECK(updated() < before + rig.file().chunks());
    if (waits) CHECK(pipeline.progress().wait_published().error == 0);
    while (!pipeline.progress().is_over()) usleep(1000);  // nobody has to help or wait
    CHECK(rig.training().agrees());
    CHECK(pipeline.quiesce().error == 0);
    rig.engine().faults().clear();
  }
}

void test_chunks_at_home_come_first_where_asked(Make make) {
  doing("resident first");
  for (const bool resident_first : {false, true}) {
    Rig rig(make({4, 4096}), with(6, Order::given));
    CHECK(rig.step(1).error == 0);
    CHECK(rig.pipeline().quiesce().error == 0);
    rig.pipeline().prefetch();
    for (int number = 0; number < 4; ++number) {  // whose reads end in any order
      CHECK(soon([&] { return rig.pipeline().ledger().state(number) == ChunkState::ready; }));
    }
    rig.pipeline().trace().start(100);
    CHECK(rig.step(2, -1, {.resident_first = resident_first, .caller = Caller::computes}).error ==
          0);
    std::vector<int> updated;
    for (const Event& event : rig.pipeline().trace().events()) {
      if (event.lane == Lane::update) updated.push_back(event.chunk);
    }
    CHECK(updated.size() == 6);
    CHECK((updated.front() == 4) == resident_first);
    CHECK((updated.back() == 5) == !resident_first);
  }
}

// --- updates by somebody else ---

RigOptions of_all_formats(int slots, Order order, bool durable) {
  RigOptions options = with(slots, order);
  options.gap = 96;
  options.durable = durable;
  options.shapes = {{{}, 2048},
                    {{DType::bf16, StateFormat::split, false}, 3001},
                    {{DType::f32, StateFormat::fp32, true}, 2500},
                    {{DType::bf16, StateFormat::fp32, false, true}, 1025},
                    {{DType::bf16, StateFormat::int8, false}, 2047}};
  return options;
}

void test_updates_of_acquired_chunks_give_the_same_bits(Make make) {
  doing("caller updates");
  std::mt19937 random(5);
  for (const bool commits : {false, true}) {
    for (const int slots : {1, 2, 5}) {
      Rig rig(make({4, 4096}), of_all_formats(slots, kOrders[slots % 2], commits));
      rig.engine().faults().add({Op::read, 3, 6, 0, 0, 300});
      rig.engine().faults().add({Op::write, 5, 6, 0, 0, 300});
      for (int number = 1; number <= 8; ++number) {
        if (number % 2 == 0) rig.pipeline().prefetch();
        const bool capture = commits && number % 3 == 0;
        const std::vector<char> due = rig.training().all_but(number % 5 == 4 ? number % 3 : -1);
        if (number == 6) rig.rewrite(1, random);
        // The kernel and others take turns over the same states.
        const bool by_caller = number % 4 != 3;
        rig.begin(number, due,
                  {.capture = capture,
                   .resident_first = number % 2 == 0,
                   .caller = by_caller ? Caller::updates : Caller::waits});
        if (by_caller) CHECK(rig.update_acquired(1 + number % 3, random) > 0);
        CHECK(rig.pipeline().progress().wait_published().error == 0);
        CHECK(rig.training().agrees());
        CHECK(rig.pipeline().progress().wait_written().error == 0);
        if (capture) CHECK(all_captured(rig));
        CHECK(captures_agree(rig));
        for (int p = 0; p < rig.training().size(); ++p) {
          if (rig.training().at(p).is_16_bit())
            CHECK(rig.unchanged(p) == rig.training().at(p).recorded);
        }
      }
      check_all(rig);
      CHECK(rig.pipeline().counters().slots_high_water <= slots);
    }
  }
}

// Some chunks of a step are the kernel's, and some are not.
void test_updates_on_both_sides_give_the_same_bits(Make make) {
  doing("caller updates some");
  std::mt19937 random(8);
  for (const int slots : {1, 2, 5}) {
    Rig rig(make({4, 4096}), of_all_formats(slots, kOrders[slots % 2], true));
    for (int number = 1; number <= 8; ++number) {
      std::vector<int> chosen;
      for (int c = 0; c < rig.file().chunks(); ++c) {
        if ((c + number) % 3 != 0) chosen.push_back(c);
      }
      if (number == 5) chosen.clear();
      rig.pipeline().set_caller_chunks(chosen);
      const bool capture = number % 3 == 0;
      rig.begin(number, rig.training().all_but(),
                {.open = true,
                 .capture = capture,
                 .resident_first = number % 2 == 0,
                 .caller = Caller::updates});
      for (int c = 0; c < rig.file().chunks(); ++c)
        rig.add_chunk_gradients(c, rig.training().all_but());
      rig.pipeline().close();
      CHECK(rig.update_acquired(1 + number % 3, random) == static_cast<int>(chosen.size()));
      CHECK(rig.pipeline().progress().wait_published().error == 0);
      CHECK(rig.training().agrees());
      CHECK(rig.pipeline().progress().wait_written().error == 0);
      if (capture) CHECK(all_captured(rig));
      CHECK(captures_agree(rig));
    }
    check_all(rig);
  }
}

void test_a_run_goes_on_behind_acquired_chunks(Make make) {
  doing("caller updates, reopened");
  std::mt19937 random(6);
  Rig rig(make({4, 4096}), of_all_formats(2, Order::alternating, true));
  for (int number = 1; number <= 4; ++number) {
    rig.begin(number, rig.training().all_but(), kOutsideCapture);
    CHECK(rig.update_acquired(2, random) == rig.file().chunks());
    CHECK(rig.pipeline().progress().wait_published().error == 0);
    CHECK(rig.pipeline().progress().wait_written().error == 0);
    CHECK(all_captured(rig) && captures_agree(rig));
    rig.reopen();  // sums that were taken of what came back are those of what is on disk
  }
  CHECK(rig.step(5).error == 0);
  check_all(rig);
}

void test_chunks_are_acquired_in_their_step_alone(Make make) {
  doing("caller updates, wrong calls");
  std::mt19937 random(7);
  Rig rig(make({4, 4096}), with(2));
  Pipeline& pipeline = rig.pipeline();
  CHECK(pipeline.acquire_chunk(true).chunk == -1);
  rig.begin(1, rig.training().all_but(), kOutside);
  CHECK(throws<std::logic_error>([&] { pipeline.set_caller_chunks({}); }));
  CHECK(throws<std::logic_error>([&] { pipeline.release_chunk(0); }));
  const AcquiredChunk first = pipeline.acquire_chunk(true);
  CHECK(first.chunk >= 0 && !pipeline.progress().is_updated(first.chunk));
  rig.update_one(first);
  pipeline.release_chunk(first.chunk);
  CHECK(throws<std::logic_error>([&] { pipeline.release_chunk(first.chunk); }));
  CHECK(rig.update_acquired(2, random) == kChunks - 1);
  CHECK(pipeline.acquire_chunk(true).chunk == -1);
  CHECK(pipeline.progress().wait_published().error == 0);
  // A step in which nobody has a gradient is over when it begins.
  rig.begin(2, std::vector<char>(rig.training().size()), kOutside);
  CHECK(rig.update_acquired(2, random) == 0);
  CHECK(pipeline.progress().wait_published().error == 0);
  check_all(rig);
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
  for (const Make make : backends()) {
    test_any_ring_gives_the_same_bits(make);
    test_chunks_of_many_blocks(make);
    test_quiet_between_steps(make);
    test_every_chunk_is_updated_once(make);
    test_states_say_where_memory_is(make);
    test_the_next_step_begins_with_what_the_ring_holds(make);
    test_given_orders_are_kept(make);
    test_wrong_calls_are_refused(make);
    test_gradients_land_in_any_order(make);
    test_gradients_land_chunk_by_chunk(make);
    test_a_piece_comes_once(make);
    test_a_chunk_makes_room_for_one_that_has_its_gradient(make);
    test_a_chunk_is_read_before_its_gradient(make);
    test_a_late_chunk_makes_room(make);
    test_whoever_idles_in_the_ring_makes_room(make);
    test_expected_gradients_may_stay_out(make);
    test_a_commit_has_states_and_weights(make);
    test_a_commit_writes_what_the_disk_has_not(make);
    test_a_target_moves_the_next_write_alone(make);
    test_a_weight_written_behind_a_commit_is_not_captured(make);
    test_another_pipeline_goes_on_where_one_ended(make);
    test_nobody_has_to_wait_while_a_step_runs(make);
    test_updates_wait_for_a_caller_who_helps(make);
    test_chunks_at_home_come_first_where_asked(make);
    test_updates_of_acquired_chunks_give_the_same_bits(make);
    test_updates_on_both_sides_give_the_same_bits(make);
    test_a_run_goes_on_behind_acquired_chunks(make);
    test_chunks_are_acquired_in_their_step_alone(make);
  }
  test_a_trace_is_bounded();
  return report();
}
