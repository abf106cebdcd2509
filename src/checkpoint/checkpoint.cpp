// The library's checkpoints: the saver and the loader, for who has no configuration.
#include "tessera/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <variant>

#include "base/json_reader.h"
#include "base/log.h"
#include "base/printable.h"
#include "checkpoint/loader.h"
#include "checkpoint/saver.h"
#include "comm/group.h"
#include "fsdp/optim/optimizer_shards.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
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

std::string in_words(const CheckpointValues& values) {
  std::string words;
  for (const auto& [name, value] : values) {
    const auto text = std::visit([](const auto& one) { return concat(one); }, value);
    words += concat(words.empty() ? "" : ", ", "\"", name, "\": ", text);
  }
  return words;
}

std::string in_words(const GradScaler* scaler) {
  if (scaler == nullptr) return "none";
  const LossScaleState state = scaler->state();
  return concat("scale ", state.scale, " after ", state.good_steps, " finite steps in a row, ",
                state.skipped_steps, " left out");
}

/// Everything but tensors has to be the same on every rank: rank 0 writes it, and reads the folder
/// that the others write to.
void require_same_everywhere(World& world, const std::string& folder, std::int64_t step,
                             const SaveOptions& options) {
  const auto compare = [&](std::string_view what, const std::string& mine) {
    const auto found = comm::first_that_differs(world.control(), mine, "save_checkpoint");
    TESSERA_CHECK(!found, ErrorKind::kUsage, "save_checkpoint: found the ", what, " ",
                  printable(found->of_first, 512), " on rank 0 and ",
                  printable(found->of_rank, 512), " on rank ", found->rank,
                  ", expected the same on every rank");
  };
  compare("folder", folder);
  compare("step", concat(step));
  compare("SaveOptions::user", in_words(options.user));
  compare("SaveOptions::scaler", in_words(options.scaler));
  compare("SaveOptions::keep_latest_k", concat(options.keep_latest_k));
  compare("SaveOptions::config_json", options.config_json);
}

/// `updated`: an optimizer has made an update on any rank; a stage of a pipeline may have had none.
void check_save(const Optimizer& optimizer, std::int64_t step, const SaveOptions& options,
                bool updated) {
  check_user_values(options.user);
  const auto length = std::ssize(options.config_json);
  TESSERA_CHECK(length <= kMaxConfigBytes, ErrorKind::kUsage, "save_checkpoint: found a ",
                "SaveOptions::config_json of ", length, " bytes, expected at most ",
                kMaxConfigBytes, ", which is what is read again");
  static_cast<void>(parse_json_object(options.config_json, "SaveOptions::config_json"));
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
  TESSERA_CHECK(updated || states.empty() || step <= left_out, ErrorKind::kUsage,
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
  auto& runtime = fsdp::unit_of_handle(model.unit()).runtime();
  const Mesh& mesh = model.mesh();
  World& world = *mesh.world();
  comm::on_all_or_none(world, "save_checkpoint", [&] {
    runtime.require_idle("save_checkpoint");
    fsdp::require_steps_of(model, optimizer, "save_checkpoint");
  });
  const bool updated = comm::any_of_ranks(
      world.control(),
      {std::ranges::any_of(optimizer.state(), [](const auto& state) { return state.steps > 0; })},
      "save_checkpoint: updates")[0];
  comm::on_all_or_none(world, "save_checkpoint",
                       [&] { check_save(optimizer, step, options, updated); });
  require_same_everywhere(world, folder, step, options);
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
  auto& runtime = fsdp::unit_of_handle(model.unit()).runtime();
  runtime.renew_after_failure();
  World& world = *model.mesh().world();
  std::string chosen;
  comm::on_all_or_none(world, "checkpoint to load", [&] {
    runtime.require_idle("load_checkpoint");
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
