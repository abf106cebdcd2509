// The library's checkpoints: the saver and the loader, for who has no configuration.
#include "tessera/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/hash.h"
#include "base/log.h"
#include "base/printable.h"
#include "checkpoint/loader.h"
#include "checkpoint/saver.h"
#include "comm/group.h"
#include "fsdp/optim/optimizer_shards.h"
#include "io/checkpoint_folder.h"
#include "io/checkpoint_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr checkpointing::LoadAdvice kAdvice{
    .optimizer = "load_checkpoint",
    .keeps_storage = "shard with the PrecisionPolicy::storage_dtype that it was saved with",
    .keeps_frozen =
        "shard with the storage_dtype that it was saved with, and with what was frozen then; what "
        "is whole on every rank (FrozenAs::kReplicate) is stored as it computes",
    .keeps_master =
        "shard with the storage_dtype and PrecisionPolicy::optimizer that it was saved with, which "
        "say what an optimizer keeps in which dtype",
    .keeps_shape = "load it into the module that was saved",
    .keeps_optimizer = "make the optimizer that was saved",
    .weights_alone = "take the parameters alone, by state_dict.h"};

/// Everything but tensors has to be the same on every rank.
void require_same_everywhere(World& world, std::int64_t step, const SaveOptions& options) {
  CheckpointManifest about;
  about.step = step;
  about.user = options.user;
  if (options.scaler != nullptr) about.loss_scale = options.scaler->state();
  const auto text =
      concat(to_json(about), "\nkeep_latest_k ", options.keep_latest_k, "\n", options.config_json);
  const auto found = comm::first_that_differs(world.control(), text, "save_checkpoint");
  TESSERA_CHECK(!found, ErrorKind::kUsage, "save_checkpoint: found on rank 0 ",
                printable(found->of_first, 1024), " and on rank ", found->rank, " ",
                printable(found->of_rank, 1024),
                ", expected the same step and options on every rank");
}

void check_save(const Optimizer& optimizer, std::int64_t step, const SaveOptions& options) {
  check_user_values(options.user);
  const auto length = std::ssize(options.config_json);
  TESSERA_CHECK(length <= kMaxConfigBytes, ErrorKind::kUsage, "save_checkpoint: found a ",
                "SaveOptions::config_json of ", length, " bytes, expected at most ",
                kMaxConfigBytes, ", which is what is read again");
  TESSERA_CHECK(options.keep_latest_k >= 0, ErrorKind::kUsage,
                "save_checkpoint: found SaveOptions::keep_latest_k ", options.keep_latest_k,
                ", expected 0 (all stay) or more");
  const auto states = optimizer.state();
  const auto most = std::ranges::max_element(states, {}, &OptimizerState::steps);
  const auto updates = most == states.end() ? 0 : most->steps;
  TESSERA_CHECK(step >= updates && step < kMaxStep, ErrorKind::kUsage,
                "save_checkpoint: found step ", step, ", expected the number of steps done, from ",
                updates, " on, since ", optimizer.name(), " has made so many updates",
                updates > 0 ? concat(" of ", most->view.contract->name) : "",
                "; other counts belong into SaveOptions::user");
  const auto left_out = options.scaler == nullptr ? 0 : options.scaler->state().skipped_steps;
  TESSERA_CHECK(updates > 0 || states.empty() || step <= left_out, ErrorKind::kUsage,
                "save_checkpoint: found step ", step,
                " and an optimizer without any update, "
                "expected the one that made the steps, or step 0");
}

/// Where load_checkpoint() finds it; empty where there is none.
fs::path path_in(const fs::path& folder) {
  std::error_code ignored;
  if (fs::exists(folder / kManifestFile, ignored)) return folder;
  const CheckpointStore store(folder);
  const auto latest = store.latest();
  return latest ? store.complete(*latest) : fs::path();
}

void restore_scale(const CheckpointManifest& manifest, GradScaler* scaler, int rank) {
  const auto& state = manifest.loss_scale;
  if (state && scaler != nullptr) {
    scaler->restore(*state);
  } else if ((state || scaler != nullptr) && rank == 0) {
    log::warn("load_checkpoint: found ", state ? "a loss scale" : "no loss scale",
              " in the checkpoint of step ", manifest.step, " and ",
              state ? "no scaler to go on at it" : "a scaler, which stays at its own scale");
  }
}

}  // namespace

void save_checkpoint(const ShardedBase& model, const Optimizer& optimizer,
                     const std::string& folder, std::int64_t step, const SaveOptions& options) {
  const Mesh& mesh = model.mesh();
  World& world = *mesh.world();
  comm::on_all_or_none(world, "save_checkpoint", [&] {
    fsdp::require_idle(model, "save_checkpoint");
    fsdp::require_steps_of(model, optimizer, "save_checkpoint");
    check_save(optimizer, step, options);
  });
  require_same_everywhere(world, step, options);
  comm::on_all_or_none(world, "checkpoint folder", [&] {
    if (world.rank() == 0) CheckpointStore(folder).clean();
  });
  checkpointing::CheckpointOptions saving;
  saving.folder = folder;
  saving.keep_latest_k = options.keep_latest_k;
  saving.about.user = options.user;
  saving.config_json = options.config_json;
  saving.state.replica = mesh.coordinate(axis::kReplicate);
  saving.state.replicas = mesh.size_of(axis::kReplicate);
  checkpointing::CheckpointSaver saver(world, std::move(saving));
  saver.save(step, model, optimizer, options.scaler);
  saver.finish();
}

bool has_checkpoint(World& world, const std::string& folder) {
  std::string found;
  comm::on_all_or_none(world, "checkpoint to load", [&] {
    if (world.rank() == 0) found = path_in(folder).native();
  });
  return !comm::from_first_rank(world, "checkpoint to load", found).empty();
}

LoadedCheckpoint load_checkpoint(ShardedBase& model, Optimizer& optimizer,
                                 const std::string& folder, GradScaler* scaler) {
  fsdp::renew_after_failure(model);
  World& world = *model.mesh().world();
  std::string chosen;
  comm::on_all_or_none(world, "checkpoint to load", [&] {
    fsdp::require_idle(model, "load_checkpoint");
    fsdp::require_steps_of(model, optimizer, "load_checkpoint");
    if (world.rank() == 0) chosen = path_in(folder).native();
    TESSERA_CHECK(world.rank() != 0 || !chosen.empty(), ErrorKind::kIo, shown(folder),
                  ": found no checkpoint, expected a folder with ", kLatestFile,
                  " or step-N; has_checkpoint() asks");
  });
  chosen = comm::from_first_rank(world, "checkpoint to load", chosen);
  const auto found = checkpointing::open_on_all_ranks(world, [&] {
    auto opened = CheckpointFolder::open(chosen);
    TESSERA_CHECK(!opened.manifest().lora, ErrorKind::kConfig, shown(opened.path()),
                  ": found adapters alone, expected a checkpoint of the whole module; `tessera "
                  "convert --merged` makes a model of them");
    return opened;
  });
  checkpointing::load(found, model, optimizer, world, {.advice = kAdvice});
  const auto& manifest = found.manifest();
  restore_scale(manifest, scaler, world.rank());
  return {found.path().native(), manifest.step, manifest.world_size, manifest.user};
}

}  // namespace tessera
