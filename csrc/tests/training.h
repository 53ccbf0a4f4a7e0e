// A small training over flat arrays: what a pipeline has to arrive at, bit by bit.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "pipeline/pipeline.h"

namespace stow {

struct Shape {
  Family family;
  std::int64_t count;
};

inline AdamHyper hyper_of(int step) {
  return {0.1f,  0.999f, 0.001f, 0.99f, 0.0f, 0.01f * static_cast<float>(step),
          10.0f, 1e-8f,  1.0f,   0.3f};
}

struct TrainedParameter {
  TrainedParameter(const Shape& s, std::mt19937& random) : shape(s) {
    StreamSpec streams[kMaxStreams];
    const Family& f = shape.family;
    const int count = streams_of(f.param_dtype, f.format, f.amsgrad, f.ema, streams);
    for (int k = 0; k < count; ++k) {
      const std::int64_t groups = (shape.count + streams[k].per - 1) / streams[k].per;
      states[static_cast<int>(streams[k].stream)].resize(groups * streams[k].bytes);
    }
    new_weight(random);
    gradient.resize(shape.count);
  }

  bool is_16_bit() const { return shape.family.param_dtype != DType::f32; }
  bool agrees() const { return weight == wanted; }

  // Someone else writes the weight.
  void new_weight(std::mt19937& random) {
    const std::int64_t width = size_of(shape.family.param_dtype);
    weight.resize(shape.count * width);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < shape.count; ++i) {
      const float value = normal(random);  // a bf16 is its upper half
      std::memcpy(&weight[i * width], reinterpret_cast<const char*>(&value) + 4 - width, width);
    }
    wanted = weight;
    old.resize(weight.size());
    recorded = false;
  }

  void new_gradient(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (float& value : gradient) value = normal(random);
  }

  Shape shape;
  std::vector<char> weight, wanted;
  std::vector<char> old;  // where a step that may be undone puts the weight
  std::vector<float> gradient;
  std::vector<char> states[kMaxStreams];  // as they ought to be
  bool recorded = false;                  // the weight is what our last update left
  bool seed = false;
};

class FlatTraining {
 public:
  explicit FlatTraining(const std::vector<Shape>& shapes) {
    std::mt19937 random(1);
    for (const Shape& shape : shapes) parameters_.emplace_back(shape, random);
  }

  int size() const { return static_cast<int>(parameters_.size()); }
  TrainedParameter& at(int parameter) { return parameters_.at(parameter); }
  auto begin() const { return parameters_.begin(); }
  auto end() const { return parameters_.end(); }

  void start_step(int number) {
    number_ = number;
    std::mt19937 random(100 + static_cast<unsigned>(number));
    for (TrainedParameter& it : parameters_) {
      it.new_gradient(random);
      it.seed = it.is_16_bit() && !it.recorded;
    }
  }

  // What the step is told of the parameter, whose gradient is at `gradient`.
  StepParameter row(int parameter, const void* gradient) {
    TrainedParameter& it = at(parameter);
    return {it.weight.data(), gradient, DType::f32, it.seed, 0, key_of(parameter), it.old.data()};
  }

  // The step's update of the parameter, but for memory.
  AdamArgs args_of(int parameter) {
    const TrainedParameter& it = at(parameter);
    AdamArgs args{};
    args.n = it.shape.count;
    args.key = key_of(parameter);
    args.param_dtype = it.shape.family.param_dtype;
    args.format = it.shape.family.format;
    args.amsgrad = it.shape.family.amsgrad;
    args.ema = it.shape.family.ema;
    args.seed_master = it.seed;
    args.hyper = hyper_of(number_);
    return args;
  }

  void apply(int parameter) {
    TrainedParameter& it = at(parameter);
    AdamArgs args = args_of(parameter);
    args.param = it.wanted.data();
    args.grad = it.gradient.data();
    for (int k = 0; k < kMaxStreams; ++k) {
      args.states[k] = it.states[k].empty() ? nullptr : it.states[k].data();
    }
    adam_update(args, Isa::scalar);
    it.recorded = true;
  }

  // The memory that a pipeline knows stays where it is.
  void go_back_to(const FlatTraining& before) {
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      TrainedParameter& it = parameters_[p];
      const TrainedParameter& was = before.parameters_[p];
      std::copy(was.weight.begin(), was.weight.end(), it.weight.begin());
      std::copy(was.wanted.begin(), was.wanted.end(), it.wanted.begin());
      for (int k = 0; k < kMaxStreams; ++k) it.states[k] = was.states[k];
      it.recorded = was.recorded;
    }
  }

  bool agrees() const {
    return std::all_of(begin(), end(), [](const TrainedParameter& it) { return it.agrees(); });
  }

  // What was freed and written to by others: sanitizers see who still reads it.
  void spoil_gradients() {
    for (TrainedParameter& it : parameters_) it.gradient.assign(it.gradient.size(), 1e30f);
  }

  std::vector<char> all_but(int skip = -1) const {
    std::vector<char> due(parameters_.size(), 1);
    if (skip >= 0) due[skip] = 0;
    return due;
  }

 private:
  std::uint64_t key_of(int parameter) const { return 1000 * number_ + parameter; }

  std::vector<TrainedParameter> parameters_;
  int number_ = 0;  // of the step
};

}  // namespace stow
