#include "train/dry/step_traffic.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <variant>

#include "base/text/printable.h"
#include "base/trace.h"
#include "fsdp/optim/matrix_exchange.h"
#include "fsdp/optim/optimizer_registry.h"
#include "tessera/error.h"
#include "train/dry/rank_memory.h"
#include "train/hf/model_forms.h"

namespace tessera::train {
namespace {

using OfTokens = StepTraffic::OfTokens;

int place_of(int rank, const std::vector<int>& members) {
  return static_cast<int>(std::ranges::find(members, rank) - members.begin());
}

/// The place of a parameter in the buckets of a plan.
struct Home {
  const layout::BucketPlan* bucket = nullptr;
  const layout::Placed* placed = nullptr;
};
std::map<std::string_view, Home> homes_in(const layout::ModelPlan& plan) {
  std::map<std::string_view, Home> homes;
  for (const layout::PlannedUnit& unit : plan.units) {
    for (const layout::BucketPlan& bucket : unit.plan.buckets) {
      for (const layout::Placed& placed : bucket.parameters) {
        homes.emplace(unit.items[placed.parameter].name, Home{&bucket, &placed});
      }
    }
  }
  return homes;
}

/// The place of each rank among those with which it shares buckets of these axes.
std::vector<int> places_on(const std::vector<std::string>& axes, const MeshShapes& mesh,
                           const std::vector<int>& ranks) {
  const std::vector<std::string_view> names(axes.begin(), axes.end());
  std::vector<int> places;
  for (const int rank : ranks) places.push_back(place_of(rank, mesh.ranks_of(rank, names)));
  return places;
}

/// A message has its bytes at both ends.
std::int64_t sent_bytes(const TraceSpan& span) {
  const bool is_message = span.row == TraceRow::kMessages;
  if (is_message && span.name.find("SEND") == std::string::npos) return 0;
  for (const auto& [name, value] : span.arguments) {
    if (name == (is_message ? "bytes" : "sent_bytes")) return std::get<std::int64_t>(value);
  }
  return 0;
}

}  // namespace

std::int64_t StepTraffic::total() const {
  const OfTokens tokens = of_tokens.value_or(OfTokens());
  return gathers + reductions + replicas + matrices.sent + tokens.activations + tokens.experts +
         tokens.messages + tokens.context;
}

StepTraffic::OfMatrices sent_of_matrices(const Config& config,
                                         const std::vector<models::ParameterSpec>& table,
                                         const std::vector<GradContract>& contracts,
                                         const layout::ModelPlan& plan, int rank) {
  if (fsdp::is_elementwise(config.optimizer.name)) return {};
  const MeshShapes& mesh = plan.options.mesh;
  const std::vector<int> ranks = mesh.stage_of(rank);
  const auto forms = hidden_matrices(table, fused_as_one(table, config.optimizer.rule));
  const auto homes = homes_in(plan);
  std::map<std::vector<std::string>, std::vector<int>> places;  // by axes
  std::vector<fsdp::MatrixParameter> parameters;
  std::vector<std::vector<fsdp::HeldElements>> held(ranks.size());
  for (const GradContract& contract : contracts) {
    const auto form = forms.find(contract.name);
    if (!contract.trainable || form == forms.end()) continue;
    const auto home = homes.find(contract.name);
    TESSERA_INVARIANT(home != homes.end(), "no bucket of the plan has ", contract.name);
    parameters.push_back(fsdp::matrix_parameter(contract, form->second));
    const auto& [bucket, placed] = home->second;
    const auto& axes = bucket->key.reductions.shard_axes;
    if (!places.contains(axes)) places[axes] = places_on(axes, mesh, ranks);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      held[i].push_back(
          {mesh.coordinates(ranks[i], contract.layout), bucket->owned(*placed, places[axes][i])});
    }
  }
  const auto bytes = fsdp::sent_bytes(fsdp::plan_exchange(parameters, held));
  return {.sent = bytes.at(static_cast<std::size_t>(place_of(rank, ranks))),
          .most = std::ranges::max(bytes)};
}

StepTraffic step_traffic(const Config& config, const DryStep& step) {
  const auto& training = config.training;
  StepTraffic traffic;
  OfTokens tokens;
  traffic.micro_batches = step.micro_batches;
  traffic.has_loads = step.has_loads;
  for (const TraceSpan& span : step.spans) {
    const auto has = [&](std::string_view name, std::string_view value) {
      return std::ranges::any_of(span.arguments, [&](const auto& argument) {
        const auto* text = std::get_if<std::string>(&argument.second);
        return argument.first == name && text != nullptr && *text == value;
      });
    };
    const std::int64_t bytes = sent_bytes(span);
    const auto count = [bytes](std::int64_t& sum, std::int64_t& messages) {
      sum += bytes;
      if (bytes > 0) ++messages;
    };
    switch (span.row) {
      case TraceRow::kGathers:
        traffic.gathers += bytes;
        break;
      case TraceRow::kReductions:
        traffic.reductions += bytes;
        break;
      case TraceRow::kReplicas:
        if (has("unit", "optimizer")) {
          count(traffic.matrices.sent, traffic.messages.matrices);
        } else {
          count(traffic.replicas, traffic.messages.replicas);
        }
        break;
      case TraceRow::kActivations:
        if (has("axis", axis::kExpert)) {
          count(tokens.experts, traffic.messages.experts);
        } else if (has("axis", axis::kContext)) {
          count(tokens.context, traffic.messages.context);
        } else {
          count(tokens.activations, traffic.messages.activations);
        }
        break;
      case TraceRow::kMessages:
        count(tokens.messages, traffic.messages.stages);
        break;
      default:
        break;
    }
  }
  traffic.matrices.most = traffic.matrices.sent;
  if (training.seq_len) traffic.of_tokens = tokens;
  return traffic;
}

StepTraffic most_traffic(const Config& config, const ModelSource& source, const MeshShapes& mesh,
                         const SteppedRank& stepped) {
  StepTraffic traffic = step_traffic(config, stepped.step);
  if (mesh.size_of(axis::kContext) == 1 || !traffic.of_tokens) return traffic;
  const int last = mesh.ranks_of(stepped.rank, {axis::kContext}).back();
  const StepTraffic of_last = step_traffic(
      config, dry_step(stepped.config, source, last, mesh.size(), {.loads = stepped.loads}));
  if (of_last.of_tokens->context > traffic.of_tokens->context) {
    traffic.of_tokens->context = of_last.of_tokens->context;
  }
  return traffic;
}

std::string to_string(const StepTraffic& traffic) {
  const auto& [matrices, most_matrices] = traffic.matrices;
  const bool sends_most = matrices == most_matrices;
  std::string text = concat("what a rank sends in a step of ", traffic.micro_batches,
                            traffic.micro_batches == 1 ? " micro-batch" : " micro-batches",
                            " (of the one that sends most", sends_most ? "" : " but for matrices",
                            "; without control messages)\n");
  text += table_line("gathers", traffic.gathers, "parameters, over the ranks that share them");
  text += table_line("reductions", traffic.reductions, "gradients, over the same");
  text += table_line("sums over replicas", traffic.replicas, "gradients, over dp_replicate");
  std::string why = most_matrices == 0 ? "" : "Muon's, to the ranks that step them and back";
  if (!sends_most) why += concat("; another rank sends ", size_text(most_matrices), " of them");
  text += table_line("matrices", matrices, why);
  if (traffic.of_tokens) {
    const auto& [activations, experts, messages, context] = *traffic.of_tokens;
    text += table_line("activations over tp", activations, "");
    if (context > 0) text += table_line("attention over cp", context, "");
    text += table_line("tokens over ep", experts,
                       experts == 0        ? ""
                       : traffic.has_loads ? "by the given loads of experts"
                                           : "as if every expert were chosen equally often");
    text += table_line("messages over pp", messages, "");
  }
  text += table_line("total", traffic.total(), "");
  if (traffic.of_tokens) return text;
  return text +
         "  activations, tokens, messages: set training.seq_len to know what they send; the total "
         "is without them\n";
}

}  // namespace tessera::train
