#include "train/hf/model_source.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <system_error>
#include <vector>

#include "base/log.h"
#include "base/text/printable.h"
#include "comm/group.h"
#include "io/checkpoint_folder.h"
#include "io/checkpoint_store.h"
#include "io/hf_folder.h"
#include "io/unpacked/fp8_tensors.h"
#include "io/unpacked/mxfp4_tensors.h"
#include "models/expert_bias.h"
#include "models/family.h"
#include "models/keys/bare_infinity.h"
#include "tessera/error.h"
#include "train/hf/renamed_tensors.h"

namespace tessera::train {
namespace {

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

/// Opens the adapters, with the model that they were trained with.
ModelSource open_adapters(CheckpointFolder adapters, const ModelConfig& model,
                          const LoraRequest& lora, Purpose purpose) {
  TESSERA_CHECK(lora.rank == 0, ErrorKind::kConfig, "lora.rank: found ", lora.rank,
                " for a checkpoint of adapters (", printable(model.path, 1024),
                "), expected 0: it says itself what they are");
  TESSERA_CHECK(!model.freeze, ErrorKind::kConfig,
                "model.freeze: found a list for a checkpoint of adapters (",
                printable(model.path, 1024),
                "), expected none: all of their model is frozen; leave it out");
  const CheckpointManifest& manifest = adapters.manifest();
  ModelConfig base = model;
  base.path = manifest.model_path;
  TESSERA_CHECK(!base.path.empty() && !adapters_at(base), ErrorKind::kFormat,
                printable(model.path, 1024), ": found adapters for ",
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

/// A layer that predicts further tokens has this matrix, and a decoder's has none: one behind
/// num_hidden_layers without it is a layer that the config forgets.
bool predicts(const TensorSource& folder, const models::ParsedSpec& parsed, std::string_view name) {
  const auto layer = models::prediction_layer(parsed, name);
  return layer && folder.find(concat("model.layers.", *layer, ".eh_proj.weight")) != nullptr;
}

/// Names the tensors as the family's modules do; tensors that are no part of the model are left out
/// and logged.
void name_as_modules(const models::ParsedSpec& parsed, ModelSource& source) {
  const models::FamilyTraits& family = models::traits(parsed.spec.family);
  bool predicting = false;
  const auto renamed =
      std::make_shared<RenamedTensors>(source.folder, [&](std::string_view name) -> std::string {
        const bool extra = predicts(*source.folder, parsed, name);
        predicting = predicting || extra;
        return extra ? std::string() : family.module_name(name);
      });
  if (!renamed->changes()) return;
  const auto& left_out = renamed->left_out();
  if (!left_out.empty()) {
    log::info(shown(source.folder->path()), ": ", left_out.size(), " tensors are left out, ",
              printable(left_out.front()), left_out.size() > 1 ? " and others" : "",
              predicting ? ": those of a prediction layer, which is no part of "
                         : ": they are no weights of ",
              family.architecture);
  }
  source.left_out = left_out;
  source.folder = renamed;
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
    text = models::spell_bare_infinity(tensors->folder().config_text());
    source.folder = tensors;
    const std::string where = shown(std::filesystem::path(model.path) / "config.json");
    if (says_mxfp4(text, where)) {
      source.folder = std::make_shared<Mxfp4Tensors>(tensors);
    } else if (const auto block = fp8_block(text, where)) {
      source.folder = std::make_shared<Fp8Tensors>(tensors, *block);
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
  if (!parsed.ignored_keys.empty()) {
    log::info("config.json: ignored, as ",
              parsed.ignored_keys.size() == 1 ? "it changes" : "they change",
              " nothing in this model: ", joined(parsed.ignored_keys));
  }
  for (const auto& warning : parsed.warnings) log::warn("config.json: ", warning);
  if (source.folder) name_as_modules(parsed, source);
  source.spec = std::move(parsed.spec);
  source.lora = models::plan_lora(source.spec, lora);
  source.description = models::describe(source.spec, source.lora);
  return source;
}

namespace {

namespace fs = std::filesystem;

/// Where the run of this folder keeps its checkpoints; none where it is no run's. As its
/// config.toml says, but inside the folder where they were inside: it may have been moved.
std::optional<fs::path> checkpoints_of_run(const fs::path& path) {
  std::error_code ignored;
  const fs::path usual = path / CheckpointConfig().folder;
  if (fs::exists(path / "config.toml", ignored)) {
    try {
      const Config run = load_config((path / "config.toml").string());
      if (!run.job.dump_folder) return std::nullopt;
      const fs::path inside =
          fs::path(run.checkpoint.folder).lexically_relative(*run.job.dump_folder);
      const bool elsewhere = inside.empty() || *inside.begin() == "..";
      return elsewhere ? fs::path(run.checkpoint.folder) : path / inside;
    } catch (const Error&) {
      // Written by another version, or by another program.
    }
  }
  if (CheckpointStore(usual).steps().empty()) return std::nullopt;
  return usual;
}

/// Where to look for the newest checkpoint; none where `path` itself is what is meant.
std::optional<fs::path> checkpoints_at(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored) || fs::exists(path / kManifestFile, ignored) ||
      fs::exists(path / "config.json", ignored)) {
    return std::nullopt;
  }
  return CheckpointStore(path).steps().empty() ? checkpoints_of_run(path) : path;
}

/// The step that model.path stood for when the run of this folder began, as its own config.toml
/// says, where it resumes from a checkpoint: the other run may have come further since, and
/// adapters belong to the model that they were trained with. None where that step is not there any
/// more.
std::optional<fs::path> taken_at_first(const Config& run) {
  const auto folder = checkpoints_at(run.model.path);
  const fs::path own = fs::path(run.job.dump_folder.value_or("")) / "config.toml";
  std::error_code ignored;
  if (!folder || !run.checkpoint.enable || !fs::exists(own, ignored) ||
      CheckpointStore(run.checkpoint.folder).steps().empty()) {
    return std::nullopt;
  }
  try {
    const fs::path before = load_config(own.string()).model.path;
    const bool same_run = parse_step_folder(before.filename().native()) &&
                          fs::equivalent(before.parent_path(), *folder, ignored);
    return same_run && fs::exists(before / kManifestFile, ignored) ? std::optional(before)
                                                                   : std::nullopt;
  } catch (const Error&) {
    return std::nullopt;  // of another version
  }
}

/// Rank 0's `find` on every rank. Collective.
void take(ModelConfig& model, World& world, const std::function<std::string()>& find) {
  if (model.path.empty()) return;
  std::string taken;
  comm::on_all_or_none(world, "checkpoint of model.path", [&] {
    if (world.rank() == 0) taken = find();
  });
  model.path = comm::from_first_rank(world, "checkpoint of model.path", taken);
}

}  // namespace

std::string newest_checkpoint(const std::string& path, std::string_view key) {
  const auto folder = checkpoints_at(path);
  if (!folder) return path;
  std::optional<fs::path> taken;
  try {
    taken = find_checkpoint(*folder);
  } catch (const Error& error) {
    throw Error(error.kind(), concat(key, ": ", error.what()));
  }
  TESSERA_CHECK(taken, ErrorKind::kIo, key, ": found ", shown(path),
                ", the folder of a run, and no checkpoint in ", shown(*folder),
                ", expected one; it has saved none yet, or had checkpoint.enable = false");
  log::info(key, ": of ", shown(path), " the latest checkpoint is taken, ", shown(*taken));
  return taken->string();
}

void take_newest_checkpoint(ModelConfig& model, World& world, std::string_view key) {
  take(model, world, [&] { return newest_checkpoint(model.path, key); });
}

void take_checkpoint_of_run(Config& run, World& world) {
  take(run.model, world, [&] {
    const auto first = taken_at_first(run);
    if (!first) return newest_checkpoint(run.model.path, "model.path");
    log::info("model.path: of ", shown(run.model.path),
              " the checkpoint is taken with which this run began, ", shown(*first));
    return first->string();
  });
}

std::vector<models::BufferSpec> stored_expert_biases(const TensorSource& folder,
                                                     const models::ModelSpec& spec) {
  auto biases = models::expert_biases(spec);
  if (biases.empty() || folder.find(biases.front().name) == nullptr) return {};
  return biases;
}

namespace {

constexpr std::int64_t kPartElements = std::int64_t{1} << 20;

Hash128 hash_of(const TensorSource& folder, const std::string& name, const SourceTensor& tensor) {
  Hash128Stream hash;
  std::vector<std::byte> bytes;
  for (std::int64_t begin = 0; begin < tensor.numel(); begin += kPartElements) {
    const std::int64_t end = std::min(begin + kPartElements, tensor.numel());
    bytes.resize(static_cast<std::size_t>((end - begin) * size_of(tensor.dtype)));
    folder.read(name, begin, end, bytes);
    hash.add(bytes);
  }
  return hash.digest();
}

std::string line_of(const std::string& name, const SourceTensor& tensor, const Hash128& hash) {
  std::string text = concat(name, "\n", to_string(tensor.dtype));
  for (const std::int64_t size : tensor.shape) text += concat(" ", size);
  return text + "\n" + to_string(hash) + "\n";
}

/// Hashes of the `rank`-th of every `ranks` tensors, in their order.
std::vector<Hash128> hashes_of(const TensorSource& folder, int rank, int ranks) {
  std::vector<Hash128> hashes;
  int number = 0;
  for (const auto& [name, tensor] : folder.tensors()) {
    if (number++ % ranks == rank) hashes.push_back(hash_of(folder, name, tensor));
  }
  return hashes;
}

/// `hashes` by rank, as hashes_of gives them.
Hash128 combined(const TensorSource& folder, const std::vector<std::vector<Hash128>>& hashes) {
  Hash128Stream whole;
  std::size_t number = 0;
  for (const auto& [name, tensor] : folder.tensors()) {
    whole.add(line_of(name, tensor, hashes[number % hashes.size()].at(number / hashes.size())));
    ++number;
  }
  return whole.digest();
}

}  // namespace

Hash128 tensors_hash(const TensorSource& folder, World& world) {
  std::string mine;
  comm::on_all_or_none(world, "reading the model of the adapters", [&] {
    for (const Hash128& hash : hashes_of(folder, world.rank(), world.size())) {
      mine += to_string(hash);
    }
  });
  constexpr std::size_t kDigits = 32;
  std::vector<std::vector<Hash128>> hashes;
  for (const std::string& text :
       comm::all_gather_bytes(world.control(), mine, "hashes of the model")) {
    hashes.emplace_back();
    for (std::size_t at = 0; at < text.size(); at += kDigits) {
      hashes.back().push_back(parse_hash128(std::string_view(text).substr(at, kDigits)).value());
    }
  }
  return combined(folder, hashes);
}

void check_base(const ModelSource& source, World& world) {
  const Hash128 found = tensors_hash(*source.folder, world);
  TESSERA_CHECK(found == *source.base_hash, ErrorKind::kConfig, shown(source.folder->path()),
                ": found tensors with the hash ", to_string(found), ", expected ",
                to_string(*source.base_hash), ", those of the model that the adapters of ",
                shown(source.adapters->path()), " were trained with; put that model back");
}

}  // namespace tessera::train
