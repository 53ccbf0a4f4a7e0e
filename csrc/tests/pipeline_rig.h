// A small training whose states a pipeline keeps, beside the same training over flat arrays.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "chunked_file.h"
#include "io/engine.h"
#include "pipeline/pipeline.h"
#include "training.h"

namespace stow {

class Rig {
 public:
  Rig(std::unique_ptr<Engine> engine, RigOptions options)
      : options_(std::move(options)),
        training_(options_.shapes),
        file_(options_),
        engine_(std::move(engine)) {
    file_.add_to(*engine_);
    connect({});
  }

  Pipeline& pipeline() { return *pipeline_; }
  Engine& engine() { return *engine_; }
  FlatTraining& training() { return training_; }
  ChunkedFile& file() { return file_; }
  void destroy_pipeline() { pipeline_.reset(); }

  // --- steps ---

  // One step with gradients for `due`; those are also the ones expected in an open step.
  void begin(int number, const std::vector<char>& due, const StepSpec& spec = {}) {
    training_.start_step(number);
    for (const int chunk : untouched_) {
      for (const Segment& s : file_.spec(chunk).segments) {
        std::fill_n(training_.at(s.parameter).gradient.begin() + s.parameter_offset, s.count, 0.0f);
      }
    }
    std::vector<StepParameter> rows;
    for (int p = 0; p < training_.size(); ++p) {
      const bool is_given = due[p] && !spec.open;
      const void* gradient = is_given ? training_.at(p).gradient.data() : nullptr;
      // Nobody but `update_one` may read them, who has them from elsewhere.
      if (is_given && spec.caller == Caller::updates) gradient = reinterpret_cast<const void*>(64);
      rows.push_back(training_.row(p, gradient));
      if (is_given) training_.apply(p);
    }
    due_ = due;
    // Every other step is run by its caller, who may find chunks that the scheduler must read.
    const bool by_caller = spec.caller == Caller::waits && !spec.open && number % 2 == 0;
    pipeline_->begin(rows, {hyper_of(number)}, spec, due, !by_caller);
    if (by_caller) pipeline_->run();  // a failure is reported by the waits too
  }

  // The chunks whose gradients are zero in the next steps.
  void leave_untouched(std::vector<int> chunks) { untouched_ = std::move(chunks); }

  // Has chunks catch up with the updates that they deferred, outside of a step.
  void catch_up(const std::vector<int>& chunks) {
    std::vector<StepParameter> rows;
    for (int p = 0; p < training_.size(); ++p) rows.push_back(training_.row(p, nullptr));
    pipeline_->ledger().want(chunks);
    pipeline_->begin(rows, {hyper_of(1)}, {}, {}, false);
    pipeline_->run();
  }

  // What a caller that updates does: acquires chunks, up to `most` at once, changes them,
  // and releases them in any order, until the step is over or (with a limit) so many were taken.
  int update_acquired(std::size_t most, std::mt19937& random, int limit = 1 << 30) {
    std::vector<int> held;
    for (int taken = 0;;) {
      const bool more = held.size() < most && taken < limit;
      const AcquiredChunk next = more ? pipeline_->acquire_chunk(held.empty()) : AcquiredChunk{};
      if (next.chunk >= 0) {
        ++taken;
        update_one(next);
        held.push_back(next.chunk);
        continue;
      }
      if (held.empty()) return taken;
      std::swap(held[random() % held.size()], held.back());
      pipeline_->release_chunk(held.back());
      held.pop_back();
    }
  }

  void update_one(AcquiredChunk given) {
    const ChunkSpec& spec = file_.spec(given.chunk);
    const Layout layout(spec);
    CHECK((given.slot < 0) == (pipeline_->ledger().state(given.chunk) == ChunkState::resident));
    for (const Segment& s : spec.segments) {
      TrainedParameter& it = training_.at(s.parameter);
      if (!due_[s.parameter]) continue;
      AdamArgs args = training_.args_of(s.parameter);
      args.param = &it.weight[s.parameter_offset * size_of(spec.family.param_dtype)];
      args.grad = it.gradient.data() + s.parameter_offset;
      args.n = s.count;
      args.first = s.parameter_offset;
      for (int k = 0; k < layout.streams; ++k) {
        const Layout::Part& part = layout.parts[k];
        char* slot = ring_.get() + given.slot * slot_bytes_ + part.slot_at;
        char* states = given.slot < 0 ? spec.resident[k] : slot;
        args.states[static_cast<int>(layout.which[k])] = states + part.at(s.chunk_offset);
      }
      adam_update(args, Isa::scalar);
    }
  }

  void add_gradient(int parameter) {
    training_.apply(parameter);
    pipeline_->add_gradient(parameter, training_.at(parameter).gradient.data(), DType::f32);
  }

  // The pieces in one chunk of the gradients of those parameters that `come`, from memory of their
  // own, which `spoil_pieces` makes something else.
  void add_chunk_gradients(int chunk, const std::vector<char>& come) {
    std::vector<PieceGradient> pieces;
    staging_[chunk].clear();
    for (const Segment& s : file_.spec(chunk).segments) {
      if (!come[s.parameter]) {
        pieces.push_back({s.parameter, nullptr, DType::f32});
        continue;
      }
      if (s.parameter_offset == 0) training_.apply(s.parameter);
      const auto first = training_.at(s.parameter).gradient.begin() + s.parameter_offset;
      staging_[chunk].emplace_back(first, first + s.count);
      pieces.push_back({s.parameter, staging_[chunk].back().data(), DType::f32});
    }
    pipeline_->add_chunk_gradients(chunk, pieces);
  }

  void spoil_pieces(int chunk) {
    for (std::vector<float>& piece : staging_[chunk]) {
      std::fill(piece.begin(), piece.end(), 1e30f);
    }
  }

  Failure step(int number, const std::vector<char>& due, const StepSpec& spec = {}) {
    begin(number, due, spec);
    return pipeline_->progress().wait_published();
  }

  // One step in which all but `skip` have a gradient (-1: all).
  Failure step(int number, int skip = -1, const StepSpec& spec = {}) {
    return step(number, training_.all_but(skip), spec);
  }

  // Someone else writes a weight.
  void rewrite(int parameter, std::mt19937& random) {
    training_.at(parameter).new_weight(random);
    pipeline_->ledger().forget_capture(parameter);
  }

  bool unchanged(int parameter) {
    return pipeline_->ledger().unchanged(parameter, training_.at(parameter).weight.data());
  }

  void aim(int area, std::size_t chunk) {
    pipeline_->ledger().set_target(static_cast<int>(chunk), file_.place_in(area, chunk));
  }

  // A new pipeline over what the old one left. What is captured and at resident must come from
  // disk.
  void reopen() {
    CHECK(pipeline_->quiesce().error == 0);
    std::vector<Left> left;
    for (int number = 0; number < file_.chunks(); ++number) {
      const ChunkSpec& spec = file_.spec(number);
      const ChunkState state = pipeline_->ledger().state(number);
      const bool captured = options_.durable && pipeline_->ledger().captured(number);
      const bool on_disk = state == ChunkState::stored || captured;
      left.push_back(
          {state == ChunkState::blank, on_disk ? pipeline_->ledger().place(number) : DiskPosition{},
           state == ChunkState::blank || !on_disk ? std::vector<std::uint32_t>()
                                                  : pipeline_->ledger().checksums(number).states});
      if (state == ChunkState::resident && captured) {
        const Layout layout(spec);
        for (int k = 0; k < layout.streams; ++k) {
          std::memset(spec.resident[k], 0x5a, layout.parts[k].length(spec.elements));
        }
      }
    }
    std::vector<char> captured;
    for (int c = 0; c < file_.chunks(); ++c) captured.push_back(pipeline_->ledger().captured(c));
    pipeline_.reset();
    connect(left);
    reopened_ = true;
    for (int c = 0; c < file_.chunks(); ++c) {
      if (captured[c]) continue;  // or it has weights that are older than its states
      for (const Segment& s : file_.spec(c).segments)
        pipeline_->ledger().forget_capture(s.parameter);
    }
    for (int p = 0; p < training_.size(); ++p) {
      if (training_.at(p).recorded) {
        pipeline_->ledger().record_weight(p, training_.at(p).weight.data());
      }
    }
  }

  // Whether it is not the first pipeline.
  bool is_reopened() const { return reopened_; }

  void set_slots(int slots) {
    options_.slots = slots;
    std::int64_t widest = 0;
    for (const ChunkSpec& spec : file_.specs()) {
      const Layout layout(spec);
      widest = std::max(widest, layout.weight().slot_at + layout.weight().bytes);
    }
    const std::int64_t all = (slots + options_.small_slots) * widest;
    ring_ = Memory(static_cast<char*>(std::aligned_alloc(4096, all)));
    std::memset(ring_.get(), 0x77, all);  // nobody may take what he finds for zeros
    slot_bytes_ = widest;
    pipeline_->set_ring({ring_.get(), slots, widest, options_.small_slots, widest});
  }

 private:
  struct FreeDelete {
    void operator()(char* p) const { std::free(p); }
  };
  using Memory = std::unique_ptr<char, FreeDelete>;

  struct Left {
    bool blank;
    DiskPosition place;
    std::vector<std::uint32_t> checksums;
  };

  void connect(const std::vector<Left>& left) {
    pipeline_ =
        std::make_unique<Pipeline>(*engine_, best_isa(), options_.order, Team{.few = options_.few});
    set_slots(options_.slots);
    for (int c = 0; c < file_.chunks(); ++c) {
      ChunkSpec spec = file_.spec(c);
      spec.place =
          left.empty() ? (options_.durable ? DiskPosition{} : file_.place_in(0, c)) : left[c].place;
      const bool is_alone = spec.segments.size() == 1 && spec.resident[0] == nullptr;
      spec.is_small = options_.small_slots != 0 && is_alone;
      const bool blank = left.empty() || left[c].blank;
      const int number = pipeline_->add_chunk(
          spec, blank, left.empty() ? std::vector<std::uint32_t>() : left[c].checksums);
      CHECK(number == c);
      if (spec.place.file < 0) aim(0, c);
    }
  }

  RigOptions options_;
  FlatTraining training_;
  ChunkedFile file_;
  std::unique_ptr<Engine> engine_;
  std::map<int, std::vector<std::vector<float>>> staging_;  // by chunk, of each piece
  Memory ring_;
  std::int64_t slot_bytes_ = 0;
  std::vector<int> untouched_;
  std::vector<char> due_;  // in the step of now, by parameter
  bool reopened_ = false;
  std::unique_ptr<Pipeline> pipeline_;
};

}  // namespace stow
