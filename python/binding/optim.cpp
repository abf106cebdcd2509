// Optimizers, gradient norms and the loss scaler between Python and the library.
#include "tessera/optim.h"

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "fsdp/runtime/model_names.h"
#include "tessera/clip.h"
#include "tessera/error.h"
#include "tessera/grad_scaler.h"
#include "tessera/muon.h"

namespace tessera::python {
namespace {

using Patterns = std::vector<std::string>;
using Rules = std::vector<OptimizerRule>;

OptimizerRule make_rule(Patterns match, std::optional<double> lr_scale,
                        std::optional<double> weight_decay) {
  OptimizerRule rule;
  rule.match = std::move(match);
  rule.lr_scale = lr_scale;
  rule.weight_decay = weight_decay;
  return rule;
}

std::shared_ptr<Optimizer> adamw(const PythonUnit& unit, double lr, std::array<double, 2> betas,
                                 double eps, double weight_decay, Patterns no_decay, Rules rules) {
  AdamWOptions options;
  options.lr = lr;
  options.beta1 = betas[0];
  options.beta2 = betas[1];
  options.eps = eps;
  options.weight_decay = weight_decay;
  options.no_decay = std::move(no_decay);
  options.rules = std::move(rules);
  return make_adamw(unit, options);
}

std::shared_ptr<Optimizer> sgd(const PythonUnit& unit, double lr, double momentum,
                               double weight_decay, Patterns no_decay, Rules rules) {
  SgdOptions options;
  options.lr = lr;
  options.momentum = momentum;
  options.weight_decay = weight_decay;
  options.no_decay = std::move(no_decay);
  options.rules = std::move(rules);
  return make_sgd(unit, options);
}

std::shared_ptr<Optimizer> muon(const PythonUnit& unit, double lr, double weight_decay,
                                double momentum, bool nesterov,
                                std::array<double, 3> ns_coefficients, double ns_eps, int ns_steps,
                                bool match_rms_adamw, bool bfloat16_iterations, Patterns adamw,
                                double adamw_lr_scale, std::array<double, 2> adamw_betas,
                                double adamw_eps, Patterns no_decay, Rules rules) {
  MuonOptions options;
  options.lr = lr;
  options.momentum = momentum;
  options.nesterov = nesterov;
  options.weight_decay = weight_decay;
  options.ns_coefficients = ns_coefficients;
  options.ns_steps = ns_steps;
  options.ns_eps = ns_eps;
  options.ns_dtype = bfloat16_iterations ? IterationDType::kBFloat16 : IterationDType::kFloat32;
  options.adjust_lr_fn = match_rms_adamw ? AdjustLr::kMatchRmsAdamw : AdjustLr::kOriginal;
  options.adamw = std::move(adamw);
  options.adamw_lr_scale = adamw_lr_scale;
  options.beta1 = adamw_betas[0];
  options.beta2 = adamw_betas[1];
  options.eps = adamw_eps;
  options.no_decay = std::move(no_decay);
  options.rules = std::move(rules);
  return make_muon(unit, options);
}

/// By the name of each trained parameter, the dtypes of the tensors that the optimizer keeps of it
/// once it is updated.
using KeptDTypes = std::map<std::string, std::map<std::string, DType>>;

KeptDTypes kept_dtypes(const Optimizer& optimizer, const PythonUnit& unit) {
  const fsdp::ModelNames names(unit);
  KeptDTypes kept;
  for (const auto& state : optimizer.state()) {
    const auto& contract = *state.view.contract;
    kept.emplace(names.of(contract).front(), optimizer.kept_dtypes(contract));
  }
  return kept;
}

py::dict kept_dtypes_of(const Optimizer& optimizer, const PythonUnit& unit) {
  KeptDTypes kept;
  {
    const WithoutGil released;
    kept = kept_dtypes(optimizer, unit);
  }
  py::dict result;
  for (const auto& [parameter, dtypes] : kept) {
    py::dict of_one;
    for (const auto& [name, dtype] : dtypes) {
      of_one[py::str(name)] = py::cast(to_scalar_type(dtype));
    }
    result[py::str(parameter)] = of_one;
  }
  return result;
}

std::shared_ptr<GradScaler> make_scaler(const PythonUnit& unit, double init_scale,
                                        double growth_factor, double backoff_factor,
                                        std::int64_t growth_interval, double min_scale) {
  GradScalerOptions options;
  options.init_scale = init_scale;
  options.growth_factor = growth_factor;
  options.backoff_factor = backoff_factor;
  options.growth_interval = growth_interval;
  options.min_scale = min_scale;
  return std::make_shared<GradScaler>(unit, options);
}

std::tuple<double, std::int64_t, std::int64_t> scale_state(const GradScaler& scaler) {
  const auto& state = scaler.state();
  return {state.scale, state.good_steps, state.skipped_steps};
}

void bind_optimizers(py::module_& module) {
  py::class_<OptimizerRule>(module, "OptimizerRule")
      .def(py::init(&make_rule), py::arg("match"), py::arg("lr_scale") = py::none(),
           py::arg("weight_decay") = py::none());
  py::class_<Optimizer, std::shared_ptr<Optimizer>>(module, "Optimizer", DestroyedWithoutGil())
      .def_property("lr", &Optimizer::lr, &Optimizer::set_lr)
      .def("step", &Optimizer::step, ReleaseGil())
      .def("kept_dtypes", &kept_dtypes_of, py::arg("unit"));
  module.def("make_adamw", &adamw, ReleaseGil(), py::arg("unit"), py::arg("lr"), py::arg("betas"),
             py::arg("eps"), py::arg("weight_decay"), py::arg("no_decay"), py::arg("rules"));
  module.def("make_sgd", &sgd, ReleaseGil(), py::arg("unit"), py::arg("lr"), py::arg("momentum"),
             py::arg("weight_decay"), py::arg("no_decay"), py::arg("rules"));
  module.def("make_muon", &muon, ReleaseGil(), py::arg("unit"), py::arg("lr"),
             py::arg("weight_decay"), py::arg("momentum"), py::arg("nesterov"),
             py::arg("ns_coefficients"), py::arg("ns_eps"), py::arg("ns_steps"),
             py::arg("match_rms_adamw"), py::arg("bfloat16_iterations"), py::arg("adamw"),
             py::arg("adamw_lr_scale"), py::arg("adamw_betas"), py::arg("adamw_eps"),
             py::arg("no_decay"), py::arg("rules"));
}

}  // namespace

void bind_optim(py::module_& module) {
  bind_optimizers(module);
  module.def(
      "gradient_norm", [](const PythonUnit& unit, double p) { return gradient_norm(unit, p); },
      ReleaseGil(), py::arg("unit"), py::arg("p"));
  module.def(
      "clip_grad_norm",
      [](const PythonUnit& unit, double max_norm, double p) {
        return clip_grad_norm(unit, max_norm, p);
      },
      ReleaseGil(), py::arg("unit"), py::arg("max_norm"), py::arg("p"));
  module.def(
      "nonfinite_parameters",
      [](const PythonUnit& unit, std::size_t most) { return nonfinite_parameters(unit, most); },
      ReleaseGil(), py::arg("unit"), py::arg("most"));
  py::class_<GradScaler, std::shared_ptr<GradScaler>>(module, "GradScaler", DestroyedWithoutGil())
      .def(py::init(&make_scaler), ReleaseGil(), py::arg("unit"), py::arg("init_scale"),
           py::arg("growth_factor"), py::arg("backoff_factor"), py::arg("growth_interval"),
           py::arg("min_scale"))
      .def_property_readonly("scale", &GradScaler::scale)
      .def_property_readonly("state", &scale_state)
      .def("scaled", &GradScaler::scaled, ReleaseGil(), py::arg("loss"))
      .def(
          "update",
          [](GradScaler& scaler, const PythonUnit& unit, double norm) {
            return scaler.update(unit, norm);
          },
          ReleaseGil(), py::arg("unit"), py::arg("norm"))
      .def(
          "restore",
          [](GradScaler& scaler, double scale, std::int64_t good_steps,
             std::int64_t skipped_steps) { scaler.restore({scale, good_steps, skipped_steps}); },
          ReleaseGil(), py::arg("scale"), py::arg("good_steps"), py::arg("skipped_steps"));
}

}  // namespace tessera::python
