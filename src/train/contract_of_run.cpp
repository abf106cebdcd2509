#include "train/contract_of_run.h"

#include <algorithm>

#include "base/log.h"
#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "base/text/wildcard.h"
#include "grad/contract_lock.h"
#include "grad/ruled_update.h"
#include "io/checkpoint_folder.h"
#include "io/hf_folder.h"
#include "models/description.h"
#include "models/expert_bias.h"
#include "models/family.h"
#include "tessera/error.h"
#include "train/context_of_run.h"
#include "train/expert_balance.h"
#include "train/hf/model_forms.h"
#include "train/hf/weights.h"
#include "train/plan_of_run.h"

namespace tessera::train {
namespace {

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const auto& pattern) { return matches_name(pattern, name); });
}

/// A freeze pattern that matches nothing would train what the user wanted frozen.
void require_matches(const std::vector<std::string>& patterns,
                     const std::vector<ParameterMeta>& metas, const char* key) {
  for (const auto& pattern : patterns) {
    const bool any = std::any_of(metas.begin(), metas.end(), [&](const auto& meta) {
      return matches_name(pattern, meta.name);
    });
    TESSERA_CHECK(any, ErrorKind::kConfig, unmatched(key, in_quotes(pattern)));
  }
}

/// The purpose that a model is resolved for, and how frozen parameters are kept then.
struct Use {
  Purpose purpose;
  FrozenAs frozen_as;
};

/// Metadata of one parameter: from the folder's header (check_tensors has seen that tensors
/// that one parameter stacks have one dtype), or from config.json alone.
ParameterMeta meta_of(const models::ParameterSpec& parameter, const ModelSource& source,
                      std::optional<DType> bulk_dtype) {
  ParameterMeta meta;
  meta.name = parameter.name;
  meta.shape = parameter.shape;
  meta.layout = parameter.layout;
  if (!source.folder) {
    meta.drawn = true;
    meta.dtype = source.spec.dtype.value_or(DType::kFloat32);
    return meta;
  }
  const std::string name = file_form(parameter).names.front();
  if (const auto* info = source.folder->find(name)) {
    if (!is_floating(info->dtype)) throw not_floating(*source.folder, "tensor", name, info->dtype);
    meta.dtype = info->dtype;
    if (info->unpacked) return meta;  // the dtype is ours: the file records none
    meta.checkpoint = info->dtype;
    meta.checkpoint_bulk = bulk_dtype;
    meta.published = info->original;
  }
  return meta;
}

/// A tied parameter is another name of its owner; a folder may hold it all the same.
void add_alias(std::vector<ParameterMeta>& metas, const models::ParameterSpec& tied,
               const ModelSource& source) {
  const auto owner = std::find_if(metas.begin(), metas.end(),
                                  [&](const auto& meta) { return meta.name == tied.tied_to; });
  TESSERA_INVARIANT(owner != metas.end(), tied.name, " is tied to an unknown parameter");
  owner->aliases.push_back(tied.name);
  const auto* info = source.folder ? source.folder->find(tied.name) : nullptr;
  if (info != nullptr) owner->stored_aliases.emplace_back(tied.name, info->dtype);
}

ParameterMeta adapter_meta(const models::ParameterSpec& adapter, const Use& use) {
  ParameterMeta meta;
  meta.name = adapter.name;
  meta.shape = adapter.shape;
  meta.layout = adapter.layout;
  meta.drawn = true;
  meta.trainable = use.purpose == Purpose::kTraining;
  meta.frozen_as = use.frozen_as;
  meta.lora = LoraPart::kAdapter;
  return meta;
}

std::vector<ParameterMeta> metas_of(const ModelSource& source, const ModelConfig& model,
                                    const ParallelDims& dims, const Use& use) {
  const auto table = models::describe(source.spec, source.lora, dims).parameters;
  // Before anything of the config.json's sizes is allocated.
  if (source.folder) check_tensors(source);
  if (source.adapters) check_adapters(source);
  const auto bulk_dtype = source.folder ? source.folder->bulk_dtype() : std::nullopt;
  const auto freeze = model.freeze.value_or(models::traits(source.spec.family).frozen);
  std::vector<ParameterMeta> metas;
  for (const auto& parameter : table) {
    if (!parameter.tied_to.empty()) {
      add_alias(metas, parameter, source);
      continue;
    }
    if (models::is_adapter(parameter.name)) {
      metas.push_back(adapter_meta(parameter, use));
      continue;
    }
    ParameterMeta meta = meta_of(parameter, source, bulk_dtype);
    meta.trainable =
        use.purpose == Purpose::kTraining && !source.lora && !matches_any(freeze, meta.name);
    if (source.lora) meta.lora = LoraPart::kBase;
    meta.frozen_as = use.frozen_as;
    metas.push_back(std::move(meta));
  }
  if (model.freeze) require_matches(freeze, metas, "model.freeze");
  return metas;
}

/// Stored ones as the folder has them; check_tensors has seen that it does.
std::vector<BufferMeta> buffer_metas_of(const ModelSource& source,
                                        const std::vector<models::BufferSpec>& biases) {
  std::vector<BufferMeta> metas;
  for (const auto& buffer : source.description.buffers) {
    BufferMeta meta;
    meta.name = buffer.name;
    meta.shape = buffer.shape;
    // The biases that balance experts are fp32 in every run.
    if (source.folder && !models::HasExpertBias::is_stored_name(buffer.name)) {
      meta.dtype = source.folder->find(buffer.name)->dtype;
      meta.checkpoint = meta.dtype;
      meta.checkpoint_bulk = source.folder->bulk_dtype();
    }
    metas.push_back(std::move(meta));
  }
  for (const auto& bias : biases) {
    BufferMeta meta;
    meta.name = bias.name;
    meta.shape = bias.shape;
    meta.strict_pin = "what balances experts: a step is below a 16-bit digit";
    metas.push_back(std::move(meta));
  }
  return metas;
}

PrecisionPolicy policy_of(const Config& config, Purpose purpose) {
  auto policy = precision_policy(config.precision, config.optimizer);
  if (purpose == Purpose::kTraining) return policy;
  policy.optimizer.no_decay.reset();
  for (PrecisionRule& rule : policy.rules) rule.frozen.reset();
  return policy;
}

ModelContract resolve(const ModelSource& source, const Config& config, const ParallelDims& dims,
                      const Use& use) {
  aux_loss_coef(config.model.aux_loss_coef, source.spec);  // refused before anything is made
  TESSERA_CHECK(
      !config.model.score_before_experts || source.spec.moe, ErrorKind::kConfig,
      "model.score_before_experts: found true for a model without experts, expected false");
  auto metas = metas_of(source, config.model, dims, use);
  // The loss is already divided by the batch's unmasked targets.
  const DataAxes data(mesh_shape(dims), 1.0);
  const auto biases = expert_biases_of(source, config.model.load_balance_coeff);
  auto buffers = buffer_metas_of(source, biases);
  apply_pins(models::traits(source.spec.family), metas, buffers);
  auto contract = resolve_model_contract(metas, buffers, units_of(source.description, metas),
                                         policy_of(config, use.purpose), data);
  if (use.purpose == Purpose::kTraining) {
    std::vector<const GradContract*> parameters;
    for (const auto& parameter : contract.parameters) parameters.push_back(&parameter);
    grad::check_optimizer_rules(config.optimizer.rule, parameters);
    const auto& table = source.description.parameters;
    check_split_fused(table, config.optimizer.rule, config.optimizer.name);
    const auto fused = fused_weights(table);
    auto of_others = config.optimizer.rule;
    for (OptimizerRule& rule : of_others) rule.split_fused.reset();
    for (auto& parameter : contract.parameters) {
      const bool is_fused = std::ranges::count(fused, parameter.name) > 0;
      grad::resolve_ruled(parameter, is_fused ? config.optimizer.rule : of_others);
    }
  }
  const bool any =
      std::ranges::any_of(contract.parameters, [](const auto& each) { return each.trainable; });
  TESSERA_CHECK(any || use.purpose == Purpose::kInference, ErrorKind::kConfig,
                "model.freeze: found every parameter frozen, expected one to train; take a pattern "
                "out of model.freeze or of the rules with frozen = true");
  return contract;
}

}  // namespace

void require_locked(const Config& config, const ModelContract& contract, SaysDifferences says) {
  constexpr std::int64_t kMostBytes = std::int64_t{256} << 20;
  constexpr std::size_t kMostSaid = 40, kMostInError = 3;
  const std::string& file = config.contract.lock;
  if (file.empty()) return;
  const ParallelismConfig& of = config.parallelism;
  const auto context = context_lock_lines({.cp = of.context_parallel_degree,
                                           .context_form = of.context_parallel_form,
                                           .context_parts = context_parts(of)});
  const auto differences = open_as("contract.lock", [&] {
    return grad::differences_from_lock(contract, read_text_file(file, kMostBytes), shown(file),
                                       context);
  });
  if (differences.empty()) return;
  const std::size_t said = std::min(differences.size(), kMostSaid);
  for (std::size_t i = 0; i < said && says == SaysDifferences::kYes; ++i) {
    log::error(differences[i]);
  }
  const std::size_t named = std::min(differences.size(), kMostInError);
  std::string first;
  for (std::size_t i = 0; i < named; ++i) first += concat(i > 0 ? "; " : "", differences[i]);
  const std::size_t others = differences.size() - named;
  throw Error(
      ErrorKind::kContract,
      concat("contract.lock: found ", differences.size(), " lines other than those of ",
             shown(file), " (", first, others > 0 ? concat("; and ", others, " more") : "",
             "), expected none; undo the change, or where it is meant write the lock again: "
             "tessera inspect --contract CONFIG --lock ",
             shown(file)));
}

MeshShapes mesh_shape(const ParallelDims& dims) {
  const auto dense = MeshShape::dense(dims.pp, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp);
  if (dims.ep == 1) return dense;
  return {dense,
          MeshShape::sparse(dims.pp, dims.dp_replicate, dims.expert_data(), dims.ep, dims.etp)};
}

ModelContract resolve_model(const ModelSource& source, const Config& config,
                            const ParallelDims& dims, Purpose purpose) {
  const bool trains = purpose == Purpose::kTraining;
  return resolve(source, config, dims,
                 {purpose, trains ? config.model.frozen : FrozenAs::kReplicate});
}

}  // namespace tessera::train
