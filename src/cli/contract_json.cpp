#include "cli/contract_json.h"

#include <nlohmann/json.hpp>
#include <string>

#include "grad/enum_words.h"

namespace tessera::cli {
namespace {

Json reductions_json(const ReductionPlan& reductions) {
  return {{"shard_axes", reductions.shard_axes},
          {"replica_axes", reductions.replica_axes},
          {"divide_factor", reductions.divide_factor}};
}

Json bucket_json(const layout::BucketPlan& bucket, const std::vector<layout::PlanItem>& items) {
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
          {"reductions", reductions_json(key.reductions)},
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

Json held_json(const train::RankMemory& held, KernelsOf kernels) {
  return {{"kernels", kernels == KernelsOf::kCpu ? "cpu" : "cuda"},
          {"parameters", held.parameters},
          {"gradients", held.gradients},
          {"moments", held.moments},
          {"master", held.master},
          {"unsharded_peak", held.unsharded},
          {"reductions", held.reductions}};
}

}  // namespace

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
      {"reductions", reductions_json(contract.reductions)}};
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

Json buckets_of(const layout::PlannedUnit& unit) {
  Json buckets = Json::array();
  for (const auto& bucket : unit.plan.buckets) buckets.push_back(bucket_json(bucket, unit.items));
  return buckets;
}

Json json_of(const train::MemoryTable& table) {
  Json found = held_json(table.held, table.computes_on);
  found["activations"] = nullptr;
  if (table.activations.empty()) return found;
  found["activations"] = {{"rows", table.rows}, {"seq_len", table.positions}};
  for (const auto& [word, mode] : words_of(RecomputeMode{})) {
    const auto& bytes = table.activations.at(mode);
    found["activations"][std::string(word)] = {
        {"kept", bytes.kept}, {"peak", bytes.peak}, {"total", table.total(mode)}};
  }
  return found;
}

Json json_of(const train::PipelineRankMemory& memory, const train::PipelineMemory& whole) {
  Json found = held_json(memory.held, whole.computes_on);
  found["live_micro_batches"] = memory.live_chunks;
  found["activations"] = nullptr;
  if (!whole.knows_activations) return found;
  found["activations"] = Json::object();
  for (const auto& [word, mode] : words_of(RecomputeMode{})) {
    found["activations"][std::string(word)] = memory.activations.at(mode);
  }
  return found;
}

Json json_of(const capture::SimulatedStep& step) {
  return {{"step", step.step_ms},
          {"compute", step.compute_ms},
          {"recompute", step.again_ms},
          {"gather_waits", step.waited_ms},
          {"reduce_waits", step.reduced_ms},
          {"rest", step.rest_ms}};
}

Json json_of(const std::optional<train::ContextOfRun>& context) {
  if (!context) return nullptr;
  const auto sent = [](const train::ContextBytes& bytes) {
    return Json{{"forward_sent_bytes", bytes.forward}, {"backward_sent_bytes", bytes.backward}};
  };
  Json found = {{"degree", context->dims.cp},
                {"form", word_of(context->dims.context_form)},
                {"parts", context->dims.context_parts},
                {"layers", context->layers},
                {"placements", context->placements},
                {"forward_bits", context->forward_bits},
                {"backward_bits", context->backward_bits},
                {"bytes", nullptr},
                {"other_form_bytes", nullptr},
                {"slowest_over_mean", nullptr}};
  if (context->positions == 0) return found;
  found["bytes"] = sent(context->bytes);
  found["bytes"]["gathered_bytes"] = context->bytes.gathered;
  found["bytes"]["partial_bytes"] = context->bytes.partials;
  if (context->other) found["other_form_bytes"] = sent(*context->other);
  found["slowest_over_mean"] = context->slowest_over_mean;
  return found;
}

void add_traffic(const train::StepTraffic& traffic, Json& whole) {
  const auto of_tokens = [&](std::int64_t train::StepTraffic::OfTokens::* bytes) {
    return traffic.of_tokens ? Json((*traffic.of_tokens).*bytes) : Json();
  };
  using OfTokens = train::StepTraffic::OfTokens;
  whole["step_micro_batches"] = traffic.micro_batches;
  whole["step_gather_sent_bytes"] = traffic.gathers;
  whole["step_reduce_sent_bytes"] = traffic.reductions;
  whole["step_replica_sent_bytes"] = traffic.replicas;
  whole["step_matrix_sent_bytes"] = traffic.matrices.sent;
  whole["step_most_matrix_sent_bytes"] = traffic.matrices.most;
  whole["step_activation_sent_bytes"] = of_tokens(&OfTokens::activations);
  whole["step_context_sent_bytes"] = of_tokens(&OfTokens::context);
  whole["step_token_sent_bytes"] = of_tokens(&OfTokens::experts);
  whole["step_message_sent_bytes"] = of_tokens(&OfTokens::messages);
  whole["step_sent_bytes"] = traffic.total();
}

}  // namespace tessera::cli
