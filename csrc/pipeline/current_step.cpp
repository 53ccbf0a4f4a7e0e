#include "pipeline/current_step.h"

namespace stow {

void CurrentStep::start(const std::vector<StepParameter>& parameters,
                        const std::vector<AdamHyper>& hypers, const StepSpec& spec,
                        const std::vector<char>& expected) {
  parameters_ = parameters;
  hypers_ = hypers;
  spec_ = spec;
  gradients_.start(parameters.size(), spec.open, expected);
  unfinished_ = 0;
  phase_ = PipelinePhase::stepping;
}

const StepParameter& CurrentStep::set_gradient(int parameter, const void* grad, DType dtype) {
  gradients_.set_arrived(parameter);
  parameters_[parameter].grad = grad;
  parameters_[parameter].grad_dtype = dtype;
  return parameters_[parameter];
}

void CurrentStep::close() {
  gradients_.close();
  spec_.open = false;
}

}  // namespace stow
