#include "train/resume/resume.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <system_error>

#include "base/environment.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "checkpoint/loader.h"
#include "comm/group.h"
#include "io/atomic_file.h"
#include "io/checkpoint_store.h"
#include "models/adapters.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/data/data_identity.h"
#include "train/report/progress.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxNoteBytes = 1 << 16;

}  // namespace

RestartNote::RestartNote(const fs::path& folder) : path_(folder / ".load_step") {
  const auto count = base::environment_variable("TORCHELASTIC_RESTART_COUNT");
  under_torchrun_ = count.has_value();
  first_attempt_ = count.value_or("0") == "0";
  job_ = base::environment_variable("TORCHELASTIC_RUN_ID").value_or("");
}

std::string RestartNote::text(std::int64_t load_step) const {
  return concat(load_step, "\n", job_, "\n");
}

void RestartNote::forget_other_jobs() const {
  if (!under_torchrun_ || !first_attempt_) return;
  std::error_code error;
  fs::remove(path_, error);
  TESSERA_CHECK(!error, ErrorKind::kIo, "cannot remove ", shown(path_), ": ", error.message());
}

bool RestartNote::has(std::int64_t load_step) const {
  std::error_code ignored;
  return under_torchrun_ && !first_attempt_ && fs::exists(path_, ignored) &&
         read_text_file(path_, kMaxNoteBytes) == text(load_step);
}

void RestartNote::write(std::int64_t load_step) const {
  if (!under_torchrun_ || load_step < 0) return;
  write_atomically(path_, text(load_step));
}

namespace {

namespace fs = std::filesystem;

/// Every rank can write there, and all write to the same folder; found out before the first step,
/// not at the first checkpoint.
void try_folder(const CheckpointStore& store, World& world) {
  comm::on_all_or_none(world, "checkpoint folder", [&] {
    if (world.rank() == 0) store.clean();
  });
  const auto probe = [&](int rank) { return store.temporary(0) / concat("rank_", rank); };
  comm::on_all_or_none(world, "checkpoint folder: writing", [&] {
    store.begin(0);
    const int descriptor = open_new_file(probe(world.rank()));
    TESSERA_CHECK(descriptor >= 0, ErrorKind::kIo, "cannot write to ", shown(probe(world.rank())),
                  "; see checkpoint.folder");
    ::close(descriptor);
  });
  comm::on_all_or_none(world, "checkpoint folder: shared", [&] {
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

/// With the key that goes around a `latest` that is of no use.
std::optional<std::int64_t> latest_of(const CheckpointStore& store) {
  try {
    return store.latest();
  } catch (const Error& error) {
    throw Error(error.kind(), concat(error.what(), "; or set checkpoint.load_step"));
  }
}

std::optional<std::int64_t> step_to_load(const CheckpointConfig& config,
                                         const CheckpointStore& store) {
  const RestartNote note(store.folder());
  note.forget_other_jobs();
  if (note.has(config.load_step)) {
    log::info("started again by torchrun: resumes from `latest`; checkpoint.load_step ",
              config.load_step, " was for an earlier attempt");
    return latest_of(store);
  }
  const auto steps = store.steps();
  const auto newest = [&] { return shown(store.complete(steps.back())); };
  if (config.load_step < 0) return latest_of(store);
  if (config.load_step == 0) {
    TESSERA_CHECK(steps.empty(), ErrorKind::kConfig, "checkpoint.load_step: found 0 and ", newest(),
                  ", expected a folder without checkpoints to start a new run; choose another "
                  "job.dump_folder, or -1 to resume");
    return std::nullopt;
  }
  const bool there = std::binary_search(steps.begin(), steps.end(), config.load_step);
  TESSERA_CHECK(
      there, ErrorKind::kConfig, "checkpoint.load_step: found ", config.load_step,
      ", expected a step with a checkpoint in ", shown(store.folder()), "; ",
      steps.empty()
          ? std::string(
                "there is none; name another run by job.dump_folder, or leave load_step out")
          : "the newest is " + newest());
  return config.load_step;
}

/// The advice for a run whose checkpoint cannot be read: it never resumes from another one
/// silently.
std::string way_on(const CheckpointStore& store, std::int64_t step) {
  const auto older = newest_whole_before(store, step);
  if (!older.step) return older.text + ": choose another job.dump_folder to start a new run";
  return concat(older.text, ": set checkpoint.load_step = ", *older.step, " to resume from there");
}

CheckpointFolder open_step(const CheckpointStore& store, std::int64_t step) {
  const fs::path path = store.complete(step);
  try {
    require_whole(path);
    return CheckpointFolder::open(path);
  } catch (const Error& error) {
    throw Error(error.kind(), error.what() + way_on(store, step));
  }
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
                  shown(checkpoint.path()), kSetBack);
  }
}

/// From the first layer on in which they differ: lists of large models are long.
void require_same_layers(const std::vector<std::string>& found,
                         const std::vector<std::string>& expected, const std::string& checkpoint) {
  if (found == expected) return;
  const auto [mine, theirs] = std::ranges::mismatch(found, expected);
  const auto list = [](auto layer, auto end) {
    return layer == end ? std::string("no further layer")
                        : printable(joined(std::ranges::subrange(layer, end)), 1024);
  };
  throw Error(ErrorKind::kConfig,
              concat("lora.targets: found ", list(mine, found.end()), ", expected ",
                     list(theirs, expected.end()), " of the checkpoint ", checkpoint, ", after ",
                     mine - found.begin(), " layers that both have", kSetBack));
}

/// Compares the adapters and their model. Errors: kConfig naming what differs.
void require_same_lora(const RunIdentity& identity, const CheckpointFolder& checkpoint) {
  const auto& theirs = checkpoint.manifest().lora;
  const auto rank_of = [](const std::optional<CheckpointLora>& lora) {
    return lora ? lora->rank : 0;
  };
  const auto same = [&](const char* key, const auto& found, const auto& expected) {
    TESSERA_CHECK(found == expected, ErrorKind::kConfig, key, ": found ", found, ", expected ",
                  expected, " of the checkpoint ", shown(checkpoint.path()), kSetBack);
  };
  same("lora.rank", rank_of(identity.lora), rank_of(theirs));
  if (!theirs) return;
  same("lora.alpha", identity.lora->alpha, theirs->alpha);
  same("lora.dropout", identity.lora->dropout, theirs->dropout);
  require_same_layers(identity.lora->layers, theirs->layers, shown(checkpoint.path()));
  TESSERA_CHECK(identity.lora->base_xxh3_128 == theirs->base_xxh3_128, ErrorKind::kConfig,
                "model.path: found tensors with the hash ", to_string(identity.lora->base_xxh3_128),
                ", expected ", to_string(theirs->base_xxh3_128),
                " of the model that the adapters of the checkpoint ", shown(checkpoint.path()),
                " were trained with", kSetBack);
}

}  // namespace

std::optional<Config> config_before(const Config& config) {
  if (!config.job.dump_folder) return std::nullopt;
  try {
    auto before = load_config((fs::path(*config.job.dump_folder) / "config.toml").string());
    if (before.training.steps && before.optimizer.lr) return before;
  } catch (const Error&) {
    // Nothing depends on it but what is said.
  }
  return std::nullopt;
}

void require_no_checkpoints(const CheckpointConfig& config, World& world) {
  comm::on_all_or_none(world, "checkpoint folder", [&] {
    if (world.rank() != 0) return;
    const CheckpointStore store(config.folder);
    const auto steps = store.steps();
    TESSERA_CHECK(
        steps.empty(), ErrorKind::kConfig, "checkpoint.enable: found false and ",
        shown(store.complete(steps.back())),
        ", expected a checkpoint.folder without checkpoints to start a new run; choose another "
        "job.dump_folder or checkpoint.folder, or set checkpoint.enable = true to resume");
  });
}

std::optional<CheckpointFolder> open_resumed(const CheckpointConfig& config, World& world) {
  const CheckpointStore store(config.folder);
  try_folder(store, world);
  std::string chosen;
  comm::on_all_or_none(world, "checkpoint to load", [&] {
    if (world.rank() != 0) return;
    const auto step = step_to_load(config, store);
    if (step) chosen = std::to_string(*step);
  });
  chosen = comm::from_first_rank(world, "checkpoint to load", chosen);
  if (chosen.empty()) return std::nullopt;

  return checkpointing::open_on_all_ranks(world,
                                          [&] { return open_step(store, std::stoll(chosen)); });
}

void require_same_run(const RunIdentity& identity, const CheckpointFolder& checkpoint,
                      World& world) {
  comm::on_all_or_none(world, "the same run", [&] {
    const auto& manifest = checkpoint.manifest();
    require_same_model(identity.spec, checkpoint);
    require_same_lora(identity, checkpoint);
    TESSERA_CHECK(identity.seed == manifest.seed, ErrorKind::kConfig, "debug.seed: found ",
                  identity.seed, ", expected ", manifest.seed, " of the checkpoint ",
                  shown(checkpoint.path()), kSetBack);
    if (world.rank() == 0) {
      if (identity.data.xxh3_128 != manifest.data.xxh3_128) {
        const auto changed =
            key_that_changed(identity.data_section, identity.data_section_before, manifest.data);
        TESSERA_CHECK(!changed, ErrorKind::kConfig, changed.value_or(""), " of the checkpoint ",
                      shown(checkpoint.path()), kSetBack);
      }
      require_same_data(identity.data, manifest.data, shown(checkpoint.path()),
                        identity.data_section.source.empty() ? "data.path" : kSourceKey);
    }
  });
}

namespace {

constexpr checkpointing::LoadAdvice kAdvice{
    .optimizer = "optimizer.name",
    .keeps_storage = "a resumed run keeps its precision.storage_dtype",
    .keeps_frozen =
        "a resumed run keeps its precision.storage_dtype, its model.frozen and frozen of its "
        "rules, "
        "and with \"replicate\" its precision.param_dtype: what is whole on every rank is stored "
        "as "
        "it computes",
    .keeps_master =
        "a resumed run keeps its precision.storage_dtype and its optimizer.master, which say what "
        "the optimizer keeps in which dtype",
    .keeps_shape = "a resumed run keeps its model, whose tensors have these shapes",
    .keeps_optimizer = "a resumed run keeps its optimizer",
    .weights_alone =
        "start a new run from these weights: model.path = this folder, in another job.dump_folder"};

}  // namespace

void load_checkpoint(const CheckpointFolder& checkpoint, const ShardedBase& model,
                     Optimizer& optimizer, World& world, const FileForms& forms) {
  std::optional<LoadingProgress> progress;
  checkpointing::LoadRequest request{.advice = kAdvice, .forms = forms};
  // Adapters alone, whose model was loaded from its own folder.
  if (checkpoint.manifest().lora) request.holds = models::is_adapter;
  request.on_read = [&](std::int64_t bytes, std::int64_t total) {
    // The other ranks are about as far.
    const bool shown = model.rank() == 0;
    if (!progress) {
      progress.emplace("loading the checkpoint", total,
                       shown ? LoadingProgress::Shown::kYes : LoadingProgress::Shown::kNo);
    }
    progress->add(bytes);
  };
  checkpointing::load(checkpoint, model, optimizer, world, request);
  // A restart of this run resumes from here, not from what another attempt reached later.
  if (world.rank() != 0) return;
  CheckpointStore(checkpoint.path().parent_path()).set_latest(checkpoint.manifest().step);
}

}  // namespace tessera::train
