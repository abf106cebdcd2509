#include "train/checkpoint_session.h"

#include "train/data_identity.h"

namespace tessera::train {
namespace {

RunIdentity identity_of(const Config& config, const ModelSource& source, const BatchSource& data,
                        World& world) {
  RunIdentity identity;
  identity.spec = source.spec;
  identity.seed = config.debug.seed;
  // Whoever reads the checkpoint has to know what its tokens are.
  if (data_kind(config.data.path, "data.path") == DataKind::kText) {
    identity.spec.tessera_tokenizer = "bytes";
  }
  if (world.rank() == 0) {
    identity.data = data_identity(config.data.path, data.row_tokens(), data.rows_in_step());
  }
  return identity;
}

SourceDType dtypes_of(const ModelSource& source) {
  return [&source](const std::string& parameter) -> std::optional<DType> {
    const auto* info = source.folder ? source.folder->find(parameter) : nullptr;
    return info == nullptr ? std::nullopt : std::optional(info->original);
  };
}

}  // namespace

CheckpointSession::CheckpointSession(const Config& config, const ModelSource& source,
                                     const BatchSource& data, const Mesh& mesh,
                                     std::function<void(std::int64_t)> before_write)
    : interval_(config.checkpoint.interval), world_(*mesh.world()) {
  if (!config.checkpoint.enable) {
    require_no_checkpoints(config.checkpoint, world_);
    return;
  }
  const auto identity = identity_of(config, source, data, world_);
  resumed_ = open_resumed(config.checkpoint, identity, world_);

  CheckpointOptions options;
  options.folder = config.checkpoint.folder;
  options.keep_latest_k = config.checkpoint.keep_latest_k;
  options.about.config_hash = Hash128Stream().add(to_toml(config)).digest();
  options.about.model_path = config.model.path;
  options.about.seed = identity.seed;
  options.about.data = identity.data;
  options.config_json = models::config_json(identity.spec);
  options.source_dtype = dtypes_of(source);
  options.replica = mesh.coordinate(axis::kReplicate);
  options.replicas = mesh.size_of(axis::kReplicate);
  options.before_write = std::move(before_write);
  saver_.emplace(world_, std::move(options));
}

std::int64_t CheckpointSession::load(const ShardedBase& model, Optimizer& optimizer) {
  if (!resumed_) return 0;
  load_checkpoint(*resumed_, model, optimizer, world_);
  return resumed_->manifest().step;
}

void CheckpointSession::after_step(std::int64_t step, bool last, bool anyone_writes,
                                   const ShardedBase& model, const Optimizer& optimizer) {
  if (!saver_) return;
  saver_->advance(anyone_writes);
  if (last || step % interval_ == 0) saver_->save(step, model, optimizer);
}

void CheckpointSession::finish() {
  if (saver_) saver_->finish();
}

}  // namespace tessera::train
