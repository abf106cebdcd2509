// What a run's model is: its spec, its folder, and the contracts of its parameters.
#include <algorithm>

#include "base/log.h"
#include "base/printable.h"
#include "io/checkpoint_tensors.h"
#include "io/hf_tensors.h"
#include "io/mxfp4_tensors.h"
#include "models/description.h"
#include "models/family.h"
#include "tessera/error.h"
#include "train/family_pins.h"
#include "train/load_balance.h"
#include "train/model_plan.h"
#include "train/parallelize.h"
#include "train/router_loss.h"
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

/// What is known of one parameter: from the folder's header (check_tensors has seen that tensors
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

ParameterMeta adapter_meta(const models::ParameterSpec& adapter, Purpose purpose) {
  ParameterMeta meta;
  meta.name = adapter.name;
  meta.shape = adapter.shape;
  meta.layout = adapter.layout;
  meta.drawn = true;
  meta.trainable = purpose == Purpose::kTraining;
  meta.lora = LoraPart::kAdapter;
  return meta;
}

std::vector<ParameterMeta> metas_of(const ModelSource& source, const ModelConfig& model,
                                    const ParallelDims& dims, Purpose purpose) {
  const auto table = models::describe(source.spec, source.lora, dims).parameters;
  // Before anything of the config.json's sizes is allocated.
  if (source.folder) check_tensors(source);
  if (source.adapters) check_adapters(source);
  const auto bulk_dtype = source.folder ? source.folder->bulk_dtype() : std::nullopt;
  const auto& family = models::traits(source.spec.family);
  const auto freeze = model.freeze.value_or(family.frozen);
  std::vector<ParameterMeta> metas;
  for (const auto& parameter : table) {
    if (!parameter.tied_to.empty()) {
      add_alias(metas, parameter, source);
      continue;
    }
    if (models::is_adapter(parameter.name)) {
      metas.push_back(adapter_meta(parameter, purpose));
      continue;
    }
    ParameterMeta meta = meta_of(parameter, source, bulk_dtype);
    meta.trainable =
        purpose == Purpose::kTraining && !source.lora && !matches_any(freeze, meta.name);
    if (source.lora) meta.lora = LoraPart::kBase;
    meta.frozen_as = model.frozen;
    metas.push_back(std::move(meta));
  }
  if (model.freeze) require_matches(freeze, metas, "model.freeze");
  apply_pins(family, metas);
  return metas;
}

/// The manifest of a checkpoint of adapters; none for anything else.
std::optional<CheckpointFolder> adapters_at(const ModelConfig& model) {
  if (model.path.empty() || !CheckpointFolder::is_one(model.path)) return std::nullopt;
  auto folder = CheckpointFolder::open(model.path);
  if (!folder.manifest().lora) return std::nullopt;
  return folder;
}

/// The layers that a manifest lists are names, in the model's order: not patterns, which a run's
/// configuration has. Errors: kFormat naming `manifest`.
LoraSpec lora_of(const CheckpointLora& kept, const models::ModelSpec& spec,
                 const std::string& manifest) {
  const auto known = models::adaptable_layers(spec);
  for (const std::string& layer : kept.layers) {
    TESSERA_CHECK(std::ranges::find(known, layer) != known.end(), ErrorKind::kFormat, manifest,
                  ": lora: found the layer ", printable(layer),
                  ", expected a linear layer of the model at model_path that can have an adapter");
  }
  auto lora = [&] {
    try {
      return models::plan_lora(spec, {kept.rank, kept.alpha, kept.layers, kept.dropout});
    } catch (const Error& error) {
      throw Error(ErrorKind::kFormat, concat(manifest, ": ", error.what()));
    }
  }();
  TESSERA_CHECK(lora.layers == kept.layers, ErrorKind::kFormat, manifest, ": lora: found ",
                kept.layers.size(), " layers, expected each of ", lora.layers.size(),
                " once, in the model's order");
  return lora;
}

/// The adapters, beside the model that they were trained beside.
ModelSource open_adapters(CheckpointFolder adapters, const ModelConfig& model,
                          const LoraRequest& lora, Purpose purpose) {
  TESSERA_CHECK(lora.rank == 0, ErrorKind::kConfig, "lora.rank: found ", lora.rank,
                " for a checkpoint of adapters (", printable(model.path, 1024),
                "), expected 0: it says itself what they are");
  TESSERA_CHECK(!model.freeze, ErrorKind::kConfig,
                "model.freeze: found a list for a checkpoint of adapters (",
                printable(model.path, 1024),
                "), expected none: all of the model beside them is frozen; leave it out");
  const CheckpointManifest& manifest = adapters.manifest();
  ModelConfig base = model;
  base.path = manifest.model_path;
  TESSERA_CHECK(!base.path.empty() && !adapters_at(base), ErrorKind::kFormat,
                printable(model.path, 1024), ": found adapters beside ",
                base.path.empty() ? std::string("no model") : printable(base.path, 1024),
                ", expected a whole model");
  ModelSource source = open_model(base, {}, purpose);
  const CheckpointLora& kept = *manifest.lora;
  source.base_hash = kept.base_xxh3_128;
  source.lora = lora_of(kept, source.spec, shown(adapters.path() / kManifestFile));
  source.description = models::describe(source.spec, source.lora);
  source.adapters = std::make_shared<CheckpointTensors>(std::move(adapters));
  return source;
}

/// Stored ones as the folder has them; check_tensors has seen that it does.
std::vector<BufferMeta> buffer_metas_of(const ModelSource& source,
                                        const std::vector<models::BufferSpec>& biases) {
  std::vector<BufferMeta> metas;
  for (const auto& buffer : source.description.buffers) {
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
  for (const auto& bias : biases) {
    BufferMeta meta;
    meta.name = bias.name;
    meta.shape = bias.shape;
    meta.strict_pin = "what balances experts: a step is below a 16-bit digit";
    metas.push_back(std::move(meta));
  }
  return metas;
}

}  // namespace

ModelSource open_model(const ModelConfig& model, const LoraRequest& lora, Purpose purpose) {
  if (auto adapters = adapters_at(model)) {
    return open_adapters(std::move(*adapters), model, lora, purpose);
  }
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
    if (says_mxfp4(text, printable(model.path, 1024))) {
      source.folder = std::make_shared<Mxfp4Tensors>(tensors);
    }
    source.origin = model.path;
  } else {
    text = HfFolder::read_config_text(model.config);
  }
  models::SpecOptions options;
  options.purpose = purpose;
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
  source.lora = models::plan_lora(source.spec, lora);
  source.description = models::describe(source.spec, source.lora);
  return source;
}

namespace {

/// What a checkpoint of adapters brings along has not been in the config.
void check_dropout(const LoraSpec& lora, const ParallelDims& dims, Purpose purpose) {
  TESSERA_CHECK(lora.dropout == 0 || dims.tp == 1 || purpose == Purpose::kInference,
                ErrorKind::kConfig, "lora.dropout: found adapters with dropout ", lora.dropout,
                " and tensor_parallel_degree ", dims.tp,
                ", expected 0: what is dropped is drawn by column of a whole input, of which ranks "
                "of tp have a part; set parallelism.tensor_parallel_degree = 1");
}

}  // namespace

ModelContract resolve_model(const ModelSource& source, const Config& config,
                            const ParallelDims& dims, Purpose purpose) {
  check_dropout(source.lora, dims, purpose);
  aux_loss_coef(config.model.aux_loss_coef, source.spec);  // refused before anything is made
  TESSERA_CHECK(
      !config.model.score_before_experts || source.spec.moe, ErrorKind::kConfig,
      "model.score_before_experts: found true for a model without experts, expected false");
  const auto metas = metas_of(source, config.model, dims, purpose);
  // The loss is already divided by the batch's kept labels.
  const DataAxes data(mesh_shape(dims), 1.0);
  auto policy = precision_policy(config.precision, config.optimizer);
  if (purpose == Purpose::kInference) policy.optimizer.no_decay.reset();
  const auto biases = expert_biases_of(source, config.model.load_balance_coeff);
  auto contract = resolve_model_contract(metas, buffer_metas_of(source, biases),
                                         units_of(source.description, metas), policy, data);
  const bool any =
      std::ranges::any_of(contract.parameters, [](const auto& each) { return each.trainable; });
  TESSERA_CHECK(any || purpose == Purpose::kInference, ErrorKind::kConfig,
                "model.freeze: found every parameter frozen, expected one to train; take a pattern "
                "out of model.freeze or of the rules with frozen = true");
  return contract;
}

}  // namespace tessera::train
