#include "train/step_traffic.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "base/text/printable.h"
#include "capture/simulate_plan.h"
#include "fsdp/optim/matrix_exchange.h"
#include "fsdp/optim/optimizer_registry.h"
#include "layout/sum_bytes.h"
#include "tessera/error.h"
#include "train/hf/model_forms.h"
#include "train/rank_memory.h"

namespace tessera::train {
namespace {

using OfTokens = StepTraffic::OfTokens;

int place_of(int rank, const std::vector<int>& members) {
  return static_cast<int>(std::ranges::find(members, rank) - members.begin());
}

/// Rows that a rank sends in a forward: `out` of its own tokens to the experts of other ranks,
/// `back` from its experts to the ranks whose tokens they are.
struct SentRows {
  std::int64_t out = 0;
  std::int64_t back = 0;
};

/// Counts the rows of all micro-batches. `loads`: by rank of ep, by expert.
SentRows rows_by_loads(const std::vector<std::vector<std::int64_t>>& loads, int own) {
  const auto ranks = static_cast<std::int64_t>(loads.size());
  SentRows rows;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto& of = loads[static_cast<std::size_t>(rank)];
    const std::int64_t local = std::ssize(of) / ranks;
    for (std::int64_t expert = 0; expert < std::ssize(of); ++expert) {
      const std::int64_t chosen = of[static_cast<std::size_t>(expert)];
      const bool is_here = expert / local == own;
      if (rank == own && !is_here) rows.out += chosen;
      if (rank != own && is_here) rows.back += chosen;
    }
  }
  return rows;
}

SentRows even_rows(std::int64_t choices, std::int64_t ranks) {
  const std::int64_t to_others = choices * (ranks - 1) / ranks;
  return {to_others, to_others};
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

}  // namespace

std::int64_t StepTraffic::total() const {
  const OfTokens tokens = of_tokens.value_or(OfTokens());
  return gathers + reductions + replicas + matrices.sent + tokens.activations + tokens.experts +
         tokens.messages;
}

std::int64_t replica_sent_bytes(const layout::BucketPlan& bucket, const MeshShapes& mesh,
                                int rank) {
  const layout::BucketKey& key = bucket.key;
  if (!key.trainable) return 0;
  const auto& copies = key.reductions.copies;
  std::vector<int> members = mesh.ranks_of(rank, {axis::kReplicate});
  DType addends = key.reduce;
  if (!copies.empty()) {
    members = mesh.ranks_of(rank, {axis::kPipeline, axis::kReplicate});
    std::erase_if(members, [&](int member) {
      return std::ranges::find(copies, mesh.coordinate(member, axis::kPipeline)) == copies.end();
    });
    addends = key.accumulate;
  }
  return layout::sum_sent_bytes({.numel = bucket.slice_numel(),
                                 .addend_bytes = size_of(addends),
                                 .sum_bytes = size_of(key.accumulate)},
                                static_cast<int>(members.size()), place_of(rank, members));
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

OfTokens sent_of_tokens(const SentForward& forward, std::int64_t micro_batches,
                        const MeshShapes& mesh, const Sender& sender) {
  const std::vector<nn::LayerSends> layers = forward.kept.ledger.sends_of_layers();
  const nn::SentBytes& beside = forward.kept.ledger.sent_beside();
  TESSERA_INVARIANT(forward.modes.size() == layers.size(), "modes of other layers");
  const auto routed = models::routed_experts(forward.spec);
  const int ranks = mesh.size_of(axis::kExpert);
  const int own = mesh.coordinate(sender.rank, axis::kExpert);
  OfTokens sent{.activations = micro_batches * (beside.forward + beside.backward),
                .is_even = sender.loads == nullptr};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto& [tensor, experts, has_graph] = layers[i];
    const bool again = has_graph && forward.modes[i] != RecomputeMode::kNone;
    const std::int64_t forwards = again ? 2 : 1;
    sent.activations += micro_batches * (forwards * tensor.forward + tensor.backward);
    if (experts.row_bytes == 0) continue;
    const auto number = forward.first_layer + static_cast<std::int64_t>(i);
    const auto place = std::ranges::find(routed.layers, number) - routed.layers.begin();
    const SentRows rows =
        sender.loads != nullptr
            ? rows_by_loads(sender.loads->at(static_cast<std::size_t>(place)), own)
            : even_rows(micro_batches * experts.tokens * forward.spec.moe->experts_per_token,
                        ranks);
    const std::int64_t gradients =
        (experts.outputs_want ? rows.out : 0) + (experts.inputs_want ? rows.back : 0);
    sent.experts += micro_batches * forwards * experts.count_bytes +
                    (forwards * (rows.out + rows.back) + gradients) * experts.row_bytes;
  }
  return sent;
}

StepTraffic step_traffic(const RunOfPlan& run, const fsdp::StepPlan& plan, const Sender& sender) {
  const MeshShapes& mesh = run.plan.options.mesh;
  StepTraffic traffic{.micro_batches = micro_batches_of(run)};
  const auto counts = capture::counts_of(plan, traffic.micro_batches);
  for (std::size_t unit = 0; unit < counts.size(); ++unit) {
    const layout::PlannedUnit& planned = run.plan.units[unit];
    traffic.gathers += counts[unit].gathers * layout::gather_sent_bytes(planned);
    traffic.reductions += counts[unit].reductions * layout::reduce_sent_bytes(planned);
    for (const layout::BucketPlan& bucket : planned.plan.buckets) {
      traffic.replicas += replica_sent_bytes(bucket, mesh, sender.rank);
    }
  }
  traffic.matrices = sent_of_matrices(run.config, run.description.parameters,
                                      run.contract.parameters, run.plan, sender.rank);
  if (!run.config.training.seq_len) return traffic;
  models::ForwardCase forward =
      forward_case(run.config, run.spec, run.dims, run.contract, run.aux_loss_coef);
  forward.tp_rank = mesh.coordinate(sender.rank, axis::kTensor);
  const auto kept = models::kept_activations(forward);
  const auto modes = modes_of_layers(run, plan);
  traffic.of_tokens = sent_of_tokens({.spec = run.spec, .kept = kept, .modes = modes},
                                     traffic.micro_batches, mesh, sender);
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
    const auto& [activations, experts, messages, is_even] = *traffic.of_tokens;
    text += table_line("activations over tp", activations, "");
    text +=
        table_line("tokens over ep", experts,
                   experts > 0 && is_even ? "as if every expert were chosen equally often" : "");
    text += table_line("messages over pp", messages, "");
  }
  text += table_line("total", traffic.total(), "");
  if (traffic.of_tokens) return text;
  return text +
         "  activations, tokens, messages: set training.seq_len to know what they send; the total "
         "is without them\n";
}

}  // namespace tessera::train
