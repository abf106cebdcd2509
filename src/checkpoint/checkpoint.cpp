// The library's checkpoints: the saver and the loader, for programs without a configuration.
#include "tessera/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "base/log.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "checkpoint/loader.h"
#include "checkpoint/saver.h"
#include "comm/group.h"
#include "fsdp/handle.h"
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

/// An option as it is compared over ranks: a name, and its value on one line.
struct Option {
  std::string name;
  std::string value;
};

/// In double quotes, a line's end as \n: different texts stay different, for any bytes.
std::string on_one_line(std::string_view text) {
  std::string line = "\"";
  for (const char byte : text) {
    if (byte == '\n') {
      line += "\\n";
    } else {
      if (byte == '\\' || byte == '"') line += '\\';
      line += byte;
    }
  }
  return line + '"';
}
std::string on_one_line(std::int64_t number) { return concat(number); }

/// Returns everything but tensors.
std::vector<Option> options_of(const std::string& folder, std::int64_t step,
                               const SaveOptions& options) {
  std::vector<Option> all{{"folder", on_one_line(folder)},
                          {"step", concat(step)},
                          {"SaveOptions::keep_latest_k", concat(options.keep_latest_k)}};
  for (const auto& [name, value] : options.user) {
    const auto text = std::visit([](const auto& one) { return on_one_line(one); }, value);
    all.push_back({concat("SaveOptions::user ", on_one_line(name)), text});
  }
  if (options.scaler != nullptr) {
    const auto& state = options.scaler->state();  // a scale is a power of two: few digits name it
    all.push_back({"SaveOptions::scaler", concat(state.scale, ", ", state.good_steps, " finite, ",
                                                 state.skipped_steps, " skipped")});
  }
  all.push_back({"SaveOptions::config_json", on_one_line(options.config_json)});
  return all;
}

std::vector<Option> options_in(const std::string& lines) {
  std::vector<Option> all;
  std::istringstream in(lines);
  Option one;
  while (std::getline(in, one.name) && std::getline(in, one.value)) all.push_back(one);
  return all;
}

/// Returns what a person has to see of a text that differs from another one from `at` on.
std::string around(std::string_view text, std::size_t at) {
  constexpr std::size_t kBefore = 40;
  constexpr std::size_t kMost = 120;
  const std::size_t begin = at > kBefore ? character_begin(text, at - kBefore) : 0;
  return concat(begin > 0 ? "..." : "", printable(text.substr(begin), kMost));
}

/// Describes the first option that differs.
std::string difference_of(const comm::Difference& found) {
  const auto first = options_in(found.of_first), other = options_in(found.of_rank);
  const auto [a, b] = std::ranges::mismatch(first, other, [](const Option& one, const Option& two) {
    return one.name == two.name && one.value == two.value;
  });
  // All lists end with config_json, so both sides still have a name.
  if (a->name != b->name) {
    const bool lacks = std::ranges::find(other, a->name, &Option::name) == other.end();
    return concat("found ", lacks ? a->name : b->name, " on rank ", lacks ? 0 : found.rank,
                  " and not on rank ", lacks ? found.rank : 0);
  }
  const auto at = std::ranges::mismatch(a->value, b->value).in1 - a->value.begin();
  const auto position = static_cast<std::size_t>(at);
  return concat("found ", a->name, " ", around(a->value, position), " on rank 0 and ",
                around(b->value, position), " on rank ", found.rank);
}

/// Requires that everything but tensors is the same on every rank: rank 0 writes it, and reads the
/// folder to which the others write.
void require_same_everywhere(World& world, const std::string& folder, std::int64_t step,
                             const SaveOptions& options) {
  std::string lines;
  for (const auto& [name, value] : options_of(folder, step, options)) {
    lines += name + "\n" + value + "\n";
  }
  const auto found = comm::first_that_differs(world.control(), lines, "save_checkpoint");
  TESSERA_CHECK(!found, ErrorKind::kUsage, "save_checkpoint: ", difference_of(*found),
                ", expected the same folder, step and options on every rank");
}

/// `updated`: an optimizer has made an update on some rank; a stage of a pipeline may have had
/// none.
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

/// Returns rank 0's find_checkpoint(); empty where there is none.
std::string found_by_first(const World& world, const std::string& folder) {
  if (world.rank() != 0) return "";
  return find_checkpoint(folder).value_or(fs::path()).native();
}

void restore_scale(const CheckpointManifest& manifest, GradScaler* scaler, int rank) {
  const auto& state = manifest.loss_scale;
  if (state && scaler != nullptr) {
    scaler->restore(*state);
  } else if ((state || scaler != nullptr) && rank == 0) {
    log::warn("load_checkpoint: found ", state ? "a loss scale" : "no loss scale",
              " in the checkpoint of step ", manifest.step, " and ",
              state ? "no scaler to continue with it" : "a scaler, which stays at its own scale");
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
  comm::on_all_or_none(world, "checkpoint to load", [&] { found = found_by_first(world, folder); });
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
    chosen = found_by_first(world, folder);
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
    const auto& scale = opened.manifest().loss_scale;
    if (scaler != nullptr && scale) scaler->require_restorable(*scale);
    return opened;
  });
  const auto& manifest = found.manifest();
  checkpointing::load(found, model, optimizer, world, {.advice = kAdvice});
  restore_scale(manifest, scaler, world.rank());
  return {found.path().native(), manifest.step, manifest.world_size, manifest.user};
}

}  // namespace tessera
