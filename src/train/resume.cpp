#include "train/resume.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "base/log.h"
#include "base/printable.h"
#include "comm/group.h"
#include "grad/torch_dtype.h"
#include "io/checkpoint_store.h"
#include "tessera/error.h"
#include "train/agreement.h"
#include "train/data_identity.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

std::string shown(const fs::path& path) { return printable(path.native(), 1024); }

/// Every rank can write there, and all write to the same folder; found out before the first step,
/// not at the first checkpoint.
void try_folder(const CheckpointStore& store, World& world) {
  on_all_or_none(world, "checkpoint folder", [&] {
    if (world.rank() == 0) store.clean();
  });
  const auto probe = [&](int rank) { return store.temporary(0) / concat("rank_", rank); };
  on_all_or_none(world, "checkpoint folder: writing", [&] {
    store.begin(0);
    std::ofstream file(probe(world.rank()));
    TESSERA_CHECK(file.good(), ErrorKind::kIo, "cannot write to ", shown(probe(world.rank())),
                  "; see checkpoint.folder");
  });
  on_all_or_none(world, "checkpoint folder: shared", [&] {
    if (world.rank() != 0) return;
    for (int rank = 0; rank < world.size(); ++rank) {
      std::error_code ignored;
      TESSERA_CHECK(fs::exists(probe(rank), ignored), ErrorKind::kIo, shown(store.folder()),
                    ": found no file that rank ", rank,
                    " wrote there, expected a folder that all hosts share; see checkpoint.folder");
    }
    store.discard(0);
  });
}

std::optional<std::int64_t> step_to_load(const CheckpointConfig& config,
                                         const CheckpointStore& store) {
  const auto steps = store.steps();
  const auto newest = [&] { return shown(store.complete(steps.back())); };
  if (config.load_step < 0) return store.latest();
  if (config.load_step == 0) {
    TESSERA_CHECK(steps.empty(), ErrorKind::kConfig, "checkpoint.load_step: found 0 and ", newest(),
                  ", expected a folder without checkpoints to start anew; choose another "
                  "job.dump_folder, or -1 to go on");
    return std::nullopt;
  }
  const bool there = std::binary_search(steps.begin(), steps.end(), config.load_step);
  TESSERA_CHECK(there, ErrorKind::kConfig, "checkpoint.load_step: found ", config.load_step,
                ", expected a step with a checkpoint in ", shown(store.folder()), "; ",
                steps.empty() ? std::string("there is none") : "the newest is " + newest());
  return config.load_step;
}

/// The first key in which two config.json differ, with both values; the dtype that a file names for
/// its own tensors does not count.
void require_same_model(const models::ModelSpec& found, const CheckpointFolder& checkpoint) {
  const auto keys_of = [](models::ModelSpec spec) {
    spec.dtype.reset();
    return nlohmann::json::parse(models::config_json(spec));
  };
  const auto mine = keys_of(found);
  const auto theirs = keys_of(models::parse_spec(checkpoint.config_text()).spec);
  std::set<std::string> names;
  for (const auto* keys : {&mine, &theirs}) {
    for (const auto& [name, value] : keys->items()) names.insert(name);
  }
  const auto text = [](const nlohmann::json& keys, const std::string& name) {
    return keys.contains(name) ? keys[name].dump() : std::string("nothing");
  };
  for (const auto& name : names) {
    TESSERA_CHECK(text(mine, name) == text(theirs, name), ErrorKind::kConfig, "model: found ", name,
                  " ", text(mine, name), ", expected ", text(theirs, name), " of the checkpoint ",
                  shown(checkpoint.path()), "; set it back, or start anew in another folder");
  }
}

void require_same_run(const RunIdentity& identity, const CheckpointFolder& checkpoint,
                      const World& world) {
  const auto& manifest = checkpoint.manifest();
  require_same_model(identity.spec, checkpoint);
  TESSERA_CHECK(identity.seed == manifest.seed, ErrorKind::kConfig, "debug.seed: found ",
                identity.seed, ", expected ", manifest.seed, " of the checkpoint ",
                shown(checkpoint.path()), "; set it back, or start anew in another folder");
  if (world.rank() == 0) {
    require_same_data(identity.data, manifest.data, shown(checkpoint.path()));
  }
}

void require_tensor(const CheckpointFolder& checkpoint, const std::string& name, DType dtype,
                    const std::vector<std::int64_t>& shape) {
  const auto* tensor = checkpoint.find(name);
  TESSERA_CHECK(tensor != nullptr, ErrorKind::kFormat, shown(checkpoint.path()),
                ": found no tensor ", printable(name), ", expected one");
  TESSERA_CHECK(tensor->dtype == dtype && tensor->shape == shape, ErrorKind::kFormat,
                shown(checkpoint.path()), ": tensor ", printable(name), ": found ",
                to_string(tensor->dtype), " ", shape_text(tensor->shape), ", expected ",
                to_string(dtype), " ", shape_text(shape),
                "; a resumed run keeps its precision.storage_dtype");
}

std::string list(const std::set<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

std::set<std::string> names_of(const Optimizer& optimizer) {
  const auto names = optimizer.kept_names();
  return {names.begin(), names.end()};
}

class Loader {
 public:
  Loader(const CheckpointFolder& checkpoint, const ShardedBase& model, Optimizer& optimizer)
      : checkpoint_(checkpoint), model_(model), optimizer_(optimizer) {}

  /// Errors: kFormat, kConfig for tensors that do not fit model and optimizer.
  void check() const {
    std::set<std::string> known;
    for (const auto& view : model_.shards()) {
      const auto name = concat(kModelPrefix, view.contract->name);
      require_tensor(checkpoint_, name, view.contract->storage.dtype, view.contract->shape);
      known.insert(name);
    }
    check_optimizer_kind();
    for (const auto& state : optimizer_.state()) check_state(*state.view.contract);
    for (const auto& [name, tensor] : checkpoint_.tensors()) {
      TESSERA_CHECK(!name.starts_with(kModelPrefix) || known.contains(name), ErrorKind::kFormat,
                    shown(checkpoint_.path()), ": found the tensor ", printable(name),
                    ", expected only those of the model");
    }
  }

  void load() {
    const at::NoGradGuard no_grad;
    for (const auto& view : model_.shards()) {
      read(concat(kModelPrefix, view.contract->name), view, view.shard.detach());
    }
    for (const auto& state : optimizer_.state()) {
      const auto& name = state.view.contract->name;
      if (!has("step", name)) continue;
      std::int64_t steps = 0;
      checkpoint_.read(named("step", name), 0, 1, std::as_writable_bytes(std::span(&steps, 1)));
      optimizer_.set_steps(name, steps);
      if (!keeps_any(name)) continue;
      for (const auto& kept : optimizer_.make_kept(name)) {
        read(named(kept.name, name), state.view, kept.values);
      }
    }
  }

 private:
  static std::string named(const std::string& kept, const std::string& parameter) {
    return concat(kOptimizerPrefix, kept, "/", parameter);
  }

  bool has(const std::string& kept, const std::string& parameter) const {
    return checkpoint_.find(named(kept, parameter)) != nullptr;
  }
  bool keeps_any(const std::string& parameter) const {
    return std::any_of(kept_names_.begin(), kept_names_.end(),
                       [&](const auto& kept) { return has(kept, parameter); });
  }

  void check_optimizer_kind() const {
    std::set<std::string> found;
    for (const auto& [name, tensor] : checkpoint_.tensors()) {
      if (!name.starts_with(kOptimizerPrefix)) continue;
      const auto begin = kOptimizerPrefix.size();
      found.insert(name.substr(begin, name.find('/', begin) - begin));
    }
    found.erase("step");
    TESSERA_CHECK(std::includes(kept_names_.begin(), kept_names_.end(), found.begin(), found.end()),
                  ErrorKind::kConfig, "optimizer.name: found an optimizer that keeps ",
                  list(kept_names_), ", expected one that keeps ", list(found),
                  " as the checkpoint ", shown(checkpoint_.path()),
                  " does; a resumed run keeps its optimizer");
  }

  /// All that the optimizer keeps of a parameter, or nothing: never updated, or frozen until now.
  void check_state(const GradContract& contract) const {
    const auto& name = contract.name;
    const bool kept_any = keeps_any(name);
    if (kept_any || has("step", name))
      require_tensor(checkpoint_, named("step", name), DType::kInt64, {});
    if (!kept_any) return;
    for (const auto& kept : optimizer_.make_kept(name)) {
      require_tensor(checkpoint_, named(kept.name, name), to_dtype(kept.values.scalar_type()),
                     contract.shape);
    }
  }

  void read(const std::string& name, const ShardView& view, const at::Tensor& into) const {
    checkpoint_.read(name, view.begin, view.end,
                     {static_cast<std::byte*>(into.mutable_data_ptr()), into.nbytes()});
  }

  const CheckpointFolder& checkpoint_;
  const ShardedBase& model_;
  Optimizer& optimizer_;
  const std::set<std::string> kept_names_ = names_of(optimizer_);
};

}  // namespace

std::optional<CheckpointFolder> open_resumed(const CheckpointConfig& config,
                                             const RunIdentity& identity, World& world) {
  const CheckpointStore store(config.folder);
  try_folder(store, world);
  std::string chosen;
  on_all_or_none(world, "checkpoint to load", [&] {
    if (world.rank() != 0) return;
    const auto step = step_to_load(config, store);
    if (step) chosen = std::to_string(*step);
  });
  chosen = from_first_rank(world, "checkpoint to load", chosen);
  if (chosen.empty()) return std::nullopt;

  std::optional<CheckpointFolder> checkpoint;
  on_all_or_none(world, "opening the checkpoint", [&] {
    checkpoint = CheckpointFolder::open(store.complete(std::stoll(chosen)));
    require_same_run(identity, *checkpoint, world);
  });
  const auto hash = to_string(checkpoint->manifest_hash());
  const auto first = from_first_rank(world, "hash of the manifest", hash);
  on_all_or_none(world, "the same manifest", [&] {
    TESSERA_CHECK(hash == first, ErrorKind::kIo, shown(checkpoint->path()),
                  ": found a manifest with hash ", hash, ", expected ", first,
                  " as on rank 0; do all hosts share checkpoint.folder?");
  });
  return checkpoint;
}

void load_checkpoint(const CheckpointFolder& checkpoint, const ShardedBase& model,
                     Optimizer& optimizer, World& world) {
  Loader loader(checkpoint, model, optimizer);
  on_all_or_none(world, "verifying the checkpoint", [&] {
    loader.check();
    const auto files = checkpoint.data_files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      if (static_cast<int>(i) % world.size() == world.rank()) checkpoint.verify(files[i]);
    }
  });
  on_all_or_none(world, "reading the checkpoint", [&] { loader.load(); });
  // Whoever restarts this run goes on from here, not from what another attempt reached later.
  if (world.rank() == 0) {
    CheckpointStore(checkpoint.path().parent_path()).set_latest(checkpoint.manifest().step);
    log::info("resumed from ", checkpoint.path().native(), ", written by ",
              checkpoint.manifest().world_size, " rank(s)");
  }
}

}  // namespace tessera::train
