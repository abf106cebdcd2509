#include "train/resume/checkpoint_session.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "base/log.h"
#include "base/text/printable.h"
#include "comm/group.h"
#include "models/adapters.h"
#include "tessera/error.h"
#include "train/data/data_files.h"
#include "train/data/data_identity.h"
#include "train/hf/model_source.h"
#include "train/resume/resume.h"

namespace tessera::train {
namespace {

std::optional<DataConfig> data_section_before(const Config& config) {
  try {
    if (const auto before = config_before(config)) return with_files(*before).data;
  } catch (const Error&) {
    // Nothing depends on it but what is said.
  }
  return std::nullopt;
}

RunIdentity identity_of(const Config& config, const ModelSource& source, const BatchSource& data,
                        World& world) {
  RunIdentity identity;
  identity.spec = source.spec;
  identity.seed = config.debug.seed;
  if (source.lora) identity.lora = {source.lora, tensors_hash(*source.folder, world)};
  // Readers of the checkpoint have to know what its tokens are.
  if (data_kind(config.data) == DataKind::kText) {
    identity.spec.tessera_tokenizer = "bytes";
  }
  if (world.rank() == 0) {
    world.work_at("hashing the data");
    identity.data = data_identity(config.data, data.row_tokens(), data.rows_in_step());
    identity.data_section = config.data;
    identity.data_section_before = data_section_before(config);
    world.work_at("");
  }
  return identity;
}

/// Logs the fused weights that the rules step differently from the checkpoint, which this run
/// follows.
void note_kept(const std::vector<std::string>& asked, const std::vector<std::string>& kept) {
  const auto note = [](const auto& from, const auto& others, std::string_view way) {
    std::vector<std::string> names;
    std::ranges::copy_if(from, std::back_inserter(names), [&](const std::string& name) {
      return std::ranges::count(others, name) == 0;
    });
    if (names.empty()) return;
    log::info("optimizer: Muon continues as in the checkpoint with ", names.size(),
              " fused weights, ", printable(names.front()),
              names.size() > 1 ? " and others, " : ", ", way,
              "; split_fused of [[optimizer.rule]] counts in a new run");
  };
  note(kept, asked, "each as one matrix");
  note(asked, kept, "the matrices of each by themselves");
}

checkpointing::SourceDType dtypes_of(const ModelSource& source) {
  return [&source](const std::string& tensor) -> std::optional<DType> {
    const auto* info = source.folder ? source.folder->find(tensor) : nullptr;
    return info == nullptr ? std::nullopt : std::optional(info->original);
  };
}

}  // namespace

CheckpointSession::CheckpointSession(const Config& config, const Mesh& mesh)
    : config_(config), mesh_(mesh), world_(*mesh.world()) {
  if (config.checkpoint.enable) {
    resumed_ = open_resumed(config.checkpoint, world_);
  } else {
    require_no_checkpoints(config.checkpoint, world_);
  }
}

std::int64_t CheckpointSession::global_batch_size(int data_ranks) const {
  if (!resumed_) return config_.training.global_batch_size;
  const auto rows = resumed_global_batch_size(config_, data_ranks, resumed_->manifest().data,
                                              shown(resumed_->path()));
  if (rows != config_.training.global_batch_size) {
    log::info("training.global_batch_size: ", rows, ", as that of the checkpoint");
  }
  return rows;
}

void CheckpointSession::begin(const ModelSource& source, const BatchSource& data) {
  if (!config_.checkpoint.enable) return;
  forms_ = file_forms(source.description.parameters);
  const auto identity = identity_of(config_, source, data, world_);
  if (resumed_) require_same_run(identity, *resumed_, world_);

  const bool steps_matrices = config_.optimizer.name == fsdp::OptimizerName::kMuon;
  checkpointing::CheckpointOptions options;
  if (steps_matrices && !fused_weights(source.description.parameters).empty()) {
    options.about.fused_as_one = fused_as_one(source);
    note_kept(train::fused_as_one(source.description.parameters, config_.optimizer.rule),
              *options.about.fused_as_one);
  }
  options.folder = config_.checkpoint.folder;
  options.keep_latest_k = config_.checkpoint.keep_latest_k;
  options.about.config_hash = Hash128Stream().add(to_toml(config_)).digest();
  options.about.model_path = config_.model.path;
  options.about.seed = identity.seed;
  options.about.data = identity.data;
  options.about.lora = identity.lora;
  options.state.forms = forms_;
  if (source.lora) options.state.holds = models::is_adapter;
  options.config_json = models::config_json(identity.spec);
  options.state.source_dtype = dtypes_of(source);
  options.state.replica = mesh_.coordinate(axis::kReplicate);
  options.state.replicas = mesh_.size_of(axis::kReplicate);
  saver_.emplace(world_, std::move(options));
}

std::vector<std::string> CheckpointSession::fused_as_one(const ModelSource& source) const {
  const auto& table = source.description.parameters;
  if (!resumed_) return train::fused_as_one(table, config_.optimizer.rule);
  return resumed_->manifest().fused_as_one.value_or(fused_in_files(table));
}

StepsDone CheckpointSession::load(const ShardedBase& model, Optimizer& optimizer,
                                  GradScaler* scaler) {
  if (!saver_) return {};
  saver_->check_plan(model, optimizer);
  if (resumed_) {
    const auto& scale = resumed_->manifest().loss_scale;
    if (scale && scaler != nullptr) scaler->require_restorable(*scale);
    load_checkpoint(*resumed_, model, optimizer, world_, forms_);
    restore_scaler(resumed_->manifest(), scaler);
  }
  // Only now does `latest` stand for what was chosen.
  comm::on_all_or_none(world_, "note for restarts", [&] {
    if (world_.rank() == 0)
      RestartNote(config_.checkpoint.folder).write(config_.checkpoint.load_step);
  });
  if (!resumed_) return {};
  return {resumed_->manifest().step, resumed_->manifest().left_out()};
}

void CheckpointSession::after_step(const StepsDone& done, bool last, bool anyone_writes,
                                   const ShardedBase& model, const Optimizer& optimizer,
                                   const GradScaler* scaler) {
  if (!saver_) return;
  saver_->advance(anyone_writes);
  if (!last && done.step % config_.checkpoint.interval != 0) return;
  saver_->save(done.step, model, optimizer, scaler, done.left_out);
}

void CheckpointSession::finish() {
  if (saver_) saver_->finish();
}

void restore_scaler(const CheckpointManifest& manifest, GradScaler* scaler) {
  const auto& state = manifest.loss_scale;
  if (scaler != nullptr && state) {
    scaler->restore(*state);
  } else if (scaler != nullptr) {
    log::warn("grad_scaler: found no loss scale in the checkpoint of step ", manifest.step,
              ", which a run without float16 wrote: it begins at ", scaler->scale(),
              ", and the first steps may be left out until it fits; set grad_scaler.init_scale, or "
              "precision.param_dtype and reduce_dtype as they were");
  } else if (state) {
    log::warn(
        "precision.param_dtype: found no float16 in a run that resumes from a checkpoint of "
        "one at the loss scale ",
        state->scale,
        ": the loss is no longer scaled, and the checkpoints to come keep no "
        "scale; set precision.param_dtype or reduce_dtype to float16 to continue as before");
  }
}

}  // namespace tessera::train
