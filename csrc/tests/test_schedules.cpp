// Random schedules of everything a pipeline can be asked for, against flat arrays: no chunk is
// updated twice or never, no slot is used by two, nothing waits for ever. A failure names its seed,
// and `test_schedules SEED` runs that one alone.
#include <algorithm>
#include <cerrno>
#include <numeric>

#include "base/pool.h"
#include "pipeline_cases.h"

namespace stow {
namespace {

constexpr int kSchedules = 60;
constexpr int kSteps = 14;

class Schedule {
 public:
  Schedule(Make make, unsigned long seed)
      : random_(static_cast<unsigned>(seed)), options_(draw_options()), rig_(slow(make), options_) {
    rig_.pipeline().trace().start(chance(3) ? 100 : 0);
  }

  void run() {
    for (int number = 1; number <= kSteps; ++number) {
      before_a_step();
      const StepSpec spec = draw_step();
      std::vector<char> due(options_.shapes.size());
      for (char& one : due) one = !chance(5);
      if (chance(12)) due.assign(due.size(), 0);
      rig_.begin(number, due, spec);
      if (spec.open) land_in_any_order(due);
      if (spec.caller == Caller::updates) rig_.update_acquired(1 + draw(4), random_);
      finish(spec, due);
      if (chance(3)) look_at_everything();
    }
    look_at_everything();
    CHECK(rig_.pipeline().counters().slots_high_water <= most_slots_);
    if (chance(2)) {  // and destroy it in the middle of one more
      const StepSpec spec = draw_step();
      rig_.begin(kSteps + 1, rig_.training().all_but(), spec);
      if (spec.caller == Caller::updates) rig_.update_acquired(1 + draw(4), random_, draw(4));
      usleep(draw(300));
      rig_.destroy_pipeline();
      rig_.training().spoil_gradients();
    }
  }

 private:
  int draw(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }
  bool chance(int one_in) { return draw(one_in) == 0; }

  RigOptions draw_options() {
    static const Family families[] = {
        {DType::f32, StateFormat::fp32, false},        {DType::f32, StateFormat::fp32, true},
        {DType::bf16, StateFormat::fp32, false, true}, {DType::bf16, StateFormat::split, true},
        {DType::bf16, StateFormat::int8, false},       {DType::f32, StateFormat::bf16, false}};
    RigOptions options;
    options.shapes.clear();
    const int kinds = 1 + draw(3);
    for (int p = 0, count = 1 + draw(7); p < count; ++p) {
      options.shapes.push_back({families[draw(kinds) * 7 % 6], 1 + draw(chance(3) ? 4000 : 900)});
    }
    options.capacity = 32 * (8 + draw(40));
    options.gap = 32 * draw(4);
    options.order = chance(2) ? Order::alternating : Order::given;
    options.slots = most_slots_ = chance(3) ? 1 : 1 + draw(6);
    options.few = 1 + draw(2);
    options.durable = !chance(3);
    if (!chance(3)) {
      const int chunks = Rig(make_threads_engine({1, 4096}), options).file().chunks();
      for (int c = 0; c < chunks; ++c) {
        if (chance(3)) options.resident.push_back(c);
      }
    }
    return options;
  }

  std::unique_ptr<Engine> slow(Make make) {
    auto engine = make({1 + draw(4), 4096});
    for (int fault = draw(4); fault > 0; --fault) {
      const Op op = chance(2) ? Op::read : Op::write;
      engine->faults().add({op, draw(60), 1 + draw(20), 0, chance(4) ? 512 : 0, draw(400)});
    }
    return engine;
  }

  StepSpec draw_step() {
    StepSpec spec{.open = chance(2),
                  .capture = options_.durable && chance(2),
                  .resident_first = chance(2),
                  .newest_first = chance(2),
                  .caller = chance(3)   ? Caller::computes
                            : chance(3) ? Caller::helps
                                        : Caller::waits};
    if (!spec.open && chance(2)) spec.caller = Caller::updates;
    return spec;
  }

  void before_a_step() {
    if (chance(3)) usleep(draw(500));
    if (chance(3)) rig_.pipeline().prefetch();
    if (chance(5)) CHECK(rig_.pipeline().progress().wait_written().error == 0);
    if (chance(6)) {
      CHECK(rig_.pipeline().quiesce().error == 0);
      if (chance(2)) {
        rig_.set_slots(1 + draw(5));
        most_slots_ = std::max(most_slots_, 5);
      }
      if (chance(4)) rig_.reopen();
    }
    if (chance(6)) rig_.pipeline().set_order(shuffled(rig_.file().chunks()));
    if (options_.durable && chance(4)) {
      const int chunk = draw(rig_.file().chunks());
      if (rig_.pipeline().ledger().state(chunk) != ChunkState::writing)
        rig_.aim(draw(ChunkedFile::kAreas), chunk);
    }
    if (chance(5)) rig_.rewrite(draw(rig_.training().size()), random_);
    if (chance(3)) usleep(draw(500));
    if (chance(8)) rig_.pipeline().prefetch();
    for (int p = 0; p < rig_.training().size(); ++p) {
      if (rig_.training().at(p).is_16_bit())
        CHECK(rig_.unchanged(p) == rig_.training().at(p).recorded);
    }
  }

  std::vector<int> shuffled(int count) {
    std::vector<int> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), random_);
    return numbers;
  }

  void land_in_any_order(std::vector<char>& due) {
    Pipeline& pipeline = rig_.pipeline();
    std::vector<char> missing = due;
    for (const int p : shuffled(rig_.training().size())) {
      if (!due[p] || chance(10)) continue;
      CHECK(!pipeline.progress().is_published(p));
      rig_.add_gradient(p);
      missing[p] = 0;
      if (chance(4)) usleep(draw(300));
      if (chance(2)) pipeline.help();  // does nothing, unless the caller helps
      if (chance(3) && !rig_.file().shares_a_chunk(p, missing)) {
        CHECK(pipeline.progress().wait_parameters({p}).error == 0);
        CHECK(pipeline.progress().is_published(p));
        CHECK(rig_.training().at(p).agrees());
      }
    }
    pipeline.close();
  }

  void finish(const StepSpec& spec, const std::vector<char>& due) {
    Pipeline& pipeline = rig_.pipeline();
    if (chance(3)) pipeline.prefetch();  // does nothing, or begins the next
    for (int calls = draw(4); calls > 0; --calls) {
      pipeline.help();
      usleep(draw(200));
    }
    if (spec.caller == Caller::computes || chance(3)) {
      std::vector<int> some = shuffled(rig_.training().size());
      some.resize(draw(rig_.training().size()) + 1);
      CHECK(pipeline.progress().wait_parameters(some).error == 0);
      for (const int p : some) {
        CHECK(pipeline.progress().is_published(p));
        CHECK(rig_.training().at(p).agrees());
      }
    }
    if (chance(6)) CHECK(pipeline.quiesce().error == 0);
    if (chance(6)) CHECK(pipeline.progress().wait_written().error == 0);
    CHECK(pipeline.progress().wait_published().error == 0);
    CHECK(rig_.training().agrees());
    for (int p = 0; p < rig_.training().size(); ++p)
      CHECK(pipeline.progress().is_published(p) || !due[p]);
    if (!spec.capture || !chance(2)) return;
    CHECK(pipeline.progress().wait_written().error == 0);
    CHECK(all_captured(rig_));
    CHECK(captures_agree(rig_));
  }

  void look_at_everything() {
    CHECK(rig_.pipeline().quiesce().error == 0);
    const PipelineCounters counters = rig_.pipeline().counters();
    CHECK(counters.slots_in_use == 0);
    CHECK(rig_.training().agrees());
    CHECK(states_agree(rig_));
    if (options_.durable) CHECK(captures_agree(rig_));
  }

  std::mt19937 random_;
  int most_slots_ = 0;
  RigOptions options_;
  Rig rig_;
};

// The same with one failing block: it is told, nothing hangs, and the gradients are the caller's.
void run_with_a_failure(Make make, unsigned long seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto draw = [&](int below) {
    return static_cast<int>(random() % static_cast<unsigned>(below));
  };
  RigOptions options;
  options.shapes.assign(4, Shape{{}, 1500});
  options.order = draw(2) ? Order::alternating : Order::given;
  options.slots = 1 + draw(3);
  options.durable = draw(2) == 0;
  for (int c = 0; c < 6; ++c) {
    if (draw(3) == 0) options.resident.push_back(c);
  }
  Rig rig(make({1 + draw(3), 4096}), options);
  Pipeline& pipeline = rig.pipeline();
  const int error = draw(2) ? EIO : ENOSPC;
  rig.engine().faults().add({Op::read, draw(40), 4, 0, 0, draw(300)});
  rig.engine().faults().add({draw(2) ? Op::read : Op::write, draw(60), 1, error, 0, draw(300)});
  Failure failure;
  for (int number = 1; number <= 8 && failure.error == 0; ++number) {
    if (draw(2)) pipeline.prefetch();
    const StepSpec spec{.open = draw(2) == 0,
                        .capture = options.durable && draw(2),
                        .resident_first = draw(2) == 0,
                        .newest_first = draw(2) == 0,
                        .caller = draw(2) == 0   ? Caller::computes
                                  : draw(2) == 0 ? Caller::helps
                                                 : Caller::waits};
    rig.begin(number, rig.training().all_but(), spec);
    if (spec.open) {
      const int least = draw(2);
      for (int p = 3; p >= least; --p) rig.add_gradient(p);
      if (least == 0 && draw(2)) pipeline.progress().wait_parameters({draw(4)});
      pipeline.close();
    }
    if (draw(2)) pipeline.help();
    failure = draw(4) == 0   ? pipeline.progress().wait_written()
              : draw(3) == 0 ? pipeline.quiesce()
                             : pipeline.progress().wait_published();
    rig.training().spoil_gradients();
    if (failure.error == 0) CHECK(rig.training().agrees());
  }
  CHECK(failure.error == 0 || failure.error == error);
  if (draw(2)) CHECK(pipeline.quiesce().error == pipeline.progress().failure().error);
}

void run_one(Make make, unsigned long seed) {
  doing("a schedule", seed);
  const long before = tally().failed;
  Schedule(make, seed).run();
  doing("a schedule with a failure", seed);
  run_with_a_failure(make, seed);
  if (tally().failed != before) std::fprintf(stderr, "that was seed %lu\n", seed);
}

}  // namespace
}  // namespace stow

int main(int count, char** arguments) {
  using namespace stow;
  set_pool_threads(2);
  for (const Make make : backends()) {
    if (count > 1) {
      for (int k = 1; k < count; ++k) run_one(make, std::strtoul(arguments[k], nullptr, 10));
      continue;
    }
    for (unsigned long seed = 1; seed <= kSchedules; ++seed) run_one(make, seed);
  }
  return report();
}
