// Steps that are taken back, or confirmed: afterwards the bits are those of a training in which
// only what was confirmed has happened.
#include <numeric>
#include <stdexcept>
#include <utility>

#include "base/pool.h"
#include "pipeline_cases.h"

namespace stow {
namespace {

constexpr StepSpec kUndoable{.open = true, .undoable = true, .caller = Caller::launches};

RigOptions mixed(int slots, Order order, std::vector<int> resident) {
  RigOptions options = with(slots, order, std::move(resident));
  options.gap = 96;
  options.shapes = {{{}, 2048},
                    {{DType::bf16, StateFormat::split, false}, 3001},
                    {{}, 1111},
                    {{DType::bf16, StateFormat::fp32, false, true}, 1025},
                    {{DType::bf16, StateFormat::int8, false}, 2047}};
  return options;
}

void give_spares(Rig& rig) {
  for (int c = 0; c < rig.file().chunks(); ++c) {
    rig.pipeline().ledger().set_spare(c, rig.file().place_in(1, c));
  }
}

// Begins an undoable step, gives the gradients of `given` in any order, and lets some time pass.
void speculate(Rig& rig, int number, const std::vector<int>& given, int microseconds) {
  rig.begin(number, rig.training().all_but(), kUndoable);
  for (const int parameter : given) rig.add_gradient(parameter);
  usleep(microseconds);
}

void test_an_undone_step_has_not_been(Make make) {
  doing("undo");
  std::mt19937 random(7);
  for (const Order order : kOrders) {
    for (const int slots : {1, 2, 5}) {
      for (const bool with_homes : {false, true}) {
        Rig rig(make({4, 4096}),
                mixed(slots, order, with_homes ? std::vector<int>{1, 3} : std::vector<int>{}));
        give_spares(rig);
        for (int number = 1; number <= 12; ++number) {
          std::vector<int> given(rig.training().size());
          std::iota(given.begin(), given.end(), 0);
          std::shuffle(given.begin(), given.end(), random);
          given.resize(random() % (given.size() + 1));
          const FlatTraining before = rig.training();
          std::vector<bool> unchanged;
          for (int p = 0; p < rig.training().size(); ++p) unchanged.push_back(rig.unchanged(p));
          // Other gradients than those of the step that is taken then.
          speculate(rig, 100 + number, given, static_cast<int>(random() % 3) * 400);
          CHECK(rig.pipeline().undoing().undo().error == 0);
          CHECK(rig.pipeline().progress().is_over());
          for (int p = 0; p < rig.training().size(); ++p) {
            CHECK(rig.training().at(p).weight == FlatTraining(before).at(p).weight);
            CHECK(rig.unchanged(p) == unchanged[p]);
          }
          rig.training().go_back_to(before);
          CHECK(rig.step(number, number % 4 == 3 ? number % 3 : -1).error == 0);
          CHECK(rig.training().agrees());
        }
        check_all(rig);
      }
    }
  }
}

void test_a_confirmed_step_is_a_step(Make make) {
  doing("confirm");
  std::mt19937 random(8);
  for (const Order order : kOrders) {
    for (const int slots : {1, 3}) {
      Rig rig(make({4, 4096}), mixed(slots, order, {2}));
      give_spares(rig);
      for (int number = 1; number <= 8; ++number) {
        rig.begin(number, rig.training().all_but(), kUndoable);
        for (int p = 0; p < rig.training().size(); ++p) {
          if (p == number % 5) rig.pipeline().undoing().confirm();
          rig.add_gradient(p);
        }
        rig.pipeline().close();
        CHECK(rig.pipeline().progress().wait_published().error == 0);
        CHECK(rig.training().agrees());
        if (number % 3 == 0) CHECK(rig.step(50 + number).error == 0);
      }
      check_all(rig);
    }
  }
}

// What has no second copy waits until nothing is undone any more, and keeps no slot meanwhile.
void test_what_cannot_be_undone_waits(Make make) {
  doing("what cannot be undone");
  for (const int slots : {1, 6}) {
    Rig rig(make({4, 4096}), with(slots, Order::given));  // 4 and 5 have memory of their own
    for (int c = 1; c < kChunks; ++c) {
      rig.pipeline().ledger().set_spare(c, rig.file().place_in(1, c));
    }
    StepProgress& progress = rig.pipeline().progress();
    for (int number = 1; number <= 2; ++number) {
      speculate(rig, number, {0, 1, 2}, 0);
      CHECK(soon([&] { return progress.is_updated(1) && progress.is_updated(3); }));
      usleep(2000);
      CHECK(!progress.is_updated(0) && !progress.is_updated(4) && !progress.is_updated(5));
      rig.pipeline().undoing().confirm();
      rig.pipeline().close();
      CHECK(progress.wait_published().error == 0);
      CHECK(rig.training().agrees());
      if (number == 1) CHECK(rig.pipeline().quiesce().error == 0);
      if (number == 1) rig.pipeline().prefetch();
    }
    check_all(rig);
  }
}

// The states of before are on disk as they were, whatever the undone step has written.
void test_new_states_go_to_the_second_place(Make make) {
  doing("second place");
  Rig rig(make({4, 4096}), with(2, Order::given, {}));
  give_spares(rig);
  CHECK(rig.step(1).error == 0);
  CHECK(rig.pipeline().quiesce().error == 0);
  const std::vector<char> first = rig.file().read_area(0);
  const FlatTraining before = rig.training();
  speculate(rig, 2, {0, 1, 2}, 0);
  CHECK(soon([&] { return rig.pipeline().counters().chunks_updated == 2 * kChunks; }));
  CHECK(rig.pipeline().undoing().undo().error == 0);
  CHECK(rig.file().read_area(0) == first);
  rig.training().go_back_to(before);
  CHECK(rig.step(2).error == 0);
  CHECK(rig.training().agrees());
  check_all(rig);
}

// A run that commits: the place of each chunk's last commit, and the third area of the file.
class Committed {
 public:
  explicit Committed(Rig& rig) : rig_(rig), free_(rig.file().chunks(), 2) {
    for (int c = 0; c < rig.file().chunks(); ++c) rig.aim(0, c);
  }

  // What a commit does when the step that it is of has been written.
  void commit() {
    CHECK(rig_.pipeline().quiesce().error == 0);
    CHECK(all_captured(rig_) && captures_agree(rig_));
    ChunkLedger& ledger = rig_.pipeline().ledger();
    held_.clear();
    for (int c = 0; c < rig_.file().chunks(); ++c) {
      const DiskPosition place = ledger.place(c);
      held_.push_back({place, read(c, place)});
      if (place != ledger.target(c)) continue;
      rig_.aim(std::exchange(free_[c], area_of(c, place)), c);
    }
  }

  bool is_intact() const {
    for (std::size_t c = 0; c < held_.size(); ++c) {
      if (read(static_cast<int>(c), held_[c].first) != held_[c].second) return false;
    }
    return true;
  }

 private:
  std::vector<char> read(int chunk, DiskPosition place) const {
    return rig_.file().read(place, Layout(rig_.file().spec(chunk)));
  }

  int area_of(int chunk, DiskPosition place) const {
    for (int area = 0; area < ChunkedFile::kAreas; ++area) {
      if (rig_.file().place_in(area, chunk) == place) return area;
    }
    throw std::logic_error("a chunk is in no area");
  }

  Rig& rig_;
  std::vector<int> free_;
  std::vector<std::pair<DiskPosition, std::vector<char>>> held_;
};

void test_commits_stay_whole(Make make) {
  doing("commits");
  std::mt19937 random(9);
  for (const bool with_homes : {false, true}) {
    RigOptions options =
        mixed(3, Order::alternating, with_homes ? std::vector<int>{1, 3} : std::vector<int>{});
    options.durable = true;
    Rig rig(make({4, 4096}), options);
    give_spares(rig);
    Committed run(rig);
    for (int number = 1; number <= 40; ++number) {
      const bool commits = random() % 3 == 0;
      const StepSpec spec{
          .open = true, .capture = commits, .undoable = true, .caller = Caller::launches};
      const int skip = static_cast<int>(random() % 7) - 2;  // often one parameter has no gradient
      if (random() % 2 == 0) {
        const FlatTraining before = rig.training();
        rig.begin(100 + number, rig.training().all_but(skip), spec);
        for (int p = 0; p < rig.training().size(); ++p) {
          if (p != skip && random() % 4 != 0) rig.add_gradient(p);
        }
        usleep(static_cast<int>(random() % 3) * 400);
        CHECK(rig.pipeline().undoing().undo().error == 0);
        rig.training().go_back_to(before);
        CHECK(run.is_intact());
      }
      rig.begin(number, rig.training().all_but(skip), spec);
      for (int p = 0; p < rig.training().size(); ++p) {
        if (p != skip) rig.add_gradient(p);
      }
      rig.pipeline().undoing().confirm();
      rig.pipeline().close();
      CHECK(rig.pipeline().progress().wait_published().error == 0);
      CHECK(rig.training().agrees() && run.is_intact());
      if (commits) run.commit();
    }
    check_all(rig);
  }
}

void test_wrong_calls_are_refused(Make make) {
  doing("wrong calls");
  Rig rig(make({4, 4096}), with(2, Order::given, {}));
  give_spares(rig);
  Pipeline& pipeline = rig.pipeline();
  CHECK(throws<std::logic_error>([&] { pipeline.undoing().undo(); }));
  CHECK(throws<std::logic_error>([&] { pipeline.undoing().confirm(); }));
  constexpr StepSpec kClosed{.undoable = true};
  CHECK(throws<std::invalid_argument>([&] { rig.begin(1, rig.training().all_but(), kClosed); }));
  rig.begin(1, rig.training().all_but(), kOpen);
  CHECK(throws<std::logic_error>([&] { pipeline.undoing().undo(); }));
  for (int p = 0; p < 3; ++p) rig.add_gradient(p);
  pipeline.close();
  CHECK(pipeline.progress().wait_published().error == 0);
}

// A write that fails while the step is taken back is an error, as ever.
void test_a_failed_write_is_reported(Make make) {
  doing("a failed write");
  Rig rig(make({4, 4096}), with(2, Order::given, {}));
  give_spares(rig);
  CHECK(rig.step(1).error == 0);
  rig.engine().faults().add({Op::write, 0, 1, EIO, 0, 2000});
  speculate(rig, 2, {0, 1, 2}, 0);
  usleep(3000);
  CHECK(rig.pipeline().undoing().undo().error == EIO);
}

}  // namespace
}  // namespace stow

int main() {
  using namespace stow;
  set_pool_threads(2);
  for (const Make make : backends()) {
    test_an_undone_step_has_not_been(make);
    test_a_confirmed_step_is_a_step(make);
    test_what_cannot_be_undone_waits(make);
    test_new_states_go_to_the_second_place(make);
    test_commits_stay_whole(make);
    test_wrong_calls_are_refused(make);
    test_a_failed_write_is_reported(make);
  }
  return report();
}
