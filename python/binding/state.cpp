// Whole tensors of sharded modules and of what optimizers keep of them, and checkpoints, between
// Python and the library.
#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding.h"
#include "comm/group.h"
#include "fsdp/runtime/model_names.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "fsdp/runtime/whole.h"
#include "grad/leaf.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/group.h"
#include "tessera/state_dict.h"
#include "tessera/world.h"

namespace tessera::python {
namespace {

using Tensors = std::map<std::string, at::Tensor>;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

/// (tensor that a module registers, the canonical name of its parameter). Each place of a tied one
/// has a tensor of its own.
using Places = std::vector<std::pair<at::Tensor, std::string>>;

Places parameter_places(const PythonUnit& unit) {
  const fsdp::ModelNames names(unit);
  Places places;
  for (const auto* one : fsdp::unit_of_handle(unit.unit()).runtime().units()) {
    for (const auto& parameter : one->parameters()) {
      const auto name = names.of(parameter->contract).front();
      for (const auto& leaf : parameter->leaves) places.emplace_back(leaf->tensor, name);
    }
  }
  return places;
}

/// (the module's tensor, its values in the storage dtype, its canonical name) of each buffer that a
/// state dict holds.
std::vector<std::tuple<at::Tensor, at::Tensor, std::string>> buffer_places(const PythonUnit& unit) {
  const at::NoGradGuard no_grad;
  std::vector<std::tuple<at::Tensor, at::Tensor, std::string>> places;
  for (const auto& [names, view] : fsdp::ModelNames(unit).stored_buffers(unit)) {
    places.emplace_back(view.tensor, view.stored, names.front());
  }
  return places;
}

/// This rank's shard of one parameter, and the names that it goes by.
struct Part {
  std::string name;      // the canonical one, under which dicts and checkpoints have it
  std::string own;       // in the unit's module
  std::string contract;  // the one of its contract
  std::vector<std::string> aliases;
  at::Tensor shard;
  std::vector<std::int64_t> shape;
  at::ScalarType storage = at::kFloat;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool trainable = true;
};

std::vector<Part> parts_of(const PythonUnit& unit) {
  const fsdp::ModelNames names(unit);
  const auto named = unit.named_parameters();
  std::vector<Part> parts;
  for (const auto& view : unit.shards()) {
    const auto& contract = *view.contract;
    parts.push_back({names.of(contract).front(), named.items()[parts.size()].key(), contract.name,
                     contract.aliases, view.shard, contract.shape,
                     to_scalar_type(contract.storage.dtype), view.begin, view.end,
                     contract.trainable});
  }
  return parts;
}

void load(PythonUnit& unit, const Named& values) {
  StateDict entries;
  for (const auto& [name, tensor] : values) entries.push_back(whole_entry(name, tensor.detach()));
  load_state_dict(unit, entries, Strict::kNo);
}

/// (parameter, updates, what is kept) of each parameter that the optimizer steps.
using OptimizerEntries = std::vector<std::tuple<std::string, std::int64_t, Tensors>>;

OptimizerEntries whole_optimizer_state(const PythonUnit& unit, const Optimizer& optimizer,
                                       bool rank_zero_alone) {
  auto dict = optimizer_state_dict(
      unit, optimizer, rank_zero_alone ? StateDictKind::kFullOnRankZero : StateDictKind::kFull);
  OptimizerEntries entries;
  for (auto& one : dict.parameters) {
    entries.emplace_back(std::move(one.parameter), one.steps, std::move(one.kept));
  }
  return entries;
}

void load_optimizer_state(const PythonUnit& unit, Optimizer& optimizer,
                          const OptimizerEntries& entries, bool strict) {
  OptimizerStateDict dict{optimizer.name(), {}};
  for (const auto& [parameter, steps, kept] : entries) {
    dict.parameters.push_back({parameter, steps, kept});
  }
  load_optimizer_state_dict(unit, optimizer, dict, strict ? Strict::kYes : Strict::kNo);
}

/// The slice of one bucket that has `values` in the places of the parameters' shards, in `dtype`,
/// zeros elsewhere. `of`: whose those are.
at::Tensor slice_of(const fsdp::Unit& unit, std::size_t index, at::ScalarType dtype,
                    const std::map<const fsdp::Parameter*, at::Tensor>& values,
                    std::vector<const fsdp::Parameter*>& of) {
  const auto& bucket = *unit.buckets()[index];
  const auto slice =
      at::zeros({bucket.plan().slice_numel()}, bucket.shard().options().dtype(dtype));
  for (const auto& parameter : unit.parameters()) {
    const auto found = values.find(parameter.get());
    if (parameter->bucket != index || found == values.end()) continue;
    if (found->second.scalar_type() != dtype) continue;
    of.push_back(parameter.get());
    if (found->second.numel() == 0) continue;
    const auto begin = bucket.plan().offset_in_slice(parameter->placed(), bucket.rank());
    slice.narrow(0, begin, found->second.numel()).copy_(found->second);
  }
  return slice;
}

/// Whole tensors from ones that lie as shards do, by the parameters' canonical names. Collective:
/// every rank gives the same names in the same dtypes. Copies; none where `keep` is false.
Tensors gather_like_shards(const PythonUnit& unit, const Tensors& values, bool keep) {
  const at::NoGradGuard no_grad;
  auto& runtime = fsdp::unit_of_handle(unit.unit()).runtime();
  const fsdp::ModelNames names(unit);
  std::map<const fsdp::Parameter*, at::Tensor> by_parameter;
  std::map<const fsdp::Parameter*, std::string> name_of;
  std::string lines;
  for (const auto* one : runtime.units()) {
    for (const auto& parameter : one->parameters()) {
      const auto name = names.of(parameter->contract).front();
      const auto found = values.find(name);
      if (found == values.end()) continue;
      TESSERA_CHECK(found->second.numel() == parameter->owned().size(), ErrorKind::kUsage, name,
                    ": found a tensor of ", found->second.numel(),
                    " elements, expected one for each of the ", parameter->owned().size(),
                    " elements of this rank's shard");
      by_parameter.emplace(parameter.get(), found->second);
      name_of.emplace(parameter.get(), name);
      lines += concat(name, ": ", c10::toString(found->second.scalar_type()), "\n");
    }
  }
  runtime.agree(lines, "tensors laid out as shards", "make the same updates on every rank");
  Tensors result;
  for (auto* one : runtime.units()) {
    for (std::size_t index = 0; index < one->buckets().size(); ++index) {
      std::set<at::ScalarType> dtypes;  // in the order that all ranks have
      for (const auto& parameter : one->parameters()) {
        const auto found = by_parameter.find(parameter.get());
        if (parameter->bucket != index || found == by_parameter.end()) continue;
        dtypes.insert(found->second.scalar_type());
      }
      for (const auto dtype : dtypes) {
        std::vector<const fsdp::Parameter*> of;
        const auto slice = slice_of(*one, index, dtype, by_parameter, of);
        const auto flat =
            fsdp::whole_of(runtime, *one, *one->buckets()[index], slice, "optimizer state");
        for (const auto* parameter : of) {
          const auto& placed = parameter->placed();
          const auto whole =
              fsdp::whole_of(runtime, *parameter, flat.narrow(0, placed.offset, placed.numel));
          if (keep) result.emplace(name_of.at(parameter), whole.clone());
        }
      }
    }
  }
  return result;
}

/// Raises what any rank objects to, on every rank. Collective.
void refuse_on_all(World& world, const std::string& what, const std::string& objection) {
  comm::on_all_or_none(world, what,
                       [&] { TESSERA_CHECK(objection.empty(), ErrorKind::kContract, objection); });
}

void save(const PythonUnit& unit, const Optimizer& optimizer, const std::string& folder,
          std::int64_t step, CheckpointValues user, const GradScaler* scaler,
          std::int64_t keep_latest_k, std::string config_json) {
  SaveOptions options;
  options.user = std::move(user);
  options.scaler = scaler;
  options.keep_latest_k = keep_latest_k;
  options.config_json = std::move(config_json);
  save_checkpoint(unit, optimizer, folder, step, options);
}

/// (path, step, ranks that wrote it, the program's own values)
using Loaded = std::tuple<std::string, std::int64_t, std::int64_t,
                          std::map<std::string, std::variant<std::int64_t, std::string>>>;

Loaded load_from(PythonUnit& unit, Optimizer& optimizer, const std::string& folder,
                 GradScaler* scaler) {
  const auto loaded = load_checkpoint(unit, optimizer, folder, scaler);
  return {loaded.path, loaded.step, loaded.world_size, {loaded.user.begin(), loaded.user.end()}};
}

World& world_of(const PythonUnit& unit) { return *unit.mesh().world(); }

}  // namespace

void bind_state(py::module_& module) {
  py::class_<Part>(module, "Part", DestroyedWithoutGil())
      .def_readonly("name", &Part::name)
      .def_readonly("own", &Part::own)
      .def_readonly("contract", &Part::contract)
      .def_readonly("aliases", &Part::aliases)
      .def_readonly("shard", &Part::shard)
      .def_property_readonly("shape",
                             [](const Part& part) { return py::tuple(py::cast(part.shape)); })
      .def_readonly("storage", &Part::storage)
      .def_readonly("begin", &Part::begin)
      .def_readonly("end", &Part::end)
      .def_readonly("trainable", &Part::trainable);
  module.def("parameter_places", &parameter_places, ReleaseGil(), py::arg("unit"));
  module.def("buffer_places", &buffer_places, ReleaseGil(), py::arg("unit"));
  module.def("parameter_parts", &parts_of, ReleaseGil(), py::arg("unit"));
  module.def("load_state_dict", &load, ReleaseGil(), py::arg("unit"), py::arg("values"));
  module.def("optimizer_state_dict", &whole_optimizer_state, ReleaseGil(), py::arg("unit"),
             py::arg("optimizer"), py::arg("rank_zero_alone"));
  module.def("load_optimizer_state_dict", &load_optimizer_state, ReleaseGil(), py::arg("unit"),
             py::arg("optimizer"), py::arg("entries"), py::arg("strict"));
  module.def("gather_like_shards", &gather_like_shards, ReleaseGil(), py::arg("unit"),
             py::arg("values"), py::arg("keep"));
  module.def(
      "refuse_on_all",
      [](const PythonUnit& unit, const std::string& what, const std::string& objection) {
        refuse_on_all(world_of(unit), what, objection);
      },
      ReleaseGil(), py::arg("unit"), py::arg("what"), py::arg("objection"));
  module.def(
      "first_rank_bytes",
      [](const PythonUnit& unit, const std::string& bytes) {
        std::string received;
        {
          const WithoutGil released;
          received = comm::from_first_rank(world_of(unit), "state dict", bytes);
        }
        return py::bytes(received);
      },
      py::arg("unit"), py::arg("mine"));
  module.def(
      "broadcast",
      [](const PythonUnit& unit, const at::Tensor& tensor) {
        const at::NoGradGuard no_grad;
        world_of(unit).group().broadcast(tensor, 0, "state dict");
      },
      ReleaseGil(), py::arg("unit"), py::arg("tensor"));
  module.def("rank_of", [](const PythonUnit& unit) { return unit.rank(); }, py::arg("unit"));
  module.def("save_checkpoint", &save, ReleaseGil(), py::arg("unit"), py::arg("optimizer"),
             py::arg("folder"), py::arg("step"), py::arg("user"), py::arg("scaler").none(true),
             py::arg("keep_latest_k"), py::arg("config_json"));
  module.def("load_checkpoint", &load_from, ReleaseGil(), py::arg("unit"), py::arg("optimizer"),
             py::arg("folder"), py::arg("scaler").none(true));
  module.def(
      "has_checkpoint",
      [](World& world, const std::string& folder) { return has_checkpoint(world, folder); },
      ReleaseGil(), py::arg("world"), py::arg("folder"));
}

}  // namespace tessera::python
