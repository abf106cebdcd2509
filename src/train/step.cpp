#include "train/step.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/hash.h"
#include "base/random.h"
#include "base/test_hooks.h"
#include "comm/device.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "fsdp/handle.h"
#include "nn/loss.h"
#include "tessera/error.h"
#include "tessera/grad_scaler.h"
#include "tessera/step_scope.h"
#include "tessera/world.h"
#include "train/batch_memory.h"
#include "train/config/config.h"
#include "train/expert_balance.h"
#include "train/pipeline/pipeline_step.h"

namespace tessera::train {
namespace {

/// Every rank's values, by rank.
std::vector<std::vector<double>> gather_over(comm::Group* group,
                                             const std::vector<double>& values) {
  if (group == nullptr || values.empty()) return {values};
  const std::string mine(reinterpret_cast<const char*>(values.data()),
                         values.size() * sizeof(double));
  std::vector<std::vector<double>> result;
  for (const auto& bytes : comm::all_gather_fixed(*group, mine, "values of a step")) {
    result.emplace_back(values.size());
    std::memcpy(result.back().data(), bytes.data(), bytes.size());
  }
  return result;
}

constexpr std::ptrdiff_t kLosses = 2;  // of RankSum::kStep, before its counts

std::vector<std::int64_t> counts_over(comm::Group* group, const std::vector<double>& values) {
  const std::vector<std::int64_t> mine(values.begin(), values.end());
  if (group == nullptr || mine.empty()) return mine;
  return comm::sum_of_ranks(*group, mine, "counts of a step");
}

/// A number of positions that ranks of the tensor-parallel axis compute alike: the first of them
/// counts. In a dry run each says what all say.
double of_positions(const ShardedBase& model, double value) {
  const Mesh& mesh = model.mesh();
  return mesh.coordinate(axis::kTensor) == 0 || mesh.world()->control().is_dry() ? value : 0.0;
}

/// A number of whole rows, which ranks of the context-parallel axis share, too.
double of_rows(const ShardedBase& model, double value) {
  const Mesh& mesh = model.mesh();
  const bool counts = mesh.coordinate(axis::kContext) == 0 || mesh.world()->control().is_dry();
  return counts ? of_positions(model, value) : 0.0;
}

std::uint64_t hash_of(const std::vector<MicroBatch>& batches) {
  Hasher hasher;
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const at::Tensor values = tensor.to(at::kCPU).contiguous();
    hasher.add(
        std::string_view(static_cast<const char*>(values.const_data_ptr()), values.nbytes()));
  };
  for (const auto& batch : batches) {
    add(batch.input_ids);
    add(batch.targets);
    add(batch.documents.starts);
    if (batch.token_types) add(*batch.token_types);
  }
  return hasher.digest();
}

/// Checks that ranks of the context-parallel axis have the same rows: attention would mix others.
/// Collective. Errors, on all ranks alike: kFormat.
void require_same_rows(const ShardedBase& model, const std::vector<MicroBatch>& batches,
                       std::int64_t step) {
  const MeshShapes& mesh = model.mesh().shapes();
  comm::Group* const data = model.data_group();
  if (mesh.size_of(axis::kContext) == 1 || data == nullptr) return;
  const std::uint64_t own = hash_of(batches);
  const std::string mine(reinterpret_cast<const char*>(&own), sizeof own);
  const auto all = comm::all_gather_fixed(*data, mine, "rows of a step");
  const auto ranks = mesh.stage_of(model.mesh().world()->rank());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int first = mesh.ranks_of(ranks[i], {axis::kContext}).front();
    const auto at = std::ranges::find(ranks, first) - ranks.begin();
    TESSERA_CHECK(all[i] == all[static_cast<std::size_t>(at)], ErrorKind::kFormat, "rows of step ",
                  step, ": found others on rank ", ranks[i], " than on rank ", first,
                  ", expected the same: ranks of cp share the positions of each row; give "
                  "all hosts the same data");
  }
}

BatchLoss count_kept(const ShardedBase& model, const std::vector<MicroBatch>& batches) {
  std::int64_t kept = 0;
  for (const auto& batch : batches) kept += batch.unmasked_targets();
  BatchLoss loss;
  loss.kept = static_cast<std::int64_t>(
      sum_over_ranks(model, RankSum::kLabels, {of_rows(model, static_cast<double>(kept))}).front());
  return loss;
}

std::vector<MicroBatch> load_micro_batches(const BatchSource& source, std::int64_t step,
                                           const std::vector<RowRange>& rows) {
  std::vector<MicroBatch> batches;
  batches.reserve(rows.size());
  for (const auto& range : rows) batches.push_back(source.load(step, range));
  return batches;
}

}  // namespace

std::vector<double> added_by_rank(const std::vector<std::vector<double>>& of_ranks) {
  std::vector<double> sums(of_ranks.front().size(), 0.0);
  for (const auto& rank : of_ranks) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += rank[i];
  }
  return sums;
}

std::vector<double> sum_over_ranks(const ShardedBase& model, RankSum what,
                                   const std::vector<double>& values) {
  const std::ptrdiff_t losses = what == RankSum::kStep      ? kLosses
                                : what == RankSum::kSources ? std::ssize(values)
                                                            : 0;
  const auto sum_over = [&](comm::Group* group, const std::vector<double>& mine) {
    const auto counts = mine.begin() + std::min(losses, std::ssize(mine));
    auto sums = added_by_rank(gather_over(group, {mine.begin(), counts}));
    const auto total = counts_over(group, {counts, mine.end()});
    sums.insert(sums.end(), total.begin(), total.end());
    return sums;
  };
  comm::Group* data = model.data_group();
  if (const auto* hook = test_hooks::data_ranks_of_sum.get()) data = (*hook)(what, data);
  const auto* hook = test_hooks::rank_sum.get();
  const auto of_stage =
      hook != nullptr ? (*hook)(what, gather_over(data, values)) : sum_over(data, values);
  const bool of_all_stages = what == RankSum::kStep || what == RankSum::kSources;
  return of_all_stages ? sum_over(model.stages_group(), of_stage) : of_stage;
}

std::vector<double> max_over_ranks(const ShardedBase& model, const std::vector<double>& values) {
  auto largest = values;
  for (auto* group : {model.data_group(), model.stages_group()}) {
    for (const auto& rank : gather_over(group, largest)) {
      for (std::size_t i = 0; i < largest.size(); ++i) largest[i] = std::max(largest[i], rank[i]);
    }
  }
  return largest;
}

StepOptions step_options(const Config& config, const GradScaler* scaler) {
  StepOptions options;
  // The first step, which has no plan yet, reduces as all others do.
  const bool is_form_2 = config.compile.mode != CompileChoice::kOff && config.compile.form == 2;
  if (config.training.sync_every_micro_batch || is_form_2) options.sync = Sync::kEveryMicroBatch;
  options.seed = static_cast<std::uint64_t>(config.debug.seed);
  if (scaler != nullptr) options.loss_scale = scaler->scale();
  options.aux_loss_coef = config.model.aux_loss_coef;
  return options;
}

namespace {

constexpr std::size_t kNumbers = 3;  // that a Found has

at::Tensor stacked(const std::vector<at::Tensor>& numbers) {
  return numbers.empty() ? at::Tensor() : at::stack(numbers);
}

/// The sum of stacked numbers on the host, one after the other.
double sum_of(const at::Tensor& read, double share = 1.0) {
  double sum = 0.0;
  if (!read.defined()) return sum;
  const at::Tensor wide = read.to(at::kDouble);
  const auto* next = wide.const_data_ptr<double>();
  for (std::int64_t i = 0; i < wide.numel(); ++i) sum += next[i] * share;
  return sum;
}

}  // namespace

PendingLoss::PendingLoss(const BatchLoss& counted, std::vector<Found> found,
                         const models::RoutedExperts& routed, moe::NotedScores scores,
                         RowsOfSources rows)
    : counted_(counted),
      found_(std::move(found)),
      scores_(std::move(scores)),
      rows_(std::move(rows)) {
  const at::NoGradGuard no_grad;
  counted_.chosen.assign(routed.layers.size(),
                         std::vector<double>(static_cast<std::size_t>(routed.experts), 0.0));
  for (const Found& one : found_) {
    numbers_.push_back(stacked(one.losses));
    numbers_.push_back(stacked(one.auxiliary));
    numbers_.push_back(one.chosen.all());
  }
  numbers_.push_back(scores_.flags());
  numbers_.push_back(rows_.losses);
}

namespace {

/// Collective.
std::vector<SourceLoss> added_by_source(const ShardedBase& model, const RowsOfSources& rows,
                                        const at::Tensor& losses) {
  std::vector<double> mine(2 * rows.sources, 0.0);
  for (std::size_t i = 0; i < rows.source.size(); ++i) {
    mine[2 * rows.source[i]] += of_positions(model, losses.const_data_ptr<double>()[i]);
    mine[2 * rows.source[i] + 1] += of_rows(model, static_cast<double>(rows.kept[i]));
  }
  const auto sums = sum_over_ranks(model, RankSum::kSources, mine);
  std::vector<SourceLoss> added;
  for (std::size_t i = 0; i < rows.sources; ++i) {
    added.push_back({sums[2 * i], static_cast<std::int64_t>(sums[2 * i + 1])});
  }
  return added;
}

}  // namespace

BatchLoss PendingLoss::added(const ShardedBase& model, std::span<const at::Tensor> read) const {
  scores_.check(read[found_.size() * kNumbers]);
  BatchLoss loss = counted_;
  double sum = 0.0;
  double auxiliary = 0.0;
  for (std::size_t i = 0; i < found_.size(); ++i) {
    const auto mine = read.subspan(i * kNumbers, kNumbers);
    sum += sum_of(mine[0]);
    auxiliary += sum_of(mine[1], found_[i].auxiliary_share);
    auto by_layer = found_[i].chosen.by_layer(mine[2]);
    for (std::size_t here = 0; here < by_layer.size(); ++here) {
      loss.chosen.at(found_[i].layers.at(here)) = std::move(by_layer[here]);
    }
  }
  std::vector<double> mine{of_positions(model, sum), auxiliary};
  for (const auto& layer : loss.chosen) mine.insert(mine.end(), layer.begin(), layer.end());
  const auto sums = sum_over_ranks(model, RankSum::kStep, mine);
  loss.sum = sums[0];
  loss.auxiliary = sums[1];
  auto next = sums.begin() + kLosses;
  for (auto& layer : loss.chosen) {
    for (double& count : layer) count = *next++;
  }
  if (rows_.sources > 0) {
    loss.of_sources = added_by_source(model, rows_, read[found_.size() * kNumbers + 1]);
  }
  return loss;
}

namespace {

MicroBatch on_device(const Sharded<models::LanguageModel>& model, const MicroBatch& batch) {
  if (const auto hook = test_hooks::took_micro_batch.get()) (*hook)(model.mesh(), batch);
  return batch.on(model.mesh().world()->device(), *model.module());
}

std::vector<MicroBatch> on_device(const Sharded<models::LanguageModel>& model,
                                  std::vector<MicroBatch> batches) {
  for (auto& batch : batches) batch = on_device(model, batch);
  return batches;
}

/// Micro-batches are noted in any order; where another stage has the head, none is.
RowsOfSources rows_of_sources(const nn::RowLosses& losses, const BatchSource& source,
                              const std::vector<RowRange>& rows,
                              const std::vector<MicroBatch>& batches) {
  RowsOfSources found{.sources = source.sources()};
  std::vector<at::Tensor> sums;
  for (const auto& noted : losses.noted()) {
    if (noted.sums.numel() == 0) continue;
    const auto at = std::ranges::find_if(rows, [&](const RowRange& range) {
      return range.begin == noted.first_row && range.size() > 0;
    });
    TESSERA_INVARIANT(at != rows.end(), "losses of rows that were not run");
    const MicroBatch& batch = batches[static_cast<std::size_t>(at - rows.begin())];
    for (std::int64_t row = 0; row < noted.sums.numel(); ++row) {
      found.source.push_back(batch.sources[static_cast<std::size_t>(row)]);
      found.kept.push_back(nn::count_kept(batch.targets.narrow(0, row, 1)));
    }
    sums.push_back(noted.sums);
  }
  if (!sums.empty()) found.losses = at::cat(sums);
  return found;
}

PendingLoss run_forward_backward(Sharded<models::LanguageModel>& model, const BatchSource& source,
                                 std::int64_t step, const std::vector<RowRange>& rows,
                                 const StepOptions& options) {
  const auto batches = load_micro_batches(source, step, rows);
  require_same_rows(model, batches, step);
  const auto loss = count_kept(model, batches);
  if (loss.kept == 0) return {};
  std::optional<nn::RowLosses> by_row;
  if (source.sources() > 1) by_row.emplace();
  const auto noted_rows = [&] {
    return by_row ? rows_of_sources(*by_row, source, rows, batches) : RowsOfSources{};
  };
  const models::ModelSpec& spec = model.module()->spec();
  const auto routed = models::routed_experts(spec);
  const double coef = aux_loss_coef(options.aux_loss_coef, spec);
  const moe::ScoreChecks scores;
  if (options.pipeline != nullptr) {
    auto found = options.pipeline->forward_backward(
        {on_device(model, batches), rows, step, options, loss.kept, coef});
    return {loss, std::move(found), routed, scores.noted(), noted_rows()};
  }
  Found found;
  found.auxiliary_share = 1.0 / static_cast<double>(batches.size());
  found.layers.resize(routed.layers.size());
  std::iota(found.layers.begin(), found.layers.end(), std::size_t{0});
  const auto count = std::ssize(batches);
  StepScope scope(model, {.reshard = StepReshard::kMicroBatch,
                          .sync_every_micro_batch = options.sync == Sync::kEveryMicroBatch,
                          .schedule = concat(count, " micro-batches"),
                          .micro_batches = count});
  for (std::size_t i = 0; i < batches.size(); ++i) {
    scope.begin_forward(0, static_cast<std::int64_t>(i));
    const SampleScope place(SamplePlace{options.seed, step, rows[i].begin});
    auto inputs = on_device(model, batches[i]).inputs();
    if (spec.moe) inputs.router_statistics = models::RouterStatistics::kCounts;
    if (coef > 0) inputs.router_statistics = models::RouterStatistics::kAndProbabilities;
    const auto output = model.call(&models::LanguageModel::forward_routed, inputs);
    found.chosen.add(output.loads);
    // The mean over the whole batch is differentiated: no rank divides again.
    std::vector<at::Tensor> roots{output.result};
    std::vector<at::Tensor> seeds{
        at::full_like(output.result, options.loss_scale / static_cast<double>(loss.kept))};
    if (coef > 0 && !output.loads.empty()) {
      const auto addend = auxiliary_loss(model, output.loads, spec.moe->experts_per_token);
      found.auxiliary.push_back(addend.detach());
      if (addend.requires_grad()) {  // not where all that it comes from is frozen
        roots.push_back(addend);
        seeds.push_back(at::full_like(addend, options.loss_scale * coef * found.auxiliary_share));
      }
    }
    scope.begin_backward(0, static_cast<std::int64_t>(i));
    torch::autograd::backward(roots, seeds);
    found.losses.push_back(output.result.detach());
  }
  scope.finish();
  return {loss, {std::move(found)}, routed, scores.noted(), noted_rows()};
}

BatchLoss run_forward_only(Sharded<models::LanguageModel>& model, const BatchSource& source,
                           std::int64_t step, const std::vector<RowRange>& rows,
                           PipelineOfRun* pipeline) {
  const at::NoGradGuard no_grad;
  const auto batches = load_micro_batches(source, step, rows);
  require_same_rows(model, batches, step);
  auto loss = count_kept(model, batches);
  const moe::ScoreChecks scores;
  if (pipeline != nullptr) {
    auto found = pipeline->forward_only({on_device(model, batches), rows, step});
    const PendingLoss pending(loss, std::move(found), {}, scores.noted());
    return pending.added(model, comm::read_on_host(pending.numbers(), "loss"));
  }
  std::vector<at::Tensor> losses;
  for (const auto& batch : batches) {
    losses.push_back(model.forward(on_device(model, batch).inputs()));
  }
  const auto read = comm::read_on_host({stacked(losses), scores.noted().flags()}, "loss");
  scores.noted().check(read[1]);
  const double sum = sum_of(read[0]);
  loss.sum = sum_over_ranks(model, RankSum::kStep, {of_positions(model, sum)}).front();
  return loss;
}

/// None of the CPU's.
std::optional<DeviceThatRanOut> memory_taken(at::Device device, const std::string& doing) {
  if (device.is_cpu()) return std::nullopt;
  const auto memory = comm::memory_of(device);
  return DeviceThatRanOut{device.str(), doing, static_cast<double>(memory.held),
                          static_cast<double>(memory.peak), static_cast<double>(memory.reserved)};
}

}  // namespace

void rethrow_with_key(const ShardedBase& model, const BatchSource& source,
                      const std::vector<RowRange>& rows, const std::exception& error) {
  if (!is_out_of_memory(error)) throw;
  RowsOfRank mine{.tokens = source.row_tokens(), .shared_by = model.mesh().size_of(axis::kContext)};
  for (const auto& range : rows) {
    mine.rows += range.size();
    mine.micro_batch = std::max(mine.micro_batch, range.size());
  }
  throw Error(ErrorKind::kConfig, out_of_memory_text(mine, error,
                                                     memory_taken(model.mesh().world()->device(),
                                                                  fsdp::last_entered(model))));
}

void rethrow_with_time(const World& world, ErrorKind kind, std::string_view when,
                       const std::exception& error) {
  if (!is_out_of_memory(error)) throw;
  throw Error(kind, out_of_memory_text(when, error, memory_taken(world.device(), "")));
}

namespace {

template <class Run>
auto in_memory(const ShardedBase& model, const BatchSource& source,
               const std::vector<RowRange>& rows, const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    rethrow_with_key(model, source, rows, error);
  }
}

}  // namespace

PendingLoss launch_forward_backward(Sharded<models::LanguageModel>& model,
                                    const BatchSource& source, std::int64_t step,
                                    const std::vector<RowRange>& rows, const StepOptions& options) {
  return in_memory(model, source, rows,
                   [&] { return run_forward_backward(model, source, step, rows, options); });
}

BatchLoss forward_backward(Sharded<models::LanguageModel>& model, const BatchSource& source,
                           std::int64_t step, const std::vector<RowRange>& rows,
                           const StepOptions& options) {
  const auto pending = launch_forward_backward(model, source, step, rows, options);
  TESSERA_CHECK(pending.kept() > 0, ErrorKind::kFormat, "batch of step ", step,
                ": found no unmasked target (all are -100), expected at least one");
  return pending.added(model, comm::read_on_host(pending.numbers(), "loss of a step"));
}

BatchLoss forward_only(Sharded<models::LanguageModel>& model, const BatchSource& source,
                       std::int64_t step, const std::vector<RowRange>& rows,
                       PipelineOfRun* pipeline) {
  return in_memory(model, source, rows,
                   [&] { return run_forward_only(model, source, step, rows, pipeline); });
}

namespace {

bool needs_scale(const GradContract& contract) {
  if (contract.compute.dtype == DType::kFloat16) return true;
  return contract.trainable &&
         (contract.reduce == DType::kFloat16 || contract.grad == DType::kFloat16);
}

}  // namespace

void run_once(Sharded<models::LanguageModel>& model, const BatchSource& source, std::int64_t step,
              RowRange rows, PipelineOfRun* pipeline) {
  const auto batch = on_device(model, source.load(step, rows));
  if (pipeline == nullptr) {
    model.forward(batch.inputs());
  } else {
    pipeline->forward_only({{batch}, {rows}, step});
  }
}

LogitsOfRows logits_of(Sharded<models::LanguageModel>& model, const BatchSource& source,
                       std::int64_t step, RowRange rows, PipelineOfRun* pipeline) {
  const at::NoGradGuard no_grad;
  const auto batch = on_device(model, source.load(step, rows));
  auto inputs = batch.inputs();
  inputs.targets.reset();
  LogitsOfRows found;
  if (const auto context = model.module()->context_rows(inputs)) {
    found.positions = context->cut.runs_of(model.mesh().coordinate(axis::kContext));
  } else {
    found.positions = {{0, source.row_tokens()}};
  }
  if (pipeline == nullptr) {
    found.logits = model.forward(inputs);
  } else if (const auto all = pipeline->logits({{batch}, {rows}, step}); !all.empty()) {
    found.logits = all.front();
  }
  return found;
}

std::unique_ptr<GradScaler> make_scaler(const ShardedBase& model,
                                        const std::vector<GradContract>& parameters,
                                        const GradScalerOptions& options) {
  if (std::ranges::any_of(parameters, needs_scale)) {
    return std::make_unique<GradScaler>(model, options);
  }
  TESSERA_CHECK(options == GradScalerOptions{}, ErrorKind::kConfig,
                "grad_scaler: found values for a run without float16, expected none: the loss is "
                "scaled where a parameter computes or reduces in float16; leave them out, or set "
                "precision.param_dtype");
  return nullptr;
}

}  // namespace tessera::train
