#include "bindings/step_rows.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

namespace stow {
namespace {

constexpr int kIdle = -1;     // a parameter that the last step did not update
constexpr int kForeign = -2;  // a parameter that others update
// As tensorstow.step.step_plan has them: a key is a function of the parameter and its step alone.
constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr std::uint64_t kKeyMask = (std::uint64_t{1} << 63) - 1;
constexpr float kMostSteps = 1 << 24;  // from there on fp32 does not count

// The attributes of tensors that are asked for; interned once, and kept until the process ends.
struct Names {
  PyObject* grad = PyUnicode_InternFromString("grad");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* layout = PyUnicode_InternFromString("layout");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* version = PyUnicode_InternFromString("_version");
  PyObject* storage = PyUnicode_InternFromString("untyped_storage");
  PyObject* params = PyUnicode_InternFromString("params");
  PyObject* step = PyUnicode_InternFromString("step");
};

const Names& names() {
  static const Names kNames;
  return kNames;
}

nb::object checked(PyObject* made) {
  if (made == nullptr) nb::raise_python_error();
  return nb::steal(made);
}

nb::object get(PyObject* tensor, PyObject* name) { return checked(PyObject_GetAttr(tensor, name)); }

nb::object call(PyObject* tensor, PyObject* name) {
  PyObject* args[] = {tensor};
  return checked(PyObject_VectorcallMethod(name, args, 1, nullptr));
}

std::int64_t number(const nb::object& value) { return nb::cast<std::int64_t>(value); }

Address address_of(PyObject* tensor) {
  return static_cast<Address>(number(call(tensor, names().data_ptr)));
}

// Borrowed; null where there is none.
PyObject* item(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return found;
}

// Borrowed.
PyObject* at(const nb::list& list, std::size_t index) {
  return PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(index));
}

int code_of(const std::vector<nb::object>& dtypes, const nb::object& dtype) {
  for (std::size_t code = 0; code < dtypes.size(); ++code) {
    if (dtypes[code].is(dtype)) return static_cast<int>(code);
  }
  return -1;
}

// Whether the parameters of the groups are `owners`, in order; `group_of` gets each one's group.
bool has_parameters(const nb::list& groups, const nb::list& owners,
                    std::vector<std::size_t>& group_of) {
  group_of.clear();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    PyObject* group = at(groups, g);
    PyObject* params = PyDict_Check(group) ? item(group, names().params) : nullptr;
    if (params == nullptr || !PyList_Check(params)) return false;
    for (Py_ssize_t i = 0; i < PyList_Size(params); ++i) {
      if (group_of.size() == owners.size()) return false;
      if (PyList_GetItem(params, i) != at(owners, group_of.size())) return false;
      group_of.push_back(g);
    }
  }
  return group_of.size() == owners.size();
}

}  // namespace

StepRows::StepRows(Torch torch, int size, const nb::list& owners, const std::vector<Updated>& rows,
                   const nb::list& counts, const nb::dict& states)
    : torch_(std::move(torch)), parameters_(size) {
  if (owners.size() != rows.size() || counts.size() != rows.size()) {
    throw std::invalid_argument("StepRows: a row and a count for each parameter");
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Row row{};
    std::tie(row.number, row.version, row.weight, row.numel, row.dtype) = rows[i];
    if (row.number >= size) throw std::invalid_argument("StepRows: a number beyond the store");
    if (row.number >= 0) {
      PyObject* owner = at(owners, i);
      row.type = Py_TYPE(owner);
      if (!nb::cast<bool>(call(owner, names().is_contiguous))) {
        row.strides = call(owner, names().stride);
      }
      row.count = address_of(at(counts, i));
    }
    rows_.push_back(row);
  }
  std::unordered_map<PyObject*, int> row_of;
  for (std::size_t i = 0; i < owners.size(); ++i) row_of[at(owners, i)] = static_cast<int>(i);
  PyObject* key = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(states.ptr(), &position, &key, nullptr)) {
    const auto found = row_of.find(key);
    keys_.emplace_back(key, found == row_of.end() ? -1 : found->second);
  }
}

// False: other parameters have states, or in another order.
bool StepRows::find_states(const nb::dict& states) {
  state_of_.assign(rows_.size(), nullptr);
  PyObject* key = nullptr;
  PyObject* state = nullptr;
  Py_ssize_t position = 0;
  std::size_t k = 0;
  while (PyDict_Next(states.ptr(), &position, &key, &state)) {
    if (k == keys_.size() || keys_[k].first != key) return false;
    if (keys_[k].second >= 0) state_of_[keys_[k].second] = state;
    ++k;
  }
  return k == keys_.size();
}

// Whether a tensor's elements are in the order of the weight's memory.
bool StepRows::has_strides(const Row& row, PyObject* tensor) {
  if (!row.strides.is_valid()) return nb::cast<bool>(call(tensor, names().is_contiguous));
  return call(tensor, names().stride).equal(row.strides);
}

// Whether the weight is where it was, and the states are those that it had.
bool StepRows::is_same(const Row& row, PyObject* owner, PyObject* count, PyObject* views,
                       PyObject* state) const {
  const Names& n = names();
  if (Py_TYPE(owner) != row.type || address_of(owner) != row.weight ||
      !nb::cast<bool>(get(owner, n.is_cpu)) || stow::number(call(owner, n.numel)) != row.numel ||
      code_of(torch_.dtypes, get(owner, n.dtype)) != row.dtype || !has_strides(row, owner)) {
    return false;
  }
  // A 16-bit weight that others have written is its master's new value.
  if (row.dtype != 0 && stow::number(get(owner, n.version)) != row.version) return false;
  if (state == nullptr || !PyDict_Check(state) || item(state, n.step) != count ||
      address_of(count) != row.count || code_of(torch_.dtypes, get(count, n.dtype)) != 0 ||
      stow::number(call(count, n.numel)) != 1) {
    return false;
  }
  PyObject* name = nullptr;
  PyObject* view = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(views, &position, &name, &view)) {
    if (item(state, name) != view) return false;
  }
  return true;
}

// Fills the row of the parameter by its gradient. False: only Python can use the gradient.
bool StepRows::add(const Row& row, PyObject* owner, PyObject* gradient) {
  const Names& n = names();
  if (reinterpret_cast<PyObject*>(Py_TYPE(gradient)) != torch_.tensor.ptr() ||
      !get(gradient, n.layout).is(torch_.strided) || !nb::cast<bool>(get(gradient, n.is_cpu)) ||
      stow::number(call(gradient, n.numel)) != row.numel) {
    return false;
  }
  const int dtype = code_of(torch_.dtypes, get(gradient, n.dtype));
  if (dtype < 0) return false;
  if (!has_strides(row, gradient)) return false;
  StepParameter& parameter = parameters_[row.number];
  parameter.param = stow::at<void>(row.weight);
  parameter.grad = stow::at<void>(address_of(gradient));
  parameter.grad_dtype = static_cast<DType>(dtype);
  parameter.seed_master = false;
  weights_[row.number] = call(owner, n.storage);
  gradients_[row.number].push_back(call(gradient, n.storage));
  return true;
}

std::optional<std::pair<nb::list, nb::list>> StepRows::gather(const nb::list& groups,
                                                              const nb::list& owners,
                                                              const nb::list& counts,
                                                              const nb::list& views,
                                                              const nb::dict& states) {
  std::vector<std::size_t> group_of;
  if (owners.size() != rows_.size() || !has_parameters(groups, owners, group_of)) return {};
  if (!find_states(states)) return {};
  std::pair<nb::list, nb::list> gathered;
  std::map<std::pair<std::size_t, std::int64_t>, int> scalars;
  std::fill(parameters_.begin(), parameters_.end(), StepParameter{});
  release();
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    PyObject* owner = at(owners, i);
    if (row.number == kForeign) continue;
    const nb::object gradient = get(owner, names().grad);
    if (gradient.is_none()) continue;
    if (row.number == kIdle || !is_same(row, owner, at(counts, i), at(views, i), state_of_[i]) ||
        !add(row, owner, gradient.ptr())) {
      release();
      return {};
    }
    const float count = *stow::at<float>(row.count);
    if (!(count >= 0 && count < kMostSteps) || count != std::floor(count)) {
      release();
      return {};
    }
    const std::int64_t step = static_cast<std::int64_t>(count) + 1;
    const auto [found, is_new] =
        scalars.try_emplace({group_of[i], step}, static_cast<int>(scalars.size()));
    if (is_new) gathered.second.append(nb::make_tuple(group_of[i], step));
    StepParameter& parameter = parameters_[row.number];
    parameter.hyper = found->second;
    const auto identity = static_cast<std::uint64_t>(row.number);
    parameter.key =
        (static_cast<std::uint64_t>(step) * kGolden + identity * (kGolden >> 7)) & kKeyMask;
    gathered.first.append(nb::borrow(owner));
    updated_.push_back(i);
  }
  return gathered;
}

// Owners of memory that no step uses.
void StepRows::release() {
  weights_.assign(parameters_.size(), nb::none());
  gradients_.assign(parameters_.size(), {});
  updated_.clear();
}

void StepRows::count(const nb::list& owners, const nb::list& counts) {
  for (std::size_t i : updated_) {
    *stow::at<float>(address_of(at(counts, i))) += 1.0F;
    rows_[i].version = number(get(at(owners, i), names().version));
  }
  updated_.clear();
}

std::vector<std::int64_t> StepRows::versions() const {
  std::vector<std::int64_t> versions;
  for (const Row& row : rows_) versions.push_back(row.version);
  return versions;
}

void bind_step_rows(nb::module_& m) {
  nb::class_<StepRows> c(m, "StepRows");
  c.def(
       "__init__",
       [](StepRows* self, nb::object tensor, nb::object strided, std::vector<nb::object> dtypes,
          int size, const nb::list& owners, const std::vector<StepRows::Updated>& rows,
          const nb::list& counts, const nb::dict& states) {
         new (self) StepRows({std::move(tensor), std::move(strided), std::move(dtypes)}, size,
                             owners, rows, counts, states);
       },
       "tensor"_a, "strided"_a, "dtypes"_a, "size"_a, "owners"_a, "rows"_a, "counts"_a, "states"_a,
       nb::sig("def __init__(self, tensor: object, strided: object, dtypes: list[torch.dtype], "
               "size: int, owners: list[torch.Tensor], "
               "rows: list[tuple[int, int, int, int, int]], counts: list[object], "
               "states: dict[torch.Tensor, dict[str, object]]) -> None"))
      .def("gather", &StepRows::gather, "groups"_a, "owners"_a, "counts"_a, "views"_a, "states"_a,
           "the parameters with a gradient, and (group, step) of each row of scalars; None: a step "
           "that does not repeat the last one",
           nb::sig("def gather(self, groups: list[dict[str, object]], owners: list[torch.Tensor], "
                   "counts: list[object], views: list[dict[str, torch.Tensor]], "
                   "states: dict[torch.Tensor, dict[str, object]]) -> "
                   "tuple[list[torch.Tensor], list[tuple[int, int]]] | None"))
      .def("count", &StepRows::count, "owners"_a, "counts"_a,
           nb::sig("def count(self, owners: list[torch.Tensor], counts: list[object]) -> None"))
      .def("versions", &StepRows::versions);
}

}  // namespace stow
