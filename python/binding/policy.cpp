// Dtype policies and contracts between Python and the library: words for enumerations, torch.dtype
// for DType.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "tessera/error.h"
#include "tessera/model_contract.h"
#include "tessera/precision.h"

namespace tessera::python {
namespace {

/// The value that `word` names. Errors: kConfig listing the words.
template <class Enum, std::size_t count>
Enum from_word(const char* field, const std::string& word,
               const std::array<std::pair<const char*, Enum>, count>& words) {
  std::string expected;
  for (const auto& [name, value] : words) {
    if (word == name) return value;
    expected += concat(expected.empty() ? "" : ", ", "\"", name, "\"");
  }
  throw Error(ErrorKind::kConfig, concat("MixedPrecisionPolicy: found ", field, " \"", word,
                                         "\", expected one of ", expected));
}

constexpr std::array kRoundings{std::pair{"nearest_even", Rounding::kNearestEven},
                                std::pair{"half_away", Rounding::kHalfAway}};
constexpr std::array kIntrinsics{std::pair{"minority", Intrinsic::kMinority},
                                 std::pair{"all", Intrinsic::kAll},
                                 std::pair{"none", Intrinsic::kNone}};
constexpr std::array kNarrower{std::pair{"keep", NarrowerRequest::kKeep},
                               std::pair{"narrow", NarrowerRequest::kNarrow},
                               std::pair{"error", NarrowerRequest::kError}};
constexpr std::array kMasters{std::pair{"auto", MasterRequest::kAuto},
                              std::pair{"none", MasterRequest::kNone}};
constexpr std::array kFrozen{std::pair{"no", FrozenRule::kNo}, std::pair{"yes", FrozenRule::kYes},
                             std::pair{"shard", FrozenRule::kShard},
                             std::pair{"replicate", FrozenRule::kReplicate}};

PrecisionRule make_rule(std::vector<std::string> match, const TorchDType& param_dtype,
                        const TorchDType& reduce_dtype, const TorchDType& storage_dtype,
                        const TorchDType& accumulate_dtype, const TorchDType& grad_dtype,
                        std::optional<bool> pin, std::optional<bool> widen,
                        const std::optional<std::string>& frozen) {
  PrecisionRule rule;
  rule.match = std::move(match);
  rule.param_dtype = dtype_of(param_dtype);
  rule.reduce_dtype = dtype_of(reduce_dtype);
  rule.storage_dtype = dtype_of(storage_dtype);
  rule.accumulate_dtype = dtype_of(accumulate_dtype);
  rule.grad_dtype = dtype_of(grad_dtype);
  rule.pin = pin;
  rule.widen = widen;
  if (frozen) rule.frozen = from_word("frozen", *frozen, kFrozen);
  return rule;
}

PrecisionPolicy make_policy(const TorchDType& param_dtype, const TorchDType& reduce_dtype,
                            bool cast_forward_inputs, const TorchDType& storage_dtype,
                            const TorchDType& accumulate_dtype, const TorchDType& final_dtype,
                            const std::string& param_rounding, const std::string& intrinsic,
                            const std::string& on_narrower_request, const std::string& master,
                            const std::optional<std::vector<std::string>>& no_decay,
                            bool loss_scaling, std::vector<PrecisionRule> rules) {
  PrecisionPolicy policy;
  policy.param_dtype = dtype_of(param_dtype);
  policy.reduce_dtype = dtype_of(reduce_dtype);
  policy.cast_forward_inputs = cast_forward_inputs;
  policy.storage_dtype = dtype_of(storage_dtype);
  policy.accumulate_dtype = dtype_of(accumulate_dtype);
  policy.final_dtype = dtype_of(final_dtype);
  policy.param_rounding = from_word("param_rounding", param_rounding, kRoundings);
  policy.intrinsic = from_word("intrinsic", intrinsic, kIntrinsics);
  policy.on_narrower_request = from_word("on_narrower_request", on_narrower_request, kNarrower);
  policy.optimizer.master = from_word("master", master, kMasters);
  policy.optimizer.no_decay = no_decay;
  policy.loss_scaling = loss_scaling;
  policy.rules = std::move(rules);
  return policy;
}

}  // namespace

void bind_policy(py::module_& module) {
  const auto none = py::none();
  py::class_<PrecisionRule>(module, "PrecisionRule")
      .def(py::init(&make_rule), py::arg("match"), py::kw_only(), py::arg("param_dtype") = none,
           py::arg("reduce_dtype") = none, py::arg("storage_dtype") = none,
           py::arg("accumulate_dtype") = none, py::arg("grad_dtype") = none, py::arg("pin") = none,
           py::arg("widen") = none, py::arg("frozen") = none);
  py::class_<PrecisionPolicy>(module, "PrecisionPolicy")
      .def(py::init(&make_policy), py::kw_only(), py::arg("param_dtype"), py::arg("reduce_dtype"),
           py::arg("cast_forward_inputs"), py::arg("storage_dtype"), py::arg("accumulate_dtype"),
           py::arg("final_dtype"), py::arg("param_rounding"), py::arg("intrinsic"),
           py::arg("on_narrower_request"), py::arg("master"), py::arg("no_decay"),
           py::arg("loss_scaling"), py::arg("rules"));
}

}  // namespace tessera::python
