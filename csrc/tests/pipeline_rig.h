// A small training whose states a pipeline keeps, beside the same training over flat arrays.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "io/engine.h"
#include "pipeline/pipeline.h"

namespace stow {

struct Shape {
  Family family;
  std::int64_t count;
};

struct RigOptions {
  std::vector<Shape> shapes = std::vector<Shape>(3, Shape{{}, 2048});
  std::int64_t capacity = 1024;  // elements of a chunk
  std::int64_t gap = 0;          // elements between parameters
  std::vector<int> resident;     // chunks with memory of their own
  Order order = Order::alternating;
  int slots = 2;
  int few = 1;
  bool durable = false;  // chunks are nowhere until they are written, and commits write weights
};

inline AdamHyper hyper_of(int step) {
  return {0.1f, 0.999f, 0.001f, 0.99f, 0.0f, 0.01f * static_cast<float>(step), 10.0f, 1e-8f, 1.0f};
}

class Rig {
 public:
  Rig(std::unique_ptr<Engine> engine, RigOptions options)
      : options_(std::move(options)), engine_(std::move(engine)) {
    std::mt19937 random(1);
    for (const Shape& shape : options_.shapes) parameters_.emplace_back(shape, random);
    lay_out();
    const char* folder = std::getenv("TMPDIR");
    std::string path = std::string(folder != nullptr ? folder : "/var/tmp") + "/stow-test-XXXXXX";
    fd_ = mkstemp(path.data());
    unlink(path.c_str());
    CHECK(ftruncate(fd_, kAreas * area_bytes_) == 0);
    file_ = engine_->add_file({fd_, 1, false});
    for (std::size_t c = 0; c < specs_.size(); ++c) places_.push_back(place_in(0, c));
    connect({});
  }

  ~Rig() {
    pipeline_.reset();
    engine_.reset();
    close(fd_);
  }

  static constexpr int kAreas = 2;

  // --- steps ---

  // One step with gradients for `due`; those are also the ones expected in an open step.
  void begin(int number, const std::vector<char>& due, const StepSpec& spec = {}) {
    number_ = number;
    std::mt19937 random(100 + static_cast<unsigned>(number));
    std::vector<StepParameter> rows;
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      Parameter& it = parameters_[p];
      it.new_gradient(random);
      it.seed = it.is_16_bit() && !it.recorded;
      const void* gradient = due[p] && !spec.open ? it.gradient.data() : nullptr;
      // Nobody but `update_one` may read them, who has them from elsewhere.
      if (gradient != nullptr && spec.caller == Caller::updates)
        gradient = reinterpret_cast<const void*>(64);
      rows.push_back({it.weight.data(), gradient, DType::f32, it.seed, 0, key_of(p)});
      if (gradient != nullptr) apply(p);
    }
    due_ = due;
    pipeline_->begin(rows, {hyper_of(number)}, spec, due);
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
    const ChunkSpec& spec = specs_[given.chunk];
    const Layout layout(spec);
    CHECK((given.slot < 0) == (pipeline_->ledger().state(given.chunk) == ChunkState::resident));
    for (const Segment& s : spec.segments) {
      Parameter& it = parameters_[s.parameter];
      if (!due_[s.parameter]) continue;
      AdamArgs args = args_of(s.parameter);
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
    apply(parameter);
    pipeline_->add_gradient(parameter, parameters_[parameter].gradient.data(), DType::f32);
  }

  // The pieces in one chunk of the gradients of those parameters that `come`, from memory of their
  // own, which `spoil_pieces` makes something else.
  void add_chunk_gradients(int chunk, const std::vector<char>& come) {
    std::vector<PieceGradient> pieces;
    staging_[chunk].clear();
    for (const Segment& s : specs_[chunk].segments) {
      if (!come[s.parameter]) {
        pieces.push_back({s.parameter, nullptr, DType::f32});
        continue;
      }
      if (s.parameter_offset == 0) apply(s.parameter);
      const auto first = parameters_[s.parameter].gradient.begin() + s.parameter_offset;
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
    return step(number, all_but(skip), spec);
  }

  std::vector<char> all_but(int skip = -1) const {
    std::vector<char> due(parameters_.size(), 1);
    if (skip >= 0) due[skip] = 0;
    return due;
  }

  // Someone else writes a weight.
  void rewrite(int parameter, std::mt19937& random) {
    Parameter& it = parameters_[parameter];
    it.new_weight(random);
    it.recorded = false;
    pipeline_->ledger().forget_capture(parameter);
  }

  // What was freed and written to by others: sanitizers see who still reads it.
  void spoil_gradients() {
    for (Parameter& it : parameters_) it.gradient.assign(it.gradient.size(), 1e30f);
  }

  // --- what must hold ---

  bool agrees() const {
    for (const Parameter& it : parameters_) {
      if (it.weight != it.wanted) return false;
    }
    return true;
  }

  // While idle: every chunk's states are those of the flat arrays.
  bool states_agree() {
    for (std::size_t c = 0; c < specs_.size(); ++c) {
      const Layout layout(specs_[c]);
      const ChunkState state = pipeline_->ledger().state(static_cast<int>(c));
      const std::vector<char> bytes =
          state == ChunkState::stored ? read(pipeline_->ledger().place(static_cast<int>(c)), layout)
                                      : std::vector<char>();
      for (const Segment& s : specs_[c].segments) {
        for (int k = 0; k < layout.streams; ++k) {
          const Layout::Part& part = layout.parts[k];
          const char* wanted =
              parameters_[s.parameter].states[static_cast<int>(layout.which[k])].data() +
              part.at(s.parameter_offset);
          const std::int64_t length = part.length(s.count);
          bool same = false;
          if (state == ChunkState::resident) {
            same =
                std::memcmp(specs_[c].resident[k] + part.at(s.chunk_offset), wanted, length) == 0;
          } else if (state == ChunkState::stored) {
            same = std::memcmp(&bytes[part.file_at + part.at(s.chunk_offset)], wanted, length) == 0;
          } else if (state == ChunkState::blank) {
            same = std::all_of(wanted, wanted + length, [](char byte) { return byte == 0; });
          }
          if (!same) return false;
        }
      }
    }
    return true;
  }

  // While idle: what the pipeline says is on disk, states and weights of now, is there.
  bool captures_agree() {
    for (std::size_t c = 0; c < specs_.size(); ++c) {
      if (pipeline_->ledger().captured(static_cast<int>(c)) && !on_disk(c)) return false;
    }
    return true;
  }

  bool all_captured() const {
    for (std::size_t c = 0; c < specs_.size(); ++c) {
      if (!pipeline_->ledger().captured(static_cast<int>(c))) return false;
    }
    return true;
  }

  // Whether the chunk's place holds its states, wherever they are now, and its weights.
  bool on_disk(std::size_t c) {
    const ChunkParts parts(specs_[c]);
    const Layout& layout = parts.layout;
    const int number = static_cast<int>(c);
    const std::vector<char> bytes = read(pipeline_->ledger().place(number), layout);
    const ChunkChecksums& checksums = pipeline_->ledger().checksums(number);
    char* streams[kMaxStreams] = {};
    for (int k = 0; k < layout.streams; ++k) {
      streams[k] = const_cast<char*>(bytes.data()) + layout.parts[k].file_at;
    }
    const Layout::Part& weight = layout.weight();
    for (std::size_t b = 0; b < parts.blocks.size(); ++b) {
      const UpdateBlock& block = parts.blocks[b];
      const char* at = &bytes[weight.file_at + weight.at(block.begin)];
      const std::uint32_t sum = checksum(at, weight.length(block.end - block.begin), 0);
      if (!reopened_ && sum != checksums.weights[b]) return false;
    }
    std::vector<char> gaps(bytes.begin() + weight.file_at,
                           bytes.begin() + weight.file_at + weight.length(specs_[c].elements));
    for (const Segment& s : specs_[c].segments) {
      const auto begin = gaps.begin() + weight.at(s.chunk_offset);
      std::fill(begin, begin + weight.length(s.count), 0);
    }
    if (std::any_of(gaps.begin(), gaps.end(), [](char byte) { return byte != 0; })) return false;
    const bool blank = pipeline_->ledger().state(number) == ChunkState::blank;
    if (!blank && !pipeline_->ledger().intact(number, streams)) return false;
    for (const Segment& s : specs_[c].segments) {
      const Parameter& it = parameters_[s.parameter];
      if (std::memcmp(&bytes[weight.file_at + weight.at(s.chunk_offset)],
                      &it.weight[weight.at(s.parameter_offset)], weight.length(s.count)) != 0) {
        return false;
      }
      for (int k = 0; k < layout.streams && !blank; ++k) {
        const Layout::Part& part = layout.parts[k];
        if (std::memcmp(&bytes[part.file_at + part.at(s.chunk_offset)],
                        &it.states[static_cast<int>(layout.which[k])][part.at(s.parameter_offset)],
                        part.length(s.count)) != 0) {
          return false;
        }
      }
    }
    return true;
  }

  // --- the disk ---

  DiskPosition place_in(int area, std::size_t chunk) const {
    return {file_, area * area_bytes_ + at_[chunk]};
  }

  void aim(int area, std::size_t chunk) {
    pipeline_->ledger().set_target(static_cast<int>(chunk), place_in(area, chunk));
  }

  std::vector<char> read(DiskPosition place, const Layout& layout) const {
    std::vector<char> bytes(layout.weight().file_at + layout.weight().bytes);
    CHECK(pread(fd_, bytes.data(), bytes.size(), place.offset) >= 0);
    return bytes;
  }

  std::vector<char> read_area(int area) const {
    std::vector<char> bytes(area_bytes_);
    CHECK(pread(fd_, bytes.data(), bytes.size(), area * area_bytes_) ==
          static_cast<ssize_t>(bytes.size()));
    return bytes;
  }

  void flip_byte(std::int64_t offset) {
    char byte = 0;
    CHECK(pread(fd_, &byte, 1, offset) == 1);
    byte = static_cast<char>(byte ^ 1);
    CHECK(pwrite(fd_, &byte, 1, offset) == 1);
  }

  // A new pipeline over what the old one left. What is captured and at resident must come from
  // disk.
  void reopen() {
    CHECK(pipeline_->quiesce().error == 0);
    std::vector<Left> left;
    for (std::size_t c = 0; c < specs_.size(); ++c) {
      const int number = static_cast<int>(c);
      const ChunkState state = pipeline_->ledger().state(number);
      const bool captured = options_.durable && pipeline_->ledger().captured(number);
      const bool on_disk = state == ChunkState::stored || captured;
      left.push_back(
          {state == ChunkState::blank, on_disk ? pipeline_->ledger().place(number) : DiskPosition{},
           state == ChunkState::blank || !on_disk ? std::vector<std::uint32_t>()
                                                  : pipeline_->ledger().checksums(number).states});
      if (state == ChunkState::resident && captured) {
        const Layout layout(specs_[c]);
        for (int k = 0; k < layout.streams; ++k) {
          std::memset(specs_[c].resident[k], 0x5a, layout.parts[k].length(specs_[c].elements));
        }
      }
    }
    std::vector<char> captured;
    for (int c = 0; c < chunks(); ++c) captured.push_back(pipeline_->ledger().captured(c));
    pipeline_.reset();
    connect(left);
    reopened_ = true;
    for (int c = 0; c < chunks(); ++c) {
      if (captured[c]) continue;  // or it has weights that are older than its states
      for (const Segment& s : specs_[c].segments) pipeline_->ledger().forget_capture(s.parameter);
    }
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      if (parameters_[p].recorded) {
        pipeline_->ledger().record_weight(static_cast<int>(p), parameters_[p].weight.data());
      }
    }
  }

  void set_slots(int slots) {
    options_.slots = slots;
    std::int64_t widest = 0;
    for (const ChunkSpec& spec : specs_) {
      const Layout layout(spec);
      widest = std::max(widest, layout.weight().slot_at + layout.weight().bytes);
    }
    ring_ = Memory(static_cast<char*>(std::aligned_alloc(4096, slots * widest)));
    std::memset(ring_.get(), 0x77, slots * widest);  // nobody may take what he finds for zeros
    slot_bytes_ = widest;
    pipeline_->set_ring({ring_.get(), slots, widest});
  }

  Pipeline& pipeline() { return *pipeline_; }
  Engine& engine() { return *engine_; }
  void destroy_pipeline() { pipeline_.reset(); }
  int chunks() const { return static_cast<int>(specs_.size()); }
  int parameters() const { return static_cast<int>(parameters_.size()); }
  const ChunkSpec& spec(int chunk) const { return specs_[chunk]; }
  // Whether a chunk of the parameter also has one of `others`.
  bool shares_a_chunk(int parameter, const std::vector<char>& others) const {
    return std::any_of(specs_.begin(), specs_.end(), [&](const ChunkSpec& spec) {
      bool mine = false, theirs = false;
      for (const Segment& s : spec.segments) {
        mine = mine || s.parameter == parameter;
        theirs = theirs || others[s.parameter];
      }
      return mine && theirs;
    });
  }
  bool recorded(int parameter) const { return parameters_[parameter].recorded; }
  bool unchanged(int parameter) {
    return pipeline_->ledger().unchanged(parameter, parameters_[parameter].weight.data());
  }
  bool is_16_bit(int parameter) const { return parameters_[parameter].is_16_bit(); }
  bool weight_agrees(int parameter) const {
    return parameters_[parameter].weight == parameters_[parameter].wanted;
  }
  std::int64_t stored_bytes() const {
    std::int64_t sum = 0;
    for (const ChunkSpec& spec : specs_) sum += resident(spec) ? 0 : Layout(spec).state_bytes();
    return sum;
  }
  static bool resident(const ChunkSpec& spec) { return spec.resident[0] != nullptr; }

 private:
  struct FreeDelete {
    void operator()(char* p) const { std::free(p); }
  };
  using Memory = std::unique_ptr<char, FreeDelete>;

  struct Parameter {
    Parameter(const Shape& s, std::mt19937& random) : shape(s) {
      StreamSpec streams[kMaxStreams];
      const Family& f = shape.family;
      const int count = streams_of(f.param_dtype, f.format, f.amsgrad, streams);
      for (int k = 0; k < count; ++k) {
        const std::int64_t groups = (shape.count + streams[k].per - 1) / streams[k].per;
        states[static_cast<int>(streams[k].stream)].resize(groups * streams[k].bytes);
      }
      new_weight(random);
      gradient.resize(shape.count);
    }

    bool is_16_bit() const { return shape.family.param_dtype != DType::f32; }

    void new_weight(std::mt19937& random) {
      const std::int64_t width = size_of(shape.family.param_dtype);
      weight.resize(shape.count * width);
      std::normal_distribution<float> normal;
      for (std::int64_t i = 0; i < shape.count; ++i) {
        const float value = normal(random);  // a bf16 is its upper half
        std::memcpy(&weight[i * width], reinterpret_cast<const char*>(&value) + 4 - width, width);
      }
      wanted = weight;
    }

    void new_gradient(std::mt19937& random) {
      std::normal_distribution<float> normal;
      for (float& value : gradient) value = normal(random);
    }

    Shape shape;
    std::vector<char> weight, wanted;
    std::vector<float> gradient;
    std::vector<char> states[kMaxStreams];  // as they ought to be
    bool recorded = false;                  // the weight is what our last update left
    bool seed = false;
  };

  struct Left {
    bool blank;
    DiskPosition place;
    std::vector<std::uint32_t> checksums;
  };

  std::uint64_t key_of(std::size_t parameter) const { return 1000 * number_ + parameter; }

  AdamArgs args_of(std::size_t parameter) const {
    const Parameter& it = parameters_[parameter];
    AdamArgs args{};
    args.n = it.shape.count;
    args.key = key_of(parameter);
    args.param_dtype = it.shape.family.param_dtype;
    args.format = it.shape.family.format;
    args.amsgrad = it.shape.family.amsgrad;
    args.seed_master = it.seed;
    args.hyper = hyper_of(number_);
    return args;
  }

  void apply(std::size_t parameter) {
    Parameter& it = parameters_[parameter];
    AdamArgs args = args_of(parameter);
    args.param = it.wanted.data();
    args.grad = it.gradient.data();
    for (int k = 0; k < kMaxStreams; ++k) {
      args.states[k] = it.states[k].empty() ? nullptr : it.states[k].data();
    }
    adam_update(args, Isa::scalar);
    it.recorded = true;
  }

  // Parameters of one family one after the other, cut at every `capacity`.
  void lay_out() {
    std::vector<char> done(parameters_.size());
    for (std::size_t first = 0; first < parameters_.size(); ++first) {
      if (done[first]) continue;
      const Family& family = parameters_[first].shape.family;
      std::int64_t position = 0;
      const std::size_t base = specs_.size();
      for (std::size_t p = first; p < parameters_.size(); ++p) {
        const Shape& shape = parameters_[p].shape;
        if (shape.family.param_dtype != family.param_dtype ||
            shape.family.format != family.format || shape.family.amsgrad != family.amsgrad) {
          continue;
        }
        done[p] = 1;
        for (std::int64_t from = 0; from < shape.count;) {
          const std::int64_t chunk = (position + from) / options_.capacity;
          const std::int64_t at = (position + from) % options_.capacity;
          const std::int64_t count = std::min(shape.count - from, options_.capacity - at);
          while (static_cast<std::int64_t>(specs_.size() - base) <= chunk) add_spec(family);
          specs_[base + chunk].segments.push_back({static_cast<int>(p), from, at, count});
          from += count;
        }
        position += (shape.count + 31) / 32 * 32 + options_.gap;
      }
      const Segment& last = specs_.back().segments.back();
      specs_.back().elements = (last.chunk_offset + last.count + 31) / 32 * 32;
    }
    for (const ChunkSpec& spec : specs_) {
      const Layout layout(spec);
      at_.push_back(area_bytes_);
      area_bytes_ += layout.weight().file_at + layout.weight().bytes;
    }
    for (const int c : options_.resident) {
      const Layout layout(specs_[c]);
      for (int k = 0; k < layout.streams; ++k) {
        homes_.emplace_back(layout.parts[k].length(specs_[c].elements));
        specs_[c].resident[k] = homes_.back().data();
      }
    }
  }

  void add_spec(const Family& family) {
    ChunkSpec spec;
    spec.family = family;
    spec.elements = options_.capacity;
    specs_.push_back(spec);
  }

  void connect(const std::vector<Left>& left) {
    pipeline_ =
        std::make_unique<Pipeline>(*engine_, best_isa(), options_.order, Team{.few = options_.few});
    set_slots(options_.slots);
    for (std::size_t c = 0; c < specs_.size(); ++c) {
      ChunkSpec spec = specs_[c];
      spec.place = left.empty() ? (options_.durable ? DiskPosition{} : places_[c]) : left[c].place;
      const bool blank = left.empty() || left[c].blank;
      const int number = pipeline_->add_chunk(
          spec, blank, left.empty() ? std::vector<std::uint32_t>() : left[c].checksums);
      CHECK(number == static_cast<int>(c));
      if (spec.place.file < 0) aim(0, c);
    }
  }

  RigOptions options_;
  std::unique_ptr<Engine> engine_;
  int fd_ = -1;
  int file_ = -1;
  std::int64_t area_bytes_ = 0;
  std::vector<Parameter> parameters_;
  std::vector<ChunkSpec> specs_;
  std::map<int, std::vector<std::vector<float>>> staging_;  // by chunk, of each piece
  std::vector<std::int64_t> at_;                            // of a chunk, in an area
  std::vector<DiskPosition> places_;
  std::vector<std::vector<char>> homes_;
  Memory ring_;
  std::int64_t slot_bytes_ = 0;
  std::vector<char> due_;  // in the step of now, by parameter
  int number_ = 0;
  bool reopened_ = false;
  std::unique_ptr<Pipeline> pipeline_;
};

using Make = std::unique_ptr<Engine> (*)(const EngineOptions&);

// The backends that work here.
inline std::vector<Make> backends() {
  std::vector<Make> found = {make_threads_engine};
  try {
    make_uring_engine({1, 4096});
    found.push_back(make_uring_engine);
  } catch (const std::system_error& error) {
    std::printf("io_uring is not tested: %s\n", error.what());
  }
  return found;
}

// A deadlock ends the program, and says where.
inline char g_doing[256] = "nothing";

inline void doing(const char* what, unsigned long seed = 0) {
  if (std::getenv("STOW_VERBOSE") != nullptr) std::fprintf(stderr, "%s %lu\n", what, seed);
  std::snprintf(g_doing, sizeof g_doing, "hangs in %s (%lu)\n", what, seed);
  std::signal(SIGALRM, [](int) {
    (void)!write(2, g_doing, std::strlen(g_doing));
    _exit(2);
  });
  alarm(std::getenv("STOW_VERBOSE") ? 6 : 120);
}

inline constexpr int kChunks = 6;  // of the default rig: three parameters of two chunks each
inline const std::vector<int> kHome = {4, 5};

inline RigOptions with(int slots, Order order = Order::alternating,
                       std::vector<int> resident = kHome) {
  RigOptions options;
  options.slots = slots;
  options.order = order;
  options.resident = std::move(resident);
  return options;
}

inline RigOptions durable(int slots, Order order, std::vector<int> resident = kHome) {
  RigOptions options = with(slots, order, std::move(resident));
  options.durable = true;
  return options;
}

inline constexpr StepSpec kOpen{.open = true};
inline constexpr StepSpec kCapture{.capture = true};
inline constexpr StepSpec kOpenCapture{.open = true, .capture = true};
inline constexpr StepSpec kBackground{.caller = Caller::computes};
inline constexpr StepSpec kOutside{.caller = Caller::updates};
inline constexpr StepSpec kOutsideCapture{.capture = true, .caller = Caller::updates};
inline constexpr Order kOrders[] = {Order::alternating, Order::given};

template <class Exception, class Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Exception&) {
    return true;
  }
  return false;
}

inline bool soon(const std::function<bool()>& holds) {
  for (int turn = 0; turn < 20000; ++turn) {
    if (holds()) return true;
    usleep(100);
  }
  return false;
}

inline void check_all(Rig& rig) {
  CHECK(rig.pipeline().quiesce().error == 0);
  CHECK(rig.pipeline().counters().slots_in_use == 0);
  CHECK(rig.agrees());
  CHECK(rig.states_agree());
}

}  // namespace stow
