// `inspect --contract`: what a run of a configuration would agree on before its first collective,
// for any number of ranks. No weight is read, nothing is allocated, nobody is asked.
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/verbs.h"
#include "tessera/error.h"
#include "train/config_resolve.h"
#include "train/model_plan.h"
#include "train/parallelize.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Planned {
  MeshShapes mesh;
  ModelContract contract;
  layout::ModelPlan plan;
  layout::Reshard reshard = layout::Reshard::kYes;

  /// Of a step of one micro-batch.
  layout::Traffic traffic() const { return layout::step_traffic(plan, reshard, 1); }
  std::int64_t kept_bytes() const {
    std::int64_t bytes = 0;
    for (const auto& unit : plan.units) {
      for (const auto& bucket : unit.plan.buckets) bytes += layout::shard_bytes(bucket);
    }
    return bytes;
  }
};

Planned plan_run(const InspectArguments& arguments) {
  train::Config config = train::load_config(arguments.contract_file);
  apply(arguments.overrides, config);
  train::validate(config, train::Verb::kContract);
  const int world = arguments.world ? *arguments.world : train::ranks_to_spawn(config.parallelism);
  const ParallelDims dims = train::resolve_parallelism(config.parallelism, world);
  const train::ModelSource source = train::open_model(config.model, config.lora);
  Planned planned;
  planned.mesh = train::mesh_shape(dims);
  planned.contract = train::resolve_model(source, config, dims);
  planned.plan = train::plan_model(source.description, planned.contract.parameters, planned.mesh);
  if (!config.parallelism.reshard_after_forward) planned.reshard = layout::Reshard::kNo;
  return planned;
}

void print_text(const Planned& planned) {
  const layout::Traffic traffic = planned.traffic();
  const ModelContract& contract = planned.contract;
  std::cout << to_string(contract) << contract.parameters.size() << " parameters, "
            << contract.buffers.size() << " buffers on " << to_string(planned.mesh)
            << ", contract hash " << hash(contract) << "\n\n"
            << planned.plan.units.size() << " units over " << planned.plan.options.ranks
            << " rank(s), parameters begin at multiples of " << planned.plan.options.alignment_bytes
            << " B, plan hash " << layout::hash(planned.plan) << "\n"
            << layout::to_string(planned.plan) << "a rank keeps " << planned.kept_bytes()
            << " B of parameters and sends, in a step of one micro-batch, " << traffic.gathers
            << " B in gathers and " << traffic.reductions << " B in reductions\n";
}

Json json_of(const ReductionPlan& reductions) {
  return {{"shard_axes", reductions.shard_axes},
          {"replica_axes", reductions.replica_axes},
          {"divide_factor", reductions.divide_factor}};
}

Json json_of(const GradContract& contract) {
  const auto field = [&](ContractField which, const Json& value) {
    return Json{{"value", value}, {"reason", contract.reason(which)}};
  };
  const auto dtype = [&](ContractField which, DType value) {
    return contract.trainable ? field(which, to_string(value)) : Json();
  };
  Json grad;
  if (contract.trainable) {
    grad = field(ContractField::kGrad, contract.grad ? Json(to_string(*contract.grad)) : Json());
  }
  Json found = {
      {"name", contract.name},
      {"aliases", contract.aliases},
      {"shape", contract.shape},
      {"trainable", field(ContractField::kTrainable, contract.trainable)},
      {"frozen_as", contract.trainable ? Json() : Json(to_string(contract.frozen_as))},
      {"storage", field(ContractField::kStorage, to_string(contract.storage.dtype))},
      {"compute", field(ContractField::kCompute, to_string(contract.compute.dtype))},
      {"grad", grad},
      {"accumulate", dtype(ContractField::kAccumulate, contract.accumulate)},
      {"reduce", dtype(ContractField::kReduce, contract.reduce)},
      {"final", dtype(ContractField::kFinal, contract.final)},
      {"master",
       contract.trainable ? field(ContractField::kMaster, to_string(contract.master)) : Json()},
      {"state", dtype(ContractField::kState, contract.state)},
      {"decay", contract.decays ? field(ContractField::kDecay, *contract.decays) : Json()},
      {"reductions", json_of(contract.reductions)}};
  if (contract.layout != ParameterLayout()) found["placement"] = to_string(contract.layout);
  return found;
}

Json json_of(const BufferContract& contract) {
  const auto field = [&](BufferField which, DType value) {
    return Json{{"value", to_string(value)}, {"reason", contract.reason(which)}};
  };
  return {{"name", contract.name},
          {"shape", contract.shape},
          {"storage", field(BufferField::kStorage, contract.storage)},
          {"compute", field(BufferField::kCompute, contract.compute)},
          {"stored", contract.stored}};
}

/// `value` is null where tensors stay as they come.
Json casts_of(const UnitContract& contract) {
  const auto field = [&](UnitField which, const std::optional<DType>& value) {
    return Json{{"value", value ? Json(to_string(*value)) : Json()},
                {"reason", contract.reason(which)}};
  };
  return {{"name", contract.name},
          {"nested", contract.nested},
          {"input", field(UnitField::kInput, contract.input)},
          {"activation", field(UnitField::kActivation, contract.activation)},
          {"output", field(UnitField::kOutput, contract.output)}};
}

Json json_of(const layout::BucketPlan& bucket, const std::vector<layout::PlanItem>& items) {
  Json parameters = Json::array();
  for (const layout::Placed& placed : bucket.parameters) {
    parameters.push_back({{"name", items[placed.parameter].name},
                          {"offset", placed.offset},
                          {"numel", placed.numel}});
  }
  const auto& key = bucket.key;
  const auto of_gradient = [&](DType dtype) {
    return key.trainable ? Json(to_string(dtype)) : Json();
  };
  const std::int64_t gathered = layout::gathered_bytes(bucket);
  const std::int64_t reduced = layout::reduced_bytes(bucket);
  return {{"storage", to_string(key.storage)},
          {"compute", to_string(key.compute)},
          {"accumulate", of_gradient(key.accumulate)},
          {"reduce", of_gradient(key.reduce)},
          {"final", of_gradient(key.final)},
          {"trainable", key.trainable},
          {"reductions", json_of(key.reductions)},
          {"ranks", bucket.ranks},
          {"numel", bucket.numel},
          {"slice_numel", bucket.slice_numel()},
          {"padding_numel", layout::padding_numel(bucket)},
          {"shard_bytes", layout::shard_bytes(bucket)},
          {"gathered_bytes", gathered},
          {"gather_sent_bytes", layout::sent_bytes(gathered, bucket.ranks)},
          {"reduced_bytes", reduced},
          {"reduce_sent_bytes", layout::sent_bytes(reduced, bucket.ranks)},
          {"parameters", parameters}};
}

void print_contract_json(const Planned& planned) {
  Json parameters = Json::array();
  for (const auto& contract : planned.contract.parameters) parameters.push_back(json_of(contract));
  Json buffers = Json::array();
  for (const auto& contract : planned.contract.buffers) buffers.push_back(json_of(contract));
  Json units = Json::array();
  for (std::size_t i = 0; i < planned.plan.units.size(); ++i) {
    const layout::PlannedUnit& unit = planned.plan.units[i];
    units.push_back(casts_of(planned.contract.units.at(i)));
    Json buckets = Json::array();
    for (const auto& bucket : unit.plan.buckets) buckets.push_back(json_of(bucket, unit.items));
    units.back()["buckets"] = buckets;
  }
  const layout::Traffic traffic = planned.traffic();
  // The hashes as text, as in the metadata of `gradients`: they have 64 bits.
  const Json whole = {{"layout", to_string(planned.mesh)},
                      {"world_size", planned.mesh.size()},
                      {"contract_hash", concat(hash(planned.contract))},
                      {"plan_hash", concat(layout::hash(planned.plan))},
                      {"alignment_bytes", planned.plan.options.alignment_bytes},
                      {"parameters", parameters},
                      {"buffers", buffers},
                      {"units", units},
                      {"shard_bytes", planned.kept_bytes()},
                      {"step_gather_sent_bytes", traffic.gathers},
                      {"step_reduce_sent_bytes", traffic.reductions}};
  std::cout << whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
}

}  // namespace

void inspect_contract(const InspectArguments& arguments) {
  const Planned planned = plan_run(arguments);
  arguments.json ? print_contract_json(planned) : print_text(planned);
}

}  // namespace tessera::cli
