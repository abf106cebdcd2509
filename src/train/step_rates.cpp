#include "train/step_rates.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text/three_digits.h"
#include "tessera/error.h"
#include "train/dry/rank_memory.h"
#include "train/pipeline/pipeline_plan.h"

namespace tessera::train {
namespace {

/// The costs of a micro-batch in a unit, on one rank: operations, or their time.
struct UnitCosts {
  double products = 0.0;  ///< of a forward
  double attention = 0.0;
  double trained = 0.0;     ///< of the products: those of trained weights
  bool is_reached = false;  ///< a backward comes to it
  double forward() const { return products + attention; }
  double backward() const { return (is_reached ? products + 2.0 * attention : 0.0) + trained; }
  double again(RecomputeMode mode) const {
    if (mode == RecomputeMode::kNone || !is_reached) return 0.0;
    return mode == RecomputeMode::kFull ? forward() : attention;  // kept products are not run again
  }
};

std::set<std::string_view> trained_names(const ModelContract& contract) {
  std::set<std::string_view> names;
  for (const GradContract& parameter : contract.parameters) {
    if (!parameter.trainable) continue;
    names.insert(parameter.name);
    names.insert(parameter.aliases.begin(), parameter.aliases.end());
  }
  return names;
}

std::map<std::string_view, DType> compute_dtypes(const ModelContract& contract) {
  std::map<std::string_view, DType> dtypes;
  for (const GradContract& parameter : contract.parameters) {
    dtypes.emplace(parameter.name, parameter.compute.dtype);
    for (const auto& alias : parameter.aliases) dtypes.emplace(alias, parameter.compute.dtype);
  }
  return dtypes;
}

/// The costs of each unit, with the cost of an operation in a dtype.
std::vector<UnitCosts> unit_costs(const RunOfPlan& run,
                                  const std::function<double(DType)>& of_operation) {
  const auto& training = stepped_config(run.config, run.dims).training;
  const std::int64_t positions = training.seq_len.value();
  const double tokens = static_cast<double>(training.local_batch_size.value_or(1) * positions) /
                        static_cast<double>(run.dims.cp * run.dims.tp);
  std::map<std::string_view, std::size_t> numbers;
  for (std::size_t unit = 0; unit < run.plan.units.size(); ++unit) {
    numbers.emplace(run.plan.units[unit].plan.name, unit);
  }
  const auto unit_of = [&](const models::ParameterSpec& row) {
    const auto found = numbers.find(row.unit);
    return found == numbers.end() ? std::size_t{0} : found->second;
  };
  const auto trained = trained_names(run.contract);
  const auto dtypes = compute_dtypes(run.contract);
  const auto cost = [&](const models::ParameterSpec& row) {
    const auto dtype = dtypes.find(row.name);
    return of_operation(dtype == dtypes.end() ? DType::kFloat32 : dtype->second);
  };
  std::vector<UnitCosts> costs(run.plan.units.size());
  // Attention is all that a layer computes in addition to its products.
  auto attention = layer_costs(run.spec, run.description, positions).layers;
  std::vector<std::size_t> unit_of_layer(attention.size(), 0);
  // Attention computes as most of its layer's matrices do: no policy of ours has it wider.
  std::vector<double> cost_of_layer(attention.size(), of_operation(DType::kFloat32));
  for (const models::ParameterSpec& row : run.description.parameters) {
    const double products = 2.0 * static_cast<double>(models::active_numel(run.spec, row));
    UnitCosts& of = costs[unit_of(row)];
    of.products += products * tokens * cost(row);
    if (trained.contains(row.name)) of.trained += products * tokens * cost(row);
    if (!row.layer) continue;
    const auto layer = static_cast<std::size_t>(*row.layer);
    attention.at(layer) -= products;
    unit_of_layer.at(layer) = unit_of(row);
    if (products > 0.0) cost_of_layer[layer] = std::min(cost_of_layer[layer], cost(row));
  }
  for (std::size_t layer = 0; layer < attention.size(); ++layer) {
    const double operations = std::max(0.0, attention[layer]) * tokens;
    if (operations == 0.0) continue;
    costs[unit_of_layer[layer]].attention += operations * cost_of_layer[layer];
  }
  const auto record = step_record(run);
  const auto& trace = record.stages.front().parts.front().units;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    costs[trace[i]].is_reached = record.stages.front().reached.front()[i];
  }
  return costs;
}

/// Times messages of a rank.
class Sending {
 public:
  Sending(const check::Machine& machine, const MeshShapes& mesh) : machine_(machine), mesh_(mesh) {}

  /// Milliseconds of `messages` with `bytes` in all, among the ranks that differ on `axes`.
  double ms(std::int64_t bytes, std::int64_t messages,
            const std::vector<std::string_view>& axes) const {
    return bytes == 0 ? 0.0 : ms_among(bytes, messages, mesh_.ranks_of(0, axes));
  }
  double ms_among(std::int64_t bytes, std::int64_t messages, const std::vector<int>& ranks) const {
    if (bytes == 0) return 0.0;
    const int per_host = machine_.ranks_per_host.value_or(mesh_.size());
    const bool on_one = std::ranges::all_of(
        ranks, [&](int rank) { return rank / per_host == ranks.front() / per_host; });
    const double rate = on_one ? machine_.bandwidth.value() : machine_.host_bandwidth.value();
    return 1e3 * (static_cast<double>(bytes) / rate +
                  static_cast<double>(messages) * machine_.latency.value_or(0.0));
  }

 private:
  const check::Machine& machine_;
  const MeshShapes& mesh_;
};

}  // namespace

std::optional<StepFlops> step_flops(const RunOfPlan& run, const fsdp::StepPlan& plan) {
  if (!run.config.training.seq_len) return std::nullopt;
  const auto units = unit_costs(run, [](DType) { return 1.0; });
  const auto micro_batches = static_cast<double>(micro_batches_of(run));
  StepFlops sum;
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const double again = units[unit].again(plan.choices.recompute[unit]);
    sum.again += micro_batches * again;
    sum.all += micro_batches * (units[unit].forward() + units[unit].backward() + again);
  }
  return sum;
}

double ms_to_send(const check::Machine& machine, const MeshShapes& mesh, std::int64_t bytes,
                  std::int64_t messages, const std::vector<std::string_view>& axes) {
  return Sending(machine, mesh).ms(bytes, messages, axes);
}

DType most_computed(const ModelContract& contract) {
  std::map<DType, std::int64_t> elements;
  for (const GradContract& one : contract.parameters) elements[one.compute.dtype] += one.numel();
  const auto most =
      std::ranges::max_element(elements, {}, [](const auto& one) { return one.second; });
  return most == elements.end() ? DType::kFloat32 : most->first;
}

capture::PlanProfile profile_at(const check::Machine& machine, const RunOfPlan& run,
                                const StepTraffic& traffic) {
  const MeshShapes& mesh = run.plan.options.mesh;
  const Sending sending(machine, mesh);
  capture::PlanProfile profile;
  const check::ProductFlops& flops = machine.flops.value();
  const auto units = unit_costs(run, [&](DType dtype) { return 1e3 / flops.of(dtype); });
  const auto names = plan_units(run);
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    capture::UnitCost cost{.name = names[unit].name,
                           .forward_ms = units[unit].forward(),
                           .backward_ms = units[unit].backward(),
                           .gather_ms = 0.0,
                           .reduce_ms = 0.0};
    for (const layout::BucketPlan& bucket : run.plan.units[unit].plan.buckets) {
      const auto& axes = bucket.key.reductions.shard_axes;
      const std::vector<std::string_view> names_of_axes(axes.begin(), axes.end());
      const auto sent = [&](std::int64_t bytes) {
        return sending.ms(layout::sent_bytes(bytes, bucket.ranks), 1, names_of_axes);
      };
      *cost.gather_ms += sent(gathered_bytes(bucket));
      *cost.reduce_ms += sent(reduced_bytes(bucket));
    }
    profile.units.push_back(std::move(cost));
  }
  const auto& messages = traffic.messages;
  const auto tokens = traffic.of_tokens.value_or(StepTraffic::OfTokens());
  profile.rest_ms = sending.ms(traffic.replicas, messages.replicas, {axis::kReplicate}) +
                    sending.ms_among(traffic.matrices.sent, messages.matrices, mesh.stage_of(0)) +
                    sending.ms(tokens.activations, messages.activations, {axis::kTensor}) +
                    sending.ms(tokens.context, messages.context, {axis::kContext}) +
                    sending.ms(tokens.experts, messages.experts, {axis::kExpert}) +
                    sending.ms(tokens.messages, messages.stages, {axis::kPipeline});
  return profile;
}

std::string flops_text(double flops) {
  static constexpr std::array<std::string_view, 6> kUnits{"MFLOP", "GFLOP", "TFLOP",
                                                          "PFLOP", "EFLOP", "ZFLOP"};
  double value = flops / 1e6;
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1e3;
    ++unit;
  }
  return concat(three_digits(value), " ", kUnits[unit]);
}

}  // namespace tessera::train
