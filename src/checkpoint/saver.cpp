#include "checkpoint/saver.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/interrupt.h"
#include "base/log.h"
#include "base/test_hooks.h"
#include "base/text/printable.h"
#include "checkpoint/snapshot.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "fsdp/handle.h"
#include "io/checkpoint_folder.h"
#include "io/hashed_file.h"
#include "tessera/error.h"

namespace tessera::checkpointing {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

// How long a rank waits for its writer before it tells the others that it still does: far less than
// the timeout of a collective.
constexpr milliseconds kPatience{500};

constexpr char kDone = '+';
constexpr char kFailed = '-';

/// The file with the entries of a rank's pieces; removed before the folder has its name.
std::string part_file(int rank) { return concat("rank_", rank, ".part"); }

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

double ms_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

/// Adds all that the optimizer may come to keep of each tensor of the model, and the number of its
/// updates: before the first step it keeps nothing. Frozen parameters may be trained later.
CheckpointManifest with_states(CheckpointManifest part, const Optimizer& optimizer) {
  auto kept = optimizer.kept_names();
  kept.emplace_back("step");
  CheckpointTensorMap states;
  for (const auto& [name, tensor] : part.tensors) {
    if (!name.starts_with(kModelPrefix)) continue;
    for (const auto& state : kept) {
      const auto other = concat(kOptimizerPrefix, state, "/", name.substr(kModelPrefix.size()));
      auto& copy = states.emplace(other, tensor).first->second;
      std::size_t number = 0;
      for (auto& piece : copy.pieces) piece.key = piece_key(other, ++number);
    }
  }
  part.tensors.merge(states);
  return part;
}

std::string text_of(const CheckpointPlan& plan) {
  return concat(plan.tensors, " ", plan.pieces, " ", plan.head);
}

CheckpointPlan parse_plan(const std::string& text) {
  CheckpointPlan plan;
  std::istringstream(text) >> plan.tensors >> plan.pieces >> plan.head;
  return plan;
}

std::string one_decimal(double value) {
  std::string text = std::to_string(value);
  return text.substr(0, text.find('.') + 2);
}

std::string time_text(double ms) {
  return ms < 1000.0 ? concat(std::lround(ms), " ms") : one_decimal(ms / 1000.0) + " s";
}

}  // namespace

CheckpointSaver::CheckpointSaver(World& world, CheckpointOptions options)
    : world_(world), options_(std::move(options)), store_(options_.folder) {}

CheckpointSaver::~CheckpointSaver() = default;

void CheckpointSaver::start(std::function<std::string()> work) {
  work_ = std::async(std::launch::async, [work = std::move(work)] {
    try {
      return kDone + work();
    } catch (const std::exception& error) {
      return kFailed + one_line(error.what());
    }
  });
}

void CheckpointSaver::ask_stages(const ShardedBase& model) {
  if (std::exchange(asked_stages_, true)) return;
  options_.state.of_earlier_stages = names_of_stages(model, options_.state.holds).of_earlier;
}

void CheckpointSaver::check_plan(const ShardedBase& model, const Optimizer& optimizer) {
  ask_stages(model);
  const auto plan_as = [&](const StateOptions& options) {
    const auto parts = state_parts(model, optimizer, options);
    return plan_of(with_states(entries_of(parts, rank_file(world_.rank())), optimizer));
  };
  CheckpointPlan mine;
  comm::on_all_or_none(world_, "plan of a rank's part", [&] {
    // The part of a shard that a replica writes changes with the states to come: it is the whole at
    // most.
    auto undivided = options_.state;
    undivided.replica = 0;
    undivided.replicas = 1;
    mine = plan_as(undivided);
    mine.tensors = plan_as(options_.state).tensors;
  });
  const auto all =
      comm::all_gather_bytes(world_.control(), text_of(mine), "checkpoint: size of the manifest");
  std::vector<CheckpointPlan> plans;
  std::ranges::transform(all, std::back_inserter(plans), parse_plan);
  comm::on_all_or_none(world_, "size of the manifest",
                       [&] { check_manifest_plan(options_.about, world_.size(), sum_of(plans)); });
}

void CheckpointSaver::save(std::int64_t step, const ShardedBase& model, const Optimizer& optimizer,
                           const GradScaler* scaler, std::optional<std::int64_t> left_out) {
  const auto asked = Clock::now();
  finish();
  ask_stages(model);
  begun_ = Clock::now();
  // Memory may be short on a single rank.
  comm::on_all_or_none(world_, "copy of a rank's part", [&] {
    snapshot_.take(state_parts(model, optimizer, options_.state), rank_file(world_.rank()));
  });
  fsdp::are_read(model, snapshot_.end());
  step_ = step;
  optimizer_ = optimizer.name();
  loss_scale_.reset();
  if (scaler != nullptr) loss_scale_ = scaler->state();
  left_out_ = left_out;
  phase_ = Phase::kFiles;
  held_up_ms_ = ms_since(asked);
  start([this, copied = snapshot_.end()] {
    world_.attach_thread();
    comm::wait_on_host(copied, "copy of a checkpoint");
    return write_files();
  });
}

std::string CheckpointSaver::write_files() const {
  if (const auto hook = test_hooks::before_checkpoint_write.get()) (*hook)(world_.rank(), step_);
  store_.begin(step_);
  auto entries = snapshot_.entries();
  const auto folder = store_.temporary(step_);
  entries.files[snapshot_.name()] = {
      snapshot_.size(), write_hashed_parts(folder / snapshot_.name(), snapshot_.bytes())};
  if (world_.rank() == 0) {
    const auto config = bytes_of(options_.config_json);
    entries.files["config.json"] = {std::ssize(config),
                                    write_hashed_file(folder / "config.json", config)};
  }
  // Sent through the folder: the texts of all ranks are too large to send to every rank.
  const auto text = part_text(entries);
  return to_string(write_hashed_file(folder / part_file(world_.rank()), bytes_of(text)));
}

bool CheckpointSaver::writing() const {
  return work_.valid() && work_.wait_for(milliseconds(0)) != std::future_status::ready;
}

void CheckpointSaver::advance(bool anyone_writes) {
  if (phase_ != Phase::kIdle && !anyone_writes) meet();
}

void CheckpointSaver::finish() {
  while (phase_ != Phase::kIdle) {
    if (work_.valid()) work_.wait_for(kPatience);
    const auto all = comm::all_gather_bytes(world_.control(), writing() ? "writes" : "",
                                            "checkpoint: who still writes");
    advance(std::any_of(all.begin(), all.end(), [](const auto& one) { return !one.empty(); }));
  }
}

void CheckpointSaver::meet() {
  if (phase_ == Phase::kFiles) snapshot_.release();
  const std::string mine = work_.valid() ? work_.get() : std::string(1, kDone);
  auto all = comm::all_gather_bytes(world_.control(), mine, "checkpoint: what was written");
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() != kFailed) continue;
    phase_ = Phase::kIdle;
    const base::NoInterrupts until_cleaned_up;
    // No rank leaves before the folder is removed: the first rank that leaves ends the others.
    if (world_.rank() == 0) store_.discard(step_);
    comm::barrier(world_.control(), "checkpoint: cleaned up");
    throw Error(ErrorKind::kIo,
                concat("checkpoint of step ", step_, ": rank ", rank, ": ", all[rank].substr(1),
                       "; earlier checkpoints are as they were"));
  }
  if (phase_ == Phase::kManifest) {
    phase_ = Phase::kIdle;
    if (world_.rank() == 0) {
      const double mib = std::stod(all[0].substr(1)) / (1 << 20);
      log::info("checkpoint of step ", step_, ": written, ", one_decimal(mib), " MiB in ",
                time_text(ms_since(begun_)), "; training waited ", time_text(held_up_ms_));
    }
    return;
  }
  phase_ = Phase::kManifest;
  if (world_.rank() != 0) return;
  start([this, parts = std::move(all)] { return std::to_string(complete(parts)); });
}

std::int64_t CheckpointSaver::complete(const std::vector<std::string>& parts) const {
  CheckpointManifest manifest = options_.about;
  manifest.step = step_;
  manifest.optimizer = optimizer_;
  manifest.loss_scale = loss_scale_;
  manifest.left_out_steps = left_out_;
  manifest.world_size = world_.size();
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    const fs::path path = store_.temporary(step_) / part_file(static_cast<int>(rank));
    const std::string text = read_text_file(path, kMaxManifestBytes);
    const std::string found = to_string(Hash128Stream().add(text).digest());
    const auto expected = std::string_view(parts[rank]).substr(1);
    TESSERA_CHECK(found == expected, ErrorKind::kIo, shown(path), ": found XXH3-128 ", found,
                  ", expected ", expected,
                  " that its rank wrote; do all hosts share the folder of checkpoints?");
    merge(manifest, parse_manifest_part(text, shown(path)));
  }
  require_files(manifest);
  std::int64_t bytes = 0;
  for (const auto& [name, file] : manifest.files) bytes += file.bytes;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    fs::remove(store_.temporary(step_) / part_file(static_cast<int>(rank)));
  }
  write_manifest(store_.temporary(step_), std::move(manifest));
  store_.finish(step_);
  store_.set_latest(step_);
  try {
    store_.keep(options_.keep_latest_k, step_);
  } catch (const std::exception& error) {
    // Nothing is lost by it.
    log::warn("checkpoint of step ", step_, " is complete, but an older one stays: ", error.what());
  }
  return bytes;
}

void CheckpointSaver::require_files(const CheckpointManifest& manifest) const {
  for (const auto& [name, file] : manifest.files) {
    const fs::path path = store_.temporary(step_) / name;
    std::error_code error;
    const auto size = fs::file_size(path, error);
    TESSERA_CHECK(!error && size == static_cast<std::uintmax_t>(file.bytes), ErrorKind::kIo,
                  shown(path), ": found ", error ? error.message() : concat(size, " bytes"),
                  ", expected the ", file.bytes,
                  " bytes that its rank wrote; do all hosts share the folder of checkpoints?");
  }
}

}  // namespace tessera::checkpointing
