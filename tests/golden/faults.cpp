#include "golden/faults.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>

#include <ostream>

#include "golden/model_folder.h"
#include "tessera/error.h"

namespace tessera::golden {
namespace {

std::string text(CaughtBy by) {
  switch (by) {
    case CaughtBy::kSharding:
      return "contract";
    case CaughtBy::kTransition:
      return "transition";
    case CaughtBy::kStep:
      return "refusal in the step";
    case CaughtBy::kInvariance:
      return "invariant gradients";
    case CaughtBy::kGradients:
      return "gradients";
    case CaughtBy::kNorm:
      return "gradient norm";
    case CaughtBy::kBias:
      return "expert bias";
    case CaughtBy::kNothing:
      return "harmless";
  }
  return "";
}

std::string short_text(const Degrees& d) {
  std::string result = concat("tp ", d.tp);
  if (d.replicate > 1) result += concat(", dp_replicate ", d.replicate);
  if (d.shard > 1) result += concat(", dp_shard ", d.shard);
  if (d.ep > 1) result += concat(", ep ", d.ep);
  if (d.etp > 1) result += concat(", etp ", d.etp);
  if (d.cp > 1) result += concat(", cp ", d.cp, d.form == ContextForm::kHeads ? " heads" : "");
  if (d.tp > 1) result += d.sequence ? ", sequence shards" : ", whole sequence";
  if (d.router == RouterTokens::kAll) result += ", router on all";
  return result;
}

std::string text(Setting setting) {
  switch (setting) {
    case Setting::kPlain:
      return "";
    case Setting::kAuxiliaryLoss:
      return ", auxiliary loss";
    case Setting::kScoresBefore:
      return ", scores before experts";
    case Setting::kBalance:
      return ", expert bias";
    case Setting::kBalanceByRows:
      return ", expert bias, two micro-batches";
    case Setting::kAdapters:
      return ", adapters of experts";
    case Setting::kPacked:
      return ", packed rows";
    case Setting::kRouting:
      return ", imposed routing";
    case Setting::kDropout:
      return ", dropout";
  }
  return "";
}

/// With second factors that are no longer zero: those of the first have a gradient.
std::string trained_adapters(const std::string& of, const LoraRequest& lora) {
  auto config = training_config(Reference::of(of), OptimizerKind::kAdamW, {});
  config.lora = lora;
  config.optimizer.lr = 0.05;
  config.training.steps = 3;
  config.checkpoint.folder = temporary_path("adapters");
  run_training(config, {});
  return config.checkpoint.folder + "/step-3";
}

const std::string& adapted_experts() {
  static const std::string folder =
      trained_adapters(kQwen, LoraRequest{.rank = 4, .alpha = 10.0, .targets = {"experts.*"}});
  return folder;
}

const std::string& adapted_projections() {
  static const std::string folder = trained_adapters(
      kDense,
      LoraRequest{.rank = 4, .alpha = 10.0, .targets = {"q_proj", "o_proj"}, .dropout = 0.3});
  return folder;
}

/// Three documents a row: one is longer than a chunk of the delta rule, and none begins at a
/// chunk's begin.
void pack(train::MicroBatch& batch) {
  const std::int64_t tokens = batch.input_ids.size(1), second = 5, third = tokens - 7;
  at::Tensor starts = at::zeros_like(batch.input_ids);
  starts.narrow(1, second, third - second).fill_(second);
  starts.narrow(1, third, tokens - third).fill_(third);
  batch.documents.starts = starts;
}

/// Experts of kQwen, other ones for each token and layer.
void impose_routing(train::MicroBatch& batch) {
  constexpr std::int64_t kLayers = 4, kExperts = 8, kChosen = 3;
  const at::Tensor tokens = at::arange(batch.input_ids.numel(), at::kLong).unsqueeze(1);
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    const at::Tensor first = tokens * (layer + 3) + tokens.div(kExperts, "floor");
    batch.imposed_routing.push_back(
        (first + 2 * at::arange(kChosen, at::kLong)).remainder(kExperts));
  }
}

}  // namespace

std::string table_row(const Fault& fault) {
  const std::string number = fault.number > 0 ? concat("| ", fault.number, " ") : "";
  return concat(number, "| ", fault.what, " | ", fault.seen, " | ", short_text(fault.degrees),
                text(fault.setting), " | ", text(fault.caught_by), " | ",
                fault.named.empty() ? "" : concat("`", fault.named, "`"), " |");
}

std::ostream& operator<<(std::ostream& out, const Fault& fault) { return out << table_row(fault); }

void set_up(train::Config& config, Setting setting) {
  switch (setting) {
    case Setting::kPlain:
    case Setting::kPacked:
    case Setting::kRouting:
      return;
    case Setting::kAuxiliaryLoss:
      config.model.aux_loss_coef = 0.7;
      return;
    case Setting::kScoresBefore:
      config.model.score_before_experts = true;
      return;
    case Setting::kBalanceByRows:
      config.training.local_batch_size = 1;
      [[fallthrough]];
    case Setting::kBalance:
      config.model.load_balance_coeff = 1e-3;
      return;
    case Setting::kAdapters:
      config.model.path = adapted_experts();
      return;
    case Setting::kDropout:
      config.model.path = adapted_projections();
      return;
  }
}

std::function<void(train::MicroBatch&)> batch_of(Setting setting) {
  if (setting == Setting::kPacked) return pack;
  if (setting == Setting::kRouting) return impose_routing;
  return {};
}

std::string to_string(const Ground& ground) {
  return concat(ground.folder, ", ", short_text(ground.degrees), text(ground.setting));
}

std::ostream& operator<<(std::ostream& out, const Ground& ground) {
  return out << to_string(ground);
}

std::vector<Ground> grounds_of(const std::vector<Fault>& faults) {
  std::map<std::string, Ground> grounds;
  for (const Fault& fault : faults) {
    Ground ground{fault.folder, fault.setting, fault.degrees};
    grounds.emplace(to_string(ground), std::move(ground));
  }
  std::vector<Ground> all;
  for (auto& [text, ground] : grounds) all.push_back(std::move(ground));
  return all;
}

const std::vector<Fault>& all_faults() {
  static const std::vector<Fault> all = [] {
    std::vector<Fault> faults = faults_of_declarations();
    for (const auto& part : {faults_of_transitions(), faults_of_sums(), faults_of_counts(),
                             faults_of_losses(), faults_of_scores(), faults_of_states()}) {
      faults.insert(faults.end(), part.begin(), part.end());
    }
    return faults;
  }();
  return all;
}

}  // namespace tessera::golden
