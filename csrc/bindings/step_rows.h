// The rows of a step that repeats the last one.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "pipeline/pipeline.h"

namespace stow {

// [Note: Repeated steps] Most steps differ from the one before in nothing but the gradients: the
// same parameters, at the same addresses, have one each, and `optimizer.state` holds the same
// tensors. Checking that takes a microsecond for each parameter here, and ten in Python. `gather`
// asks for no more than that: whatever else it finds, Python looks at the step from the start, and
// says what is wrong with it.
class StepRows {
 public:
  // What identifies a usable tensor: torch.Tensor, torch.strided, and the dtypes by their numbers.
  struct Torch {
    nb::object tensor;
    nb::object strided;
    std::vector<nb::object> dtypes;
  };

  // What of a parameter that the last step updated must be as it was.
  struct Row {
    int number;  // in the store
    PyTypeObject* type;
    Address weight;  // where its elements are
    std::int64_t version;
    std::int64_t numel;
    int dtype;
    nb::object strides;  // none: contiguous
    Address count;       // of the fp32 number of steps
  };

  // (number, version and address of the weight, its elements, number of its dtype) of a parameter.
  using Updated = std::tuple<int, std::int64_t, Address, std::int64_t, int>;

  // `rows`: of each parameter of the groups, in their order. The number is -1 where the last step
  // did not update it: it must have no gradient then; -2 where it is not the pipeline's. Of the
  // others `counts` has the step counts.
  StepRows(Torch torch, int size, const nb::list& owners, const std::vector<Updated>& rows,
           const nb::list& counts, const nb::dict& states);

  // Fills the rows by the gradients. Returns the parameters that have one, and the distinct (group,
  // step) of them in the order of the table of scalars; nothing where a step is no repetition.
  std::optional<std::pair<nb::list, nb::list>> gather(const nb::list& groups,
                                                      const nb::list& owners,
                                                      const nb::list& counts, const nb::list& views,
                                                      const nb::dict& states);

  // Counts the step that was gathered, whose weights' versions have been incremented.
  void count(const nb::list& owners, const nb::list& counts);
  // Of the weights after the last step, by row.
  std::vector<std::int64_t> versions() const;

  const std::vector<StepParameter>& parameters() const { return parameters_; }
  std::vector<nb::object> take_weights() { return std::move(weights_); }
  std::vector<std::vector<nb::object>> take_gradients() { return std::move(gradients_); }

 private:
  bool find_states(const nb::dict& states);
  bool is_same(const Row& row, PyObject* owner, PyObject* count, PyObject* views,
               PyObject* state) const;
  static bool has_strides(const Row& row, PyObject* tensor);
  bool add(const Row& row, PyObject* owner, PyObject* gradient);
  void release();

  Torch torch_;
  std::vector<Row> rows_;
  // The keys of the optimizer's states, in order, and their rows (-1: of none). A look-up would
  // call Python, where tensors have their hash.
  std::vector<std::pair<PyObject*, int>> keys_;
  std::vector<PyObject*> state_of_;        // by row; borrowed while `gather` runs
  std::vector<StepParameter> parameters_;  // by number
  std::vector<nb::object> weights_;        // their owners
  std::vector<std::vector<nb::object>> gradients_;
  std::vector<std::size_t> updated_;  // rows of the step that was gathered
};

void bind_step_rows(nb::module_& m);

}  // namespace stow
