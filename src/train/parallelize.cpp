#include "train/parallelize.h"

#include "base/test_hooks.h"
#include "comm/device.h"
#include "comm/group.h"
#include "grad/torch_dtype.h"
#include "models/adapters.h"
#include "models/expert_bias.h"
#include "tessera/error.h"
#include "tessera/world.h"
#include "train/expert_balance.h"
#include "train/hf/model_source.h"
#include "train/hf/weights.h"
#include "train/plan_of_run.h"

namespace tessera::train {

namespace {

void load(const ShardedBase& model, const TensorSource& folder, const FileForms& forms, Loaded what,
          std::span<const std::string> states = {}) {
  auto& world = *model.mesh().world();
  if (!folder.hashed_files().empty()) {
    comm::on_all_or_none(world, "verifying the weights",
                         [&] { verify_weights(folder, world.rank(), world.size()); });
  }
  comm::on_all_or_none(world, "loading the weights",
                       [&] { load_weights(model, folder, forms, what, states); });
}

/// With kLater the caller fills what is trained.
void fill(const ShardedBase& model, const ModelSource& source, std::uint64_t seed,
          InitialWeights weights) {
  const bool later = weights == InitialWeights::kLater;
  if (source.base_hash) check_base(source, *model.mesh().world());
  if (source.folder && (!later || source.lora)) {
    load(model, *source.folder, file_forms(source.description.parameters), Loaded::kModel,
         models::traits(source.spec.family).pins.states);
  }
  if (later) return;
  if (source.adapters) {
    load(model, *source.adapters, {}, Loaded::kAdapters);
  } else if (source.lora) {
    if (!source.folder) draw_weights(model, source.description.parameters, seed);
    draw_weights(model, source.description.parameters, seed, Loaded::kAdapters);
  } else if (!source.folder) {
    draw_weights(model, source.description.parameters, seed);
  }
}

parallel::Axis activations(const Mesh& mesh, std::string_view name,
                           const DTypeChoice& reduce_dtype) {
  std::optional<at::ScalarType> sums;
  if (reduce_dtype.dtype) sums = to_scalar_type(*reduce_dtype.dtype);
  return parallel::axis_of(mesh, name, sums);
}

models::ModelAxes model_axes(const Config& config, const ParallelDims& dims, const Mesh& mesh,
                             const PipelinePlan* pipeline) {
  const DTypeChoice& sums = config.precision.activation_reduce_dtype;
  models::ModelAxes axes;
  axes.degrees = dims;
  const bool gives_turn = pipeline != nullptr && pipeline->overlap == pipeline::Overlap::kAll;
  auto tensor = activations(mesh, axis::kTensor, sums);
  tensor.gives_turn = gives_turn;
  axes.tensor = nn::TensorRegion(std::move(tensor), axes.degrees.sequence);
  // Here on all ranks alike, be there attention in their stages or not.
  axes.context = {activations(mesh, axis::kContext, sums), dims.context_form, dims.context_parts};
  axes.context.axis.gives_turn = gives_turn;
  if (dims.ep > 1) axes.experts = activations(mesh, axis::kExpert, sums);
  if (config.model.score_before_experts) axes.score = moe::Score::kBeforeExperts;
  if (pipeline != nullptr) {
    axes.stages = stages_of_rank(*pipeline, mesh.coordinate(axis::kPipeline));
  }
  return axes;
}

}  // namespace

int data_rank(const Mesh& mesh) {
  return mesh.coordinate(axis::kReplicate) * mesh.size_of(axis::kShard) +
         mesh.coordinate(axis::kShard);
}

ModelParts model_parts(const ModelSource& source, const Config& config, const Mesh& mesh,
                       Purpose purpose, const PipelinePlan* pipeline) {
  // 1. What every parameter is, for the whole model at once.
  const auto dims = resolve_parallelism(config.parallelism, mesh.shape().size());
  ModelParts parts{resolve_model(source, config, dims, purpose), nullptr};
  if (pipeline != nullptr) note_copies(*pipeline, source.description, parts.contract);

  // 2. The model: the stages and the sizes of this rank, no data.
  parts.model = models::make_language_model(source.spec, model_axes(config, dims, mesh, pipeline));
  models::add_adapters(*parts.model, source.lora);
  if (!expert_biases_of(source, config.model.load_balance_coeff).empty()) {
    models::add_expert_biases(*parts.model);
  }
  if (config.activation_checkpoint.mode) {
    parts.model->set_recompute(*config.activation_checkpoint.mode);
  }
  if (const auto hook = test_hooks::made_parts.get()) (*hook)(mesh, parts);
  return parts;
}

std::shared_ptr<Sharded<models::LanguageModel>> parallelize(const ModelSource& source,
                                                            const Config& config, const Mesh& mesh,
                                                            InitialWeights weights) {
  return parallelize(model_parts(source, config, mesh), source, config, mesh, weights);
}

std::shared_ptr<Sharded<models::LanguageModel>> parallelize(ModelParts parts,
                                                            const ModelSource& source,
                                                            const Config& config, const Mesh& mesh,
                                                            InitialWeights weights) {
  if (config.debug.deterministic) comm::take_deterministic_kernels(mesh.world()->device());
  const auto plain = std::move(parts.model);
  const auto contracts =
      std::make_shared<const std::vector<GradContract>>(std::move(parts.contract.parameters));
  const auto buffers =
      std::make_shared<const std::vector<BufferContract>>(std::move(parts.contract.buffers));
  const auto units =
      std::make_shared<const std::vector<UnitContract>>(std::move(parts.contract.units));

  // 3. Units, inner ones first.
  PrecisionPolicy as_contracts;  // our layers cast by themselves
  as_contracts.cast_forward_inputs = false;
  ShardOptions unit;
  unit.contracts = contracts;
  unit.buffer_contracts = buffers;
  unit.unit_contracts = units;
  unit.reshard_after_forward = config.parallelism.reshard_after_forward;
  unit.divide_factor = 1.0;  // the loss is already divided by the batch's unmasked targets
  const auto named = [&](const std::string& name) {
    auto options = unit;
    options.name = name;
    options.canonical_name = [plain = plain.get(), name](const std::string& path) {
      return plain->canonical_name(name, path);
    };
    return options;
  };
  ShardOptions root;
  root.contracts = contracts;
  root.buffer_contracts = buffers;
  root.unit_contracts = units;
  root.divide_factor = 1.0;
  root.reshard_after_forward = false;
  root.merge_below_bytes = kMergeBelowBytes;
  for (const models::ModelUnit& each : plain->units()) {
    root.inner.push_back(each.shard(mesh, as_contracts, named(each.name)));
  }

  // 4. The root: what is left, and the small buckets of all units.
  auto model = std::make_shared<Sharded<models::LanguageModel>>(plain, mesh, as_contracts, root);

  // 5. Weights: each rank reads or draws only what it owns.
  if (weights != InitialWeights::kNone) {
    fill(*model, source, static_cast<std::uint64_t>(config.debug.seed), weights);
    if (source.folder) load_buffers(*model, *source.folder);
  }
  model->set_loaded();
  if (const auto hook = test_hooks::made_parallel.get()) (*hook)(mesh, *model);
  return model;
}

}  // namespace tessera::train
