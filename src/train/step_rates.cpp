#include "train/step_rates.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>
#include <vector>

#include "base/text/three_digits.h"
#include "tessera/error.h"
#include "train/dry/rank_memory.h"
#include "train/pipeline/pipeline_plan.h"

namespace tessera::train {
namespace {

/// Operations of one micro-batch in a unit, on one rank.
struct UnitFlops {
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

std::vector<UnitFlops> unit_flops(const RunOfPlan& run) {
  const auto& training = stepped_config(run.config, run.dims).training;
  const std::int64_t positions = training.seq_len.value();
  const double tokens = static_cast<double>(training.local_batch_size.value_or(1) * positions) /
                        static_cast<double>(run.dims.tp);
  std::map<std::string_view, std::size_t> numbers;
  for (std::size_t unit = 0; unit < run.plan.units.size(); ++unit) {
    numbers.emplace(run.plan.units[unit].plan.name, unit);
  }
  const auto unit_of = [&](const models::ParameterSpec& row) {
    const auto found = numbers.find(row.unit);
    return found == numbers.end() ? std::size_t{0} : found->second;
  };
  const auto trained = trained_names(run.contract);
  std::vector<UnitFlops> flops(run.plan.units.size());
  // Attention is all that a layer computes in addition to its products.
  auto attention = layer_costs(run.spec, run.description, positions).layers;
  std::vector<std::size_t> unit_of_layer(attention.size(), 0);
  for (const models::ParameterSpec& row : run.description.parameters) {
    const double products = 2.0 * static_cast<double>(models::active_numel(run.spec, row));
    UnitFlops& of = flops[unit_of(row)];
    of.products += products * tokens;
    if (trained.contains(row.name)) of.trained += products * tokens;
    if (!row.layer) continue;
    attention.at(static_cast<std::size_t>(*row.layer)) -= products;
    unit_of_layer.at(static_cast<std::size_t>(*row.layer)) = unit_of(row);
  }
  for (std::size_t layer = 0; layer < attention.size(); ++layer) {
    flops[unit_of_layer[layer]].attention += std::max(0.0, attention[layer]) * tokens;
  }
  const auto record = step_record(run);
  const auto& trace = record.stages.front().parts.front().units;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    flops[trace[i]].is_reached = record.stages.front().reached.front()[i];
  }
  return flops;
}

}  // namespace

std::optional<StepFlops> step_flops(const RunOfPlan& run, const fsdp::StepPlan& plan) {
  if (!run.config.training.seq_len) return std::nullopt;
  const auto units = unit_flops(run);
  const auto micro_batches = static_cast<double>(micro_batches_of(run));
  StepFlops sum;
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const double again = units[unit].again(plan.choices.recompute[unit]);
    sum.again += micro_batches * again;
    sum.all += micro_batches * (units[unit].forward() + units[unit].backward() + again);
  }
  return sum;
}

capture::PlanProfile profile_at(const Rates& rates, const RunOfPlan& run,
                                const StepTraffic& traffic) {
  const auto ms = [](double amount, double rate) { return 1e3 * amount / rate; };
  capture::PlanProfile profile;
  const auto units = unit_flops(run);
  const auto names = plan_units(run);
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const layout::PlannedUnit& planned = run.plan.units[unit];
    const auto gathered = static_cast<double>(layout::gather_sent_bytes(planned));
    const auto reduced = static_cast<double>(layout::reduce_sent_bytes(planned));
    profile.units.push_back({.name = names[unit].name,
                             .forward_ms = ms(units[unit].forward(), rates.flops),
                             .backward_ms = ms(units[unit].backward(), rates.flops),
                             .gather_ms = ms(gathered, rates.bandwidth),
                             .reduce_ms = ms(reduced, rates.bandwidth)});
  }
  const std::int64_t others = traffic.total() - traffic.gathers - traffic.reductions;
  profile.rest_ms = ms(static_cast<double>(others), rates.bandwidth);
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
