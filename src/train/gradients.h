// `tessera gradients`: loss, logits and the full gradient of every parameter of one batch, under
// any layout; and what a run gives away once, although its parts lie on the stages of a pipeline:
// the gradients of the whole model, and the hash of its plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "layout/parallel_dims.h"
#include "models/model_spec.h"
#include "tessera/model_contract.h"
#include "tessera/shard.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/data/data.h"
#include "train/data/sampler.h"

namespace tessera::train {

/// In the metadata of a file of gradients: the coarsest dtype in which they were computed or sent.
inline constexpr std::string_view kComputedIn = "computed_in";
/// Before the names of parameters in it.
inline constexpr std::string_view kGradientPrefix = "grad/";
/// The dtype with the largest epsilon in which a trained parameter is computed with or summed over
/// ranks.
DType coarsest_dtype(const ModelContract& contract);

struct GradientsRequest {
  Config config;      ///< model.path set; training, parallelism, precision count
  std::string batch;  ///< .safetensors with input_ids and labels [B, T]
  std::string out;    ///< .safetensors to write
  bool logits = true;
  bool impose_routing = false;  ///< mixtures of experts; without effect on dense models
};

/// Collective; rank 0 writes `out`. Errors: as run_training.
void run_gradients(const GradientsRequest& request, World& world,
                   const std::function<void()>& on_first_step = {});

/// Errors: kUsage where `out` is empty, is the batch or a file of the model.
void refuse_overwriting_inputs(const GradientsRequest& request);
/// The experts that a batch file is to impose where that is asked for; dense models have none.
std::optional<RoutingWanted> imposed_routing(bool is_asked, const models::ModelSpec& spec);
/// The rows of one batch that a data rank computes, a micro-batch at a time. Errors: as
/// micro_batches().
std::vector<RowRange> pieces_of_batch(const Config& config, std::int64_t rows,
                                      const ParallelDims& dims, int data_rank);

/// As ShardedBase::visit_full_gradients of the whole model, stage after stage: on rank 0 of the
/// world for every trained parameter once, of what several stages have for the first of them; on
/// other ranks for those of their own stages. Rank 0 holds one parameter of other stages at a time;
/// the first rank of each sends it, all ranks continue together, one small message a parameter, so
/// that no wait is longer than one of them takes. Collective over the world. Errors: those of
/// `visit`, and of visit_full_gradients.
void visit_full_gradients_of_run(
    const ShardedBase& model,
    const std::function<void(const std::string&, const at::Tensor&)>& visit);

/// stages_hash (plan_of_run.h) of the bucket plans of all stages, the same on every rank.
/// Collective among the ranks of axis pp.
std::uint64_t plan_hash_of_run(const ShardedBase& model);

}  // namespace tessera::train
