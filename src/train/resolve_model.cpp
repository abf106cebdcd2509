// What a run's model is: its spec, its folder, and the contracts of its parameters.
#include <algorithm>

#include "base/log.h"
#include "base/printable.h"
#include "io/checkpoint_tensors.h"
#include "io/hf_tensors.h"
#include "models/family.h"
#include "models/parameter_table.h"
#include "tessera/error.h"
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

std::vector<GradContract> resolve_model(const ModelSource& source, const Config& config,
                                        const ParallelDims& dims) {
  const auto& pins = models::traits(source.spec.family).pins;
  const auto freeze = config.model.freeze.value_or(std::vector<std::string>{});
  const auto bulk = source.folder ? source.folder->bulk_dtype() : std::nullopt;
  const auto table = models::parameter_table(source.spec);
  // Before anything of the config.json's sizes is allocated.
  if (source.folder) check_tensors(*source.folder, table);
  std::vector<ParameterMeta> metas;
  for (const auto& parameter : table) {
    if (!parameter.tied_to.empty()) {
      const auto owner = std::find_if(metas.begin(), metas.end(), [&](const auto& meta) {
        return meta.name == parameter.tied_to;
      });
      TESSERA_INVARIANT(owner != metas.end(), parameter.name, " is tied to an unknown parameter");
      owner->aliases.push_back(parameter.name);
      continue;
    }
    ParameterMeta meta;
    meta.name = parameter.name;
    meta.shape = parameter.shape;
    if (source.folder) {
      if (const auto* info = source.folder->find(parameter.name)) {
        TESSERA_CHECK(is_floating(info->dtype), ErrorKind::kFormat, source.folder->path().string(),
                      ": tensor ", parameter.name, ": found dtype ", to_string(info->dtype),
                      ", expected a floating one");
        meta.checkpoint = info->dtype;
        meta.checkpoint_bulk = bulk;
        meta.published = info->original;
        meta.dtype = info->dtype;
      }
    } else {
      meta.drawn = true;
      meta.dtype = source.spec.dtype.value_or(DType::kFloat32);
    }
    meta.model_pin = matches_any(pins, meta.name);
    meta.trainable = !matches_any(freeze, meta.name);
    metas.push_back(std::move(meta));
  }
  require_matches(freeze, metas, "model.freeze");
  ReductionPlan reductions;
  if (dims.dp_shard > 1) reductions.shard_axes.emplace_back(axis::kShard);
  if (dims.dp_replicate > 1) reductions.replica_axes.emplace_back(axis::kReplicate);
  auto policy = precision_policy(config.precision);
  policy.final_dtype = DType::kFloat32;  // the optimizer's master dtype ...
  auto contracts = resolve_contracts(metas, policy, reductions);
  for (auto& contract : contracts) {
    if (contract.storage.dtype != DType::kFloat64) continue;
    contract.final = DType::kFloat64;  // ... but fp64 storage keeps its precision
    contract.reason(ContractField::kFinal) = "as storage, which is wider than float32";
  }
  TESSERA_CHECK(std::ranges::any_of(contracts, [](const auto& each) { return each.trainable; }),
                ErrorKind::kConfig,
                "model.freeze: found every parameter frozen, expected one to train; take a pattern "
                "out of model.freeze or of the rules with frozen = true");
  return contracts;
}

}  // namespace tessera::train
