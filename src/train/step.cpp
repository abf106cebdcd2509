#include "train/step.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstring>

#include "base/sample_place.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "tessera/error.h"
#include "tessera/grad_scaler.h"
#include "train/config.h"

namespace tessera::train {
namespace {

/// Every data rank's values, by rank.
std::vector<std::vector<double>> gather_over_data(const ShardedBase& model,
                                                  const std::vector<double>& values) {
  auto* group = model.unit()->runtime().data_group();
  if (group == nullptr) return {values};
  const std::string mine(reinterpret_cast<const char*>(values.data()),
                         values.size() * sizeof(double));
  std::vector<std::vector<double>> result;
  for (const auto& bytes : comm::all_gather_fixed(*group, mine, "values of a step")) {
    result.emplace_back(values.size());
    std::memcpy(result.back().data(), bytes.data(), bytes.size());
  }
  return result;
}

BatchLoss count_kept(const ShardedBase& model, const std::vector<MicroBatch>& batches) {
  std::int64_t kept = 0;
  for (const auto& batch : batches) kept += batch.kept_labels();
  BatchLoss loss;
  loss.kept = static_cast<std::int64_t>(sum_over_data(model, {static_cast<double>(kept)}).front());
  return loss;
}

std::vector<MicroBatch> load(const BatchSource& source, std::int64_t step,
                             const std::vector<RowRange>& rows) {
  std::vector<MicroBatch> batches;
  batches.reserve(rows.size());
  for (const auto& range : rows) batches.push_back(source.load(step, range));
  return batches;
}

}  // namespace

std::vector<double> sum_over_data(const ShardedBase& model, const std::vector<double>& values) {
  std::vector<double> sums(values.size(), 0.0);
  for (const auto& rank : gather_over_data(model, values)) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += rank[i];
  }
  return sums;
}

std::vector<double> max_over_data(const ShardedBase& model, const std::vector<double>& values) {
  auto largest = values;
  for (const auto& rank : gather_over_data(model, values)) {
    for (std::size_t i = 0; i < largest.size(); ++i) largest[i] = std::max(largest[i], rank[i]);
  }
  return largest;
}

StepOptions step_options(const Config& config, const GradScaler* scaler) {
  StepOptions options;
  if (config.training.sync_every_micro_batch) options.sync = Sync::kEveryMicroBatch;
  options.seed = static_cast<std::uint64_t>(config.debug.seed);
  if (scaler != nullptr) options.loss_scale = scaler->scale();
  return options;
}

BatchLoss forward_backward(Sharded<models::LanguageModel>& model, const BatchSource& source,
                           std::int64_t step, const std::vector<RowRange>& rows,
                           const StepOptions& options) {
  const auto batches = load(source, step, rows);
  auto loss = count_kept(model, batches);
  TESSERA_CHECK(loss.kept > 0, ErrorKind::kFormat, "batch of step ", step,
                ": found no kept label (all are -100), expected at least one");
  double sum = 0.0;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const bool last = i + 1 == batches.size();
    model.set_requires_gradient_sync(last || options.sync == Sync::kEveryMicroBatch);
    model.set_requires_replica_reduce(last);
    const SampleScope place(SamplePlace{options.seed, step, rows[i].begin});
    const auto token_losses = model.forward(batches[i].inputs());
    // The mean over the whole batch is differentiated: no rank divides again.
    const auto seed =
        at::full_like(token_losses, options.loss_scale / static_cast<double>(loss.kept));
    torch::autograd::backward({token_losses}, {seed});
    sum += token_losses.item<double>();
  }
  loss.sum = sum_over_data(model, {sum}).front();
  return loss;
}

BatchLoss forward_only(Sharded<models::LanguageModel>& model, const BatchSource& source,
                       std::int64_t step, const std::vector<RowRange>& rows) {
  const at::NoGradGuard no_grad;
  const auto batches = load(source, step, rows);
  auto loss = count_kept(model, batches);
  double sum = 0.0;
  for (const auto& batch : batches) sum += model.forward(batch.inputs()).item<double>();
  loss.sum = sum_over_data(model, {sum}).front();
  return loss;
}

}  // namespace tessera::train
