// What a run's model is: its spec, its folder, and the contracts of its parameters.
#include <algorithm>

#include "base/log.h"
#include "base/printable.h"
#include "io/checkpoint_tensors.h"
#include "io/hf_tensors.h"
#include "models/family.h"
#include "models/parameter_table.h"
#include "tessera/error.h"
#include "train/family_pins.h"
#include "train/model_plan.h"
#include "train/parallelize.h"
#include "train/weights.h"

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
    TESSERA_CHECK(any, ErrorKind::kConfig, key, ": found the pattern \"", pattern,
                  "\" that matches no parameter, expected one that does");
  }
}

/// A run may have begun with a checkpoint of another one. It is looked for for the sake of
/// tokenizer files only: one that cannot be opened any more is as good as gone.
std::filesystem::path first_origin(std::filesystem::path path) {
  constexpr int kMost = 64;  // a chain that leads back to itself has no beginning
  for (int i = 0; i < kMost && !path.empty() && CheckpointFolder::is_one(path); ++i) {
    try {
      path = CheckpointFolder::open(path).manifest().model_path;
    } catch (const Error& error) {
      log::warn("no tokenizer files are taken from where training began: ", error.what());
      return {};
    }
  }
  return path;
}

/// What is known of one parameter: from the folder's header, or from config.json alone.
ParameterMeta meta_of(const models::ParameterSpec& parameter, const ModelSource& source) {
  ParameterMeta meta;
  meta.name = parameter.name;
  meta.shape = parameter.shape;
  if (!source.folder) {
    meta.drawn = true;
    meta.dtype = source.spec.dtype.value_or(DType::kFloat32);
    return meta;
  }
  if (const auto* info = source.folder->find(parameter.name)) {
    TESSERA_CHECK(is_floating(info->dtype), ErrorKind::kFormat, source.folder->path().string(),
                  ": tensor ", parameter.name, ": found dtype ", to_string(info->dtype),
                  ", expected a floating one");
    meta.checkpoint = info->dtype;
    meta.checkpoint_bulk = source.folder->bulk_dtype();
    meta.published = info->original;
    meta.dtype = info->dtype;
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

std::vector<ParameterMeta> metas_of(const ModelSource& source, const ModelConfig& model,
                                    Purpose purpose) {
  const auto table = models::parameter_table(source.spec);
  // Before anything of the config.json's sizes is allocated.
  if (source.folder) check_tensors(*source.folder, source.spec);
  const auto& family = models::traits(source.spec.family);
  const auto freeze = model.freeze.value_or(family.frozen);
  std::vector<ParameterMeta> metas;
  for (const auto& parameter : table) {
    if (!parameter.tied_to.empty()) {
      add_alias(metas, parameter, source);
      continue;
    }
    ParameterMeta meta = meta_of(parameter, source);
    meta.trainable = purpose == Purpose::kTraining && !matches_any(freeze, meta.name);
    meta.frozen_as = model.frozen;
    metas.push_back(std::move(meta));
  }
  if (model.freeze) require_matches(freeze, metas, "model.freeze");
  apply_pins(family, metas);
  return metas;
}

/// Stored ones as the folder has them; check_tensors has seen that it does.
std::vector<BufferMeta> buffer_metas_of(const ModelSource& source) {
  std::vector<BufferMeta> metas;
  for (const auto& buffer : models::buffer_table(source.spec)) {
    BufferMeta meta;
    meta.name = buffer.name;
    meta.shape = buffer.shape;
    if (source.folder) {
      meta.dtype = source.folder->find(buffer.name)->dtype;
      meta.checkpoint = meta.dtype;
      meta.checkpoint_bulk = source.folder->bulk_dtype();
    }
    metas.push_back(std::move(meta));
  }
  return metas;
}

}  // namespace

ModelSource open_model(const ModelConfig& model) {
  ModelSource source;
  std::string text;
  if (!model.path.empty() && CheckpointFolder::is_one(model.path)) {
    const auto tensors = std::make_shared<CheckpointTensors>(CheckpointFolder::open(model.path));
    text = tensors->folder().config_text();
    source.folder = tensors;
    source.origin = first_origin(tensors->folder().manifest().model_path);
  } else if (!model.path.empty()) {
    const auto tensors = std::make_shared<HfTensors>(HfFolder::open(model.path));
    text = tensors->folder().config_text();
    source.folder = tensors;
    source.origin = model.path;
  } else {
    text = HfFolder::read_config_text(model.config);
  }
  models::SpecOptions options;
  options.unknown_keys =
      model.allow_unknown_config_keys ? models::UnknownKeys::kWarn : models::UnknownKeys::kRefuse;
  auto parsed = [&] {
    try {
      return models::parse_spec(text, options);
    } catch (const Error& error) {
      const auto& where = model.path.empty() ? model.config : model.path;
      throw Error(error.kind(), concat(printable(where, 1024), ": ", error.what()));
    }
  }();
  for (const auto& warning : parsed.warnings) log::warn("config.json: ", warning);
  source.spec = std::move(parsed.spec);
  return source;
}

ModelContract resolve_model(const ModelSource& source, const Config& config,
                            const ParallelDims& dims, Purpose purpose) {
  const auto metas = metas_of(source, config.model, purpose);
  ReductionPlan reductions;
  if (dims.dp_shard > 1) reductions.shard_axes.emplace_back(axis::kShard);
  if (dims.dp_replicate > 1) reductions.replica_axes.emplace_back(axis::kReplicate);
  auto policy = precision_policy(config.precision, config.optimizer);
  if (purpose == Purpose::kInference) policy.optimizer.no_decay.reset();
  auto contract = resolve_model_contract(metas, buffer_metas_of(source),
                                         units_of(source.spec, metas), policy, reductions);
  const bool any =
      std::ranges::any_of(contract.parameters, [](const auto& each) { return each.trainable; });
  TESSERA_CHECK(any || purpose == Purpose::kInference, ErrorKind::kConfig,
                "model.freeze: found every parameter frozen, expected one to train; take a pattern "
                "out of model.freeze or of the rules with frozen = true");
  return contract;
}

}  // namespace tessera::train
