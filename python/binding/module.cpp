// Sharded modules for Python: the tree of tensors that fully_shard reads, the unit that it makes,
// and one call of that unit.
//
// A call has three moments in Python: enter() with the tensors among the arguments, the module's own
// code, leave() with the tensors among the results. Both return the tensors to use in their
// place. Next: python/tessera/_unit.py.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding.h"
#include "comm/torch_compat.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/leaf.h"
#include "tessera/error.h"
#include "tessera/model_contract.h"
#include "tessera/optim.h"
#include "tessera/trainable.h"
#include "tessera/world.h"

namespace tessera::python {
namespace {

/// The tensors of a Python module under its names, and its children: what fully_shard walks through.
class Tree : public torch::nn::Module {
 public:
  void add_parameter(const std::string& name, const at::Tensor& tensor) {
    register_parameter(name, tensor, tensor.requires_grad());
  }
  void add_buffer(const std::string& name, const at::Tensor& tensor) {
    register_buffer(name, tensor);
  }
  void add_child(const std::string& name, std::shared_ptr<torch::nn::Module> child) {
    register_module(name, std::move(child));
  }
};

/// Whether nothing of Python refers to the tensor but the list of the call and the value in which
/// it was found.
bool is_python_alone(const py::list& tensors, std::size_t place) {
  PyObject* const tensor = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(place));
  Py_ssize_t times = 0;
  for (const auto& other : tensors) times += other.is(py::handle(tensor)) ? 1 : 0;
  return Py_REFCNT(tensor) <= 2 * times;
}

/// Whether nothing of Python refers to the tensor that a result is a view of, but the caller, which
/// has one reference.
bool is_base_alone(const py::object& base) {
#if TESSERA_TORCH_AT_LEAST(2, 13)
  constexpr Py_ssize_t of_tensor = 1;  // while C++ refers to a tensor, that refers to its object
#else
  constexpr Py_ssize_t of_tensor = 0;
#endif
  return Py_REFCNT(base.ptr()) <= 1 + of_tensor;
}

/// Tensors of one list, as the library wants them.
struct Tensors {
  explicit Tensors(const py::list& list) {
    values.reserve(list.size());
    for (const auto& each : list) values.push_back(py::cast<at::Tensor>(each));
    for (auto& value : values) places.push_back(&value);
  }
  /// Those that the library has replaced, by their places; None for the others.
  py::object replaced(const std::vector<const at::TensorImpl*>& before) const {
    py::list result;
    bool any = false;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool is_new = values[i].unsafeGetTensorImpl() != before[i];
      any = any || is_new;
      result.append(is_new ? py::cast(values[i]) : py::none());
    }
    return any ? py::object(std::move(result)) : py::none();
  }
  std::vector<const at::TensorImpl*> identities() const {
    std::vector<const at::TensorImpl*> result;
    for (const auto& value : values) result.push_back(value.unsafeGetTensorImpl());
    return result;
  }
  std::vector<at::Tensor> values;
  std::vector<at::Tensor*> places;
};

/// Whether a parameter is frozen decides where it lies, and was decided by fully_shard. Errors: kUsage
/// naming the first one whose tensor in the module says something else now.
void require_same_trainable(const fsdp::Unit& unit) {
  for (const auto& parameter : unit.parameters()) {
    for (const auto& leaf : parameter->leaves) {
      const bool found = leaf->tensor.requires_grad();
      const bool expected = parameter->contract.trainable;
      if (found == expected) continue;
      throw Error(ErrorKind::kUsage,
                  concat("parameter ", parameter->contract.name, ": found requires_grad ",
                         found ? "True" : "False",
                         " set on the tensor of its module after fully_shard, expected ",
                         expected ? "True" : "False", " as it was; use module.set_trainable(\"",
                         parameter->contract.name, "\", ", found ? "True" : "False",
                         ") of the outermost module, on all ranks"));
    }
  }
}

/// Whether a trained tensor of the module has lost the `.grad` that refuses its use (grad/leaf.h).
bool lacks_mark(const fsdp::Parameter& parameter, const grad::Leaf& leaf) {
  return parameter.contract.trainable && !leaf.tensor.grad().defined();
}

void give_marks(const fsdp::Runtime& runtime) {
  for (const auto* unit : runtime.units()) {
    for (const auto& parameter : unit->parameters()) {
      for (const auto& leaf : parameter->leaves) {
        if (lacks_mark(*parameter, *leaf)) grad::set_trainable(*leaf, true);
      }
    }
  }
}

/// An optimizer that was made before fully_shard, and a plain module around the sharded one or inside
/// of it, have the module's own tensors: their zero_grad() takes away what would refuse their step(),
/// and drops no gradient. Errors: kUsage naming the first one; all have their marks again then.
void require_marks(const fsdp::Unit& unit) {
  for (const auto& parameter : unit.parameters()) {
    for (const auto& leaf : parameter->leaves) {
      if (!lacks_mark(*parameter, *leaf)) continue;
      give_marks(unit.runtime());
      throw Error(
          ErrorKind::kUsage,
          concat("parameter ", parameter->contract.name,
                 ": found the .grad of its module's own tensor cleared, by zero_grad() of an "
                 "optimizer that was made before fully_shard, or of a plain module around the "
                 "sharded one or inside of it, expected zero_grad() of what fully_shard returned, "
                 "or of an optimizer over its parameters(): gradients are on those"));
    }
  }
}

/// One call of a unit. Its arguments live as long as it.
class UnitCall {
 public:
  explicit UnitCall(std::shared_ptr<PythonUnit> unit) : unit_(std::move(unit)) {}
  ~UnitCall() {
    if (call_) call_->fail("its call was dropped");
  }
  UnitCall(const UnitCall&) = delete;
  UnitCall& operator=(const UnitCall&) = delete;

  py::object enter(const py::list& arguments) {
    inputs_ = std::make_unique<Tensors>(arguments);
    const auto before = inputs_->identities();
    {
      const WithoutGil release;
      call_ = std::make_unique<PythonUnit::Call>(*unit_, PythonUnit::Call::kind_here());
      guarded([&] {
        if (at::GradMode::is_enabled()) {
          require_same_trainable(*unit_->unit());
          require_marks(*unit_->unit());
        }
        call_->enter(inputs_->places);
      });
    }
    return inputs_->replaced(before);
  }

  py::object leave(const py::list& results) {
    // Asked first: while C++ has a tensor, too, that counts as one more reference to its object.
    std::vector<std::size_t> wrappers;
    for (std::size_t i = 0; i < results.size(); ++i) {
      wrappers.push_back(is_python_alone(results, i) ? 1 : 0);
    }
    Tensors outputs(results);
    const auto before = outputs.identities();
    std::vector<py::object> bases;
    std::vector<std::size_t> base_wrappers;
    for (const auto& value : outputs.values) {
      if (value.is_view()) bases.push_back(py::cast(at::Tensor(value._base())));
      base_wrappers.push_back(value.is_view() && is_base_alone(bases.back()) ? 1 : 0);
    }
    py::object replaced;
    {
      const WithoutGil release;
      try {
        guarded([&] { call_->leave(outputs.places, wrappers, base_wrappers); });
      } catch (const std::exception&) {
        outputs.values.clear();  // here, where another thread may take the GIL
        throw;
      }
      call_.reset();
    }
    replaced = outputs.replaced(before);
    const WithoutGil release;
    inputs_.reset();
    outputs.values.clear();
    return replaced;
  }

  void fail(const std::string& why) {
    end([&] { call_->fail(why); });
  }
  void stop() {
    end([&] { call_->stop(); });
  }

 private:
  /// An error of the library ends the call, as an exception of a module does.
  template <class Act>
  void guarded(const Act& act) {
    try {
      act();
    } catch (const std::exception& error) {
      call_->fail(error.what());
      call_.reset();
      throw;
    }
  }
  template <class Act>
  void end(const Act& act) {
    if (!call_) return;
    act();
    call_.reset();
    inputs_.reset();
  }

  std::shared_ptr<PythonUnit> unit_;
  std::unique_ptr<Tensors> inputs_;
  std::unique_ptr<PythonUnit::Call> call_;
};

// Reductions under way on the CPU have at most as many bytes. The library's default keeps the wire
// busier; here one layer's is enough, as in FSDP2, and the memory of the rest is for activations.
constexpr std::int64_t kInFlightBytes = std::int64_t{8} << 20;

ShardOptions make_options(const std::string& name, std::optional<bool> reshard_after_forward,
                          std::int64_t merge_below_bytes, std::optional<double> divide_factor,
                          const TorchDType& output_dtype, std::vector<at::Tensor> ignored,
                          std::vector<std::vector<std::string>> tied,
                          std::vector<std::string> unstored_buffers, bool on_cpu) {
  ShardOptions options;
  options.name = name;
  options.reshard_after_forward = reshard_after_forward;
  options.merge_below_bytes = merge_below_bytes;
  options.divide_factor = divide_factor;
  options.output_dtype = dtype_of(output_dtype);
  options.ignored_parameters = std::move(ignored);
  options.tied = std::move(tied);
  options.unstored_buffers = std::move(unstored_buffers);
  if (on_cpu) options.in_flight_bytes = kInFlightBytes;
  return options;
}

/// The names and reasons of one contract. [a dict a parameter, as ParameterContract of _policy.py]
py::dict to_python(const GradContract& contract) {
  py::dict reasons;
  for (std::size_t field = 0; field < contract.reasons.size(); ++field) {
    reasons[py::str(std::string(to_string(static_cast<ContractField>(field))))] =
        contract.reasons[field];
  }
  py::dict result;
  result["name"] = contract.name;
  result["shape"] = py::tuple(py::cast(contract.shape));
  result["storage"] = to_scalar_type(contract.storage.dtype);
  result["compute"] = to_scalar_type(contract.compute.dtype);
  result["grad"] = torch_dtype_of(contract.grad);
  result["accumulate"] = to_scalar_type(contract.accumulate);
  result["reduce"] = to_scalar_type(contract.reduce);
  result["final"] = to_scalar_type(contract.final);
  result["trainable"] = contract.trainable;
  result["replicated"] = contract.replicated();
  result["master"] = std::string(to_string(contract.master));
  result["state"] = to_scalar_type(contract.state);
  result["aliases"] = py::tuple(py::cast(contract.aliases));
  result["raw_sum_by_autograd"] = contract.raw_sum_by_autograd;
  result["reasons"] = reasons;
  return result;
}

py::dict to_python(const BufferContract& contract) {
  py::dict result;
  result["name"] = contract.name;
  result["shape"] = py::tuple(py::cast(contract.shape));
  result["storage"] = to_scalar_type(contract.storage);
  result["compute"] = to_scalar_type(contract.compute);
  result["stored"] = contract.stored;
  return result;
}

py::dict to_python(const UnitContract& contract) {
  py::dict result;
  result["name"] = contract.name;
  result["nested"] = contract.nested;
  result["input"] = torch_dtype_of(contract.input);
  result["activation"] = torch_dtype_of(contract.activation);
  result["output"] = torch_dtype_of(contract.output);
  return result;
}

template <class Value>
py::list to_list(const std::vector<Value>& values) {
  py::list result;
  for (const auto& value : values) result.append(to_python(value));
  return result;
}

/// (the table as text, parameters, buffers, units)
py::tuple contract_of(const PythonUnit& unit) {
  const auto contract = unit.contract();
  return py::make_tuple(to_string(contract), to_list(contract.parameters),
                        to_list(contract.buffers), to_list(contract.units));
}

using Pairs = std::vector<std::pair<std::string, at::Tensor>>;
/// Names of contracts; none: all parameters.
using Chosen = std::optional<std::set<std::string>>;

/// Clones of the chosen ones, as the library uses its memory for the next bucket. Collective: every
/// rank gathers all.
Pairs full(const PythonUnit& unit, bool gradients, const Chosen& names) {
  Pairs result;
  const auto keep = [&](const std::string& name, const at::Tensor& tensor) {
    if (!names || names->contains(name)) result.emplace_back(name, tensor.clone());
  };
  const at::NoGradGuard no_grad;
  if (gradients) {
    unit.visit_full_gradients(keep);
  } else {
    unit.visit_full_parameters(keep);
  }
  return result;
}

void change_trainable(PythonUnit& unit,
                      const std::vector<std::tuple<std::vector<std::string>, bool, bool>>& changes,
                      const std::vector<Optimizer*>& follow) {
  std::vector<TrainableChange> asked;
  for (const auto& [match, trainable, replicate] : changes) {
    asked.push_back({match, trainable, replicate ? FrozenAs::kReplicate : FrozenAs::kShard});
  }
  set_trainable(unit, asked, follow);
}

/// Gives another tensor the grad_dtype that a user has set of `from`, which Python cannot tell from
/// the one that every tensor has.
void copy_grad_dtype(const at::Tensor& from, const at::Tensor& to) {
  const auto* autograd = torch::autograd::impl::get_autograd_meta(from);
  if (autograd != nullptr && autograd->grad_dtype_) to.set_grad_dtype(*autograd->grad_dtype_);
}

std::vector<ShardedBase*> bases(const std::vector<PythonUnit*>& units) {
  return {units.begin(), units.end()};
}

void bind_unit(py::module_& module) {
  using Unit = PythonUnit;
  py::class_<Unit, std::shared_ptr<Unit>>(module, "Unit", DestroyedWithoutGil())
      .def(py::init([](std::shared_ptr<Tree> tree, const Mesh& mesh, const PrecisionPolicy& policy,
                       const std::string& name, std::optional<bool> reshard_after_forward,
                       std::int64_t merge_below_bytes, std::optional<double> divide_factor,
                       const TorchDType& output_dtype, std::vector<at::Tensor> ignored,
                       std::vector<std::vector<std::string>> tied,
                       std::vector<std::string> unstored_buffers) {
             auto options =
                 make_options(name, reshard_after_forward, merge_below_bytes, divide_factor,
                              output_dtype, std::move(ignored), std::move(tied),
                              std::move(unstored_buffers), mesh.world()->device().is_cpu());
             const WithoutGil release;
             auto unit = std::make_shared<Unit>(std::move(tree), mesh, policy, options);
             // zero_grad() gives memory back to PyTorch's allocator, as programs in Python expect.
             fsdp::unit_of_handle(unit->unit()).runtime().free_gradients();
             return unit;
           }),
           py::arg("tree"), py::arg("mesh"), py::arg("policy"), py::kw_only(), py::arg("name"),
           py::arg("reshard_after_forward"), py::arg("merge_below_bytes"), py::arg("divide_factor"),
           py::arg("output_dtype"), py::arg("ignored"), py::arg("tied"),
           py::arg("unstored_buffers"))
      .def("contract", &contract_of)
      .def(
          "full_parameters",
          [](const Unit& unit, const Chosen& names) { return full(unit, false, names); },
          ReleaseGil(), py::arg("names"))
      .def(
          "full_gradients",
          [](const Unit& unit, const Chosen& names) { return full(unit, true, names); },
          ReleaseGil(), py::arg("names"))
      .def("set_requires_gradient_sync", &Unit::set_requires_gradient_sync, ReleaseGil())
      .def("set_requires_all_reduce", &Unit::set_requires_replica_reduce, ReleaseGil())
      .def("set_is_last_backward", &Unit::set_is_last_backward, ReleaseGil())
      .def("set_reshard_after_forward", &Unit::set_reshard_after_forward, ReleaseGil())
      .def("set_reshard_after_backward", &Unit::set_reshard_after_backward, ReleaseGil())
      .def("set_unshard_in_backward", &Unit::set_unshard_in_backward, ReleaseGil())
      .def(
          "set_forward_prefetch",
          [](Unit& unit, const std::vector<Unit*>& units) {
            unit.set_forward_prefetch(bases(units));
          },
          ReleaseGil())
      .def(
          "set_backward_prefetch",
          [](Unit& unit, const std::vector<Unit*>& units) {
            unit.set_backward_prefetch(bases(units));
          },
          ReleaseGil())
      .def("set_gradient_divide_factor", &Unit::set_gradient_divide_factor, ReleaseGil())
      .def("set_trainable", &change_trainable, ReleaseGil())
      .def("unshard", &Unit::unshard, ReleaseGil())
      .def("unshard_async", &Unit::unshard_async, ReleaseGil())
      .def("reshard", &Unit::reshard, ReleaseGil())
      .def(
          "zero_grad", [](Unit& unit, bool set_to_none) { unit.zero_grad(set_to_none); },
          ReleaseGil());
}

}  // namespace

void bind_module(py::module_& module) {
  py::class_<Tree, std::shared_ptr<Tree>>(module, "Tree", DestroyedWithoutGil())
      .def(py::init<>())
      .def("add_parameter", &Tree::add_parameter)
      .def("add_buffer", &Tree::add_buffer)
      .def("add_tree", [](Tree& tree, const std::string& name,
                          std::shared_ptr<Tree> child) { tree.add_child(name, std::move(child)); })
      .def("add_unit", [](Tree& tree, const std::string& name, std::shared_ptr<PythonUnit> child) {
        tree.add_child(name, std::move(child));
      });
  module.def("copy_grad_dtype", &copy_grad_dtype);
  py::class_<UnshardHandle>(module, "UnshardHandle", DestroyedWithoutGil())
      .def("wait", &UnshardHandle::wait, ReleaseGil());
  bind_unit(module);
  py::class_<UnitCall>(module, "UnitCall", DestroyedWithoutGil())
      .def(py::init<std::shared_ptr<PythonUnit>>())
      .def("enter", &UnitCall::enter)
      .def("leave", &UnitCall::leave)
      .def("fail", &UnitCall::fail, ReleaseGil())
      .def("stop", &UnitCall::stop, ReleaseGil());
}

}  // namespace tessera::python
