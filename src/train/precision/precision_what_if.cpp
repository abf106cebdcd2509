#include "train/precision/precision_what_if.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "base/log.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "models/description.h"
#include "tessera/clip.h"
#include "tessera/error.h"
#include "train/contract_of_run.h"
#include "train/dry/dry_step.h"
#include "train/dry/rank_memory.h"
#include "train/dry/step_traffic.h"
#include "train/gradients.h"
#include "train/hf/model_source.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_step.h"
#include "train/step.h"

namespace tessera::train {
namespace {

/// The rows of another batch, each twice in one micro-batch: the mean loss and its gradients are
/// the same, but sums over tokens are formed in another order.
class RowsTwice final : public BatchSource {
 public:
  explicit RowsTwice(const BatchSource& once) : once_(once) {}
  std::int64_t rows_in_step() const override { return 2 * once_.rows_in_step(); }
  std::int64_t row_tokens() const override { return once_.row_tokens(); }
  std::int64_t rows_in_pass() const override { return 2 * once_.rows_in_pass(); }
  void check_labels(std::int64_t /*steps*/) override {}
  std::vector<std::string> opened_from() const override { return once_.opened_from(); }
  MicroBatch load(std::int64_t step, RowRange rows) const override {
    auto batch = once_.load(step, {rows.begin / 2, rows.end / 2});
    const auto double_up = [](at::Tensor& tensor) { tensor = at::cat({tensor, tensor}); };
    double_up(batch.input_ids);
    double_up(batch.targets);
    if (batch.images) {
      double_up(batch.images->pixel_values);
      double_up(batch.images->position_ids);
    }
    if (batch.token_types) double_up(*batch.token_types);
    for (auto& indices : batch.imposed_routing) double_up(indices);
    if (batch.fillers) double_up(*batch.fillers);
    const auto sources = batch.sources;
    batch.sources.insert(batch.sources.end(), sources.begin(), sources.end());
    return batch;
  }

 private:
  const BatchSource& once_;
};

std::vector<RowRange> twice(std::vector<RowRange> rows) {
  for (auto& range : rows) range = {2 * range.begin, 2 * range.end};
  return rows;
}

/// Addends of one parameter's part on a rank, which are summed over the ranks of a stage.
struct Squares {
  double stage = 0;  ///< 1 + the number of the stage; 0 where this one has not got it
  double difference = 0;
  double reference = 0;
};

/// Gradients in float32, an equal part of each on every rank of its stage.
class Reference {
 public:
  Reference(const Mesh& mesh, const std::vector<std::string>& names)
      : names_(names), stage_(mesh.coordinate(axis::kPipeline)) {
    const int rank = mesh.world()->rank();
    const auto ranks = mesh.shapes().stage_of(rank);
    ranks_ = std::ssize(ranks);
    place_ = std::ranges::find(ranks, rank) - ranks.begin();
  }

  /// Collective, as compare().
  void keep(const ShardedBase& model) {
    model.visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
      parts_[name] = comm::read_on_host(part_of(gradient), name).clone();
    });
  }

  /// The relative error of each gradient, the same on every rank.
  ParameterErrors compare(const ShardedBase& model) const {
    std::vector<Squares> mine(names_.size());
    model.visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
      const auto at = std::ranges::find(names_, name) - names_.begin();
      TESSERA_INVARIANT(at < std::ssize(names_), "a gradient of no trained parameter");
      mine[static_cast<std::size_t>(at)] = squares_of(name, gradient);
    });
    return errors_of(gathered(model, mine));
  }

 private:
  at::Tensor part_of(const at::Tensor& gradient) const {
    const auto flat = gradient.reshape({-1});
    const std::int64_t begin = flat.numel() * place_ / ranks_;
    const std::int64_t end = flat.numel() * (place_ + 1) / ranks_;
    return flat.slice(0, begin, end);
  }

  /// In fp64, block by block: a part may be as large as an embedding.
  Squares squares_of(const std::string& name, const at::Tensor& gradient) const {
    constexpr std::int64_t kBlock = std::int64_t{1} << 22;
    const at::Tensor& expected = parts_.at(name);
    const at::Tensor found = comm::read_on_host(part_of(gradient), name);
    Squares squares{.stage = 1.0 + stage_};
    for (std::int64_t begin = 0; begin < found.numel(); begin += kBlock) {
      const std::int64_t end = std::min(begin + kBlock, found.numel());
      const auto wide = expected.slice(0, begin, end).to(at::kDouble);
      const auto difference = found.slice(0, begin, end).to(at::kDouble) - wide;
      squares.difference += difference.square().sum().item<double>();
      squares.reference += wide.square().sum().item<double>();
    }
    return squares;
  }

  static std::vector<std::vector<Squares>> gathered(const ShardedBase& model,
                                                    const std::vector<Squares>& mine) {
    const std::string bytes(reinterpret_cast<const char*>(mine.data()),
                            mine.size() * sizeof(Squares));
    std::vector<std::vector<Squares>> all;
    for (const auto& text :
         comm::all_gather_fixed(model.mesh().world()->control(), bytes, "errors of gradients")) {
      all.emplace_back(mine.size());
      std::memcpy(all.back().data(), text.data(), text.size());
    }
    return all;
  }

  /// The errors of all parameters; of a parameter that several stages have the first one counts.
  static ParameterErrors errors_of(const std::vector<std::vector<Squares>>& all) {
    ParameterErrors errors;
    for (std::size_t p = 0; p < all.front().size(); ++p) {
      double first = 0;
      for (const auto& rank : all) {
        const double stage = rank[p].stage;
        if (stage > 0 && (first == 0 || stage < first)) first = stage;
      }
      TESSERA_INVARIANT(first > 0, "a gradient that no stage has");
      double difference = 0, reference = 0;
      for (const auto& rank : all) {
        if (rank[p].stage != first) continue;
        difference += rank[p].difference;
        reference += rank[p].reference;
      }
      const double error = difference == 0 ? 0 : std::sqrt(difference / reference);
      errors.push_back(std::isnan(error) ? std::numeric_limits<double>::infinity() : error);
    }
    return errors;
  }

  const std::vector<std::string>& names_;
  int stage_;
  std::int64_t ranks_ = 1, place_ = 0;
  std::map<std::string, at::Tensor> parts_;
};

struct Dtypes {
  DType param = DType::kBFloat16;
  DType reduce = DType::kFloat32;
  bool operator==(const Dtypes&) const = default;
};

PrecisionRule rule_of(std::vector<std::string> match, const Dtypes& dtypes) {
  PrecisionRule rule;
  rule.match = std::move(match);
  rule.param_dtype = dtypes.param;
  rule.reduce_dtype = dtypes.reduce;
  return rule;
}

/// Runs the batch of a request under one policy after the other.
class Runs {
 public:
  Runs(const WhatIfRequest& request, World& world, const std::function<void()>& on_first_step)
      : request_(request),
        on_first_step_(on_first_step),
        source_(open_as("--model",
                        [&] { return open_model(request.config.model, request.config.lora); })),
        dims_(resolve_parallelism(request.config.parallelism, world.size())),
        mesh_(world.mesh(mesh_shape(dims_))),
        batch_(open_as("--batch",
                       [&] {
                         return open_gradients_batch(
                             request.batch, vocabulary_of(source_.spec, !source_.folder),
                             imposed_routing(request.impose_routing, source_.spec));
                       })),
        rows_(pieces_of_batch(request.config, batch_->rows_in_step(), dims_, data_rank(mesh_))) {
    require_same_at_all(*batch_, "--batch", world);
    check_positions(request.config.parallelism, batch_->row_tokens());
    models::check_learned_positions(source_.spec, batch_->row_tokens());
    for (const auto& one : contract({everything(DType::kFloat32)}).parameters) {
      if (one.trainable) names_.push_back(one.name);
    }
    reference_.emplace(mesh_, names_);
  }

  const ModelSource& source() const { return source_; }
  const BatchSource& batch() const { return *batch_; }
  const ParallelDims& dims() const { return dims_; }
  const std::vector<std::string>& names() const { return names_; }
  std::int64_t passes() const { return passes_; }

  static PrecisionRule everything(DType param, DType reduce = DType::kFloat32) {
    return rule_of({"*"}, {param, reduce});
  }

  Config config(const std::vector<PrecisionRule>& rules) const {
    Config config = request_.config;
    config.precision.param_dtype.dtype = DType::kBFloat16;
    config.precision.reduce_dtype.dtype = DType::kFloat32;
    config.precision.rule = rules;
    return config;
  }
  ModelContract contract(const std::vector<PrecisionRule>& rules) const {
    return contract(config(rules));
  }
  ModelContract contract(const Config& config) const {
    return resolve_model(source_, config, dims_);
  }

  /// The pass that all others are compared with.
  BatchLoss keep_reference() {
    double norm = 0;
    const auto loss =
        pass(config({everything(DType::kFloat32)}), *batch_, rows_, [&](const ShardedBase& model) {
          norm = gradient_norm(model);
          reference_->keep(model);
        });
    TESSERA_CHECK(std::isfinite(loss.mean()) && std::isfinite(norm), ErrorKind::kNumeric,
                  "--precision-what-if: found loss ", loss.mean(), " and gradient norm ", norm,
                  " in float32, expected finite values; look at the batch");
    return loss;
  }
  MeasuredPolicy measure(const Config& config, const BatchLoss& wide) {
    return measured(config, wide, *batch_, rows_);
  }
  /// With sums in another order.
  MeasuredPolicy measure_twice(const Config& config, const BatchLoss& wide) {
    const RowsTwice both(*batch_);
    return measured(config, wide, both, twice(rows_));
  }

 private:
  MeasuredPolicy measured(const Config& config, const BatchLoss& wide, const BatchSource& batch,
                          const std::vector<RowRange>& rows) {
    MeasuredPolicy policy;
    const auto loss = pass(config, batch, rows, [&](const ShardedBase& model) {
      policy.errors = reference_->compare(model);
    });
    policy.loss = loss.mean();
    policy.loss_error = std::abs(loss.mean() - wide.mean()) / std::abs(wide.mean());
    double moved = 0;
    for (std::size_t layer = 0; layer < wide.chosen.size(); ++layer) {
      for (std::size_t e = 0; e < wide.chosen[layer].size(); ++e) {
        moved += std::abs(loss.chosen[layer][e] - wide.chosen[layer][e]) / 2.0;
      }
    }
    policy.moved_choices = std::llround(moved);
    return policy;
  }

  BatchLoss pass(const Config& config, const BatchSource& batch, const std::vector<RowRange>& rows,
                 const std::function<void(const ShardedBase&)>& read) {
    const auto plan =
        resolve_pipeline(config, dims_, source_.spec, source_.description,
                         {resolve_micro_batches(config, Verb::kGradients, batch_->rows_in_step(),
                                                dims_.data_ranks()),
                          batch_->row_tokens()});
    auto parts = model_parts(source_, config, mesh_, Purpose::kTraining, plan ? &*plan : nullptr);
    const ModelContract contract = parts.contract;
    const auto model = parallelize(std::move(parts), source_, config, mesh_);
    std::optional<PipelineOfRun> stages;
    if (plan) {
      stages.emplace(*plan, stream_borders(*plan, dims_, source_.description, contract), *model);
    }
    if (passes_++ == 0 && on_first_step_) on_first_step_();
    auto options = step_options(config, nullptr);
    options.pipeline = stages ? &*stages : nullptr;
    const auto loss = forward_backward(*model, batch, 1, rows, options);
    read(*model);
    return loss;
  }

  const WhatIfRequest& request_;
  const std::function<void()>& on_first_step_;
  const ModelSource source_;
  const ParallelDims dims_;
  Mesh mesh_;
  const std::unique_ptr<BatchSource> batch_;
  const std::vector<RowRange> rows_;
  std::vector<std::string> names_;
  std::optional<Reference> reference_;
  std::int64_t passes_ = 0;
};

/// A rule for each group, over all that the file records of its parameters.
std::vector<PrecisionRule> rules_of(const std::vector<PrecisionGroup>& groups,
                                    const WideGroups& wide, const std::vector<bool>& narrow_wire) {
  std::vector<PrecisionRule> rules;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    rules.push_back(
        rule_of(groups[g].match, {wide[g] ? DType::kFloat32 : DType::kBFloat16,
                                  narrow_wire[g] ? DType::kBFloat16 : DType::kFloat32}));
  }
  return rules;
}

/// The same as few lines: what most groups have stands in [precision], and rules say what else
/// differs.
PrecisionConfig shortest(const Runs& runs, const std::vector<PrecisionGroup>& groups,
                         const WideGroups& wide, const std::vector<bool>& narrow_wire) {
  const auto full = runs.config(rules_of(groups, wide, narrow_wire));
  const auto wanted = runs.contract(full);
  const bool is_all_wide = std::ranges::all_of(wide, [](bool is_wide) { return is_wide; });
  const bool is_wire_narrow =
      !groups.empty() && std::ranges::all_of(narrow_wire, [](bool narrow) { return narrow; });
  auto config = runs.config({});
  config.precision.param_dtype.dtype = is_all_wide ? DType::kFloat32 : DType::kBFloat16;
  config.precision.reduce_dtype.dtype = is_wire_narrow ? DType::kBFloat16 : DType::kFloat32;
  const auto without_rules = runs.contract(config);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    PrecisionRule rule;
    rule.match = groups[g].match;
    for (const std::size_t p : groups[g].parameters) {
      const auto& wish = wanted.parameters[p];
      const auto& now = without_rules.parameters[p];
      if (wish.compute != now.compute) rule.param_dtype = wish.compute.dtype;
      if (wish.reduce != now.reduce) rule.reduce_dtype = wish.reduce;
    }
    if (rule.param_dtype || rule.reduce_dtype) config.precision.rule.push_back(std::move(rule));
  }
  return hash(runs.contract(config)) == hash(wanted) ? config.precision : full.precision;
}

/// Which trained parameters a group has, as places among the names.
std::vector<std::vector<std::size_t>> trained_places(const std::vector<PrecisionGroup>& groups,
                                                     const std::vector<GradContract>& contracts,
                                                     const std::vector<std::string>& names) {
  std::vector<std::vector<std::size_t>> places(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const std::size_t p : groups[g].parameters) {
      const auto at = std::ranges::find(names, contracts[p].name);
      if (at != names.end()) places[g].push_back(static_cast<std::size_t>(at - names.begin()));
    }
  }
  return places;
}

ParameterErrors differences(const ParameterErrors& one, const ParameterErrors& other) {
  ParameterErrors found;
  for (std::size_t p = 0; p < one.size(); ++p) found.push_back(std::abs(one[p] - other[p]));
  return found;
}

/// With the bytes of rank 0 in a step of the same batch, where a dry step can count them.
PolicyCost counted_cost(const Runs& runs, Config config) {
  PolicyCost cost = cost_of(runs.contract(config));
  const auto data_ranks = runs.dims().data_ranks();
  const auto pieces = pieces_of_batch(config, runs.batch().rows_in_step(), runs.dims(), 0);
  const std::int64_t local = std::max<std::int64_t>(1, pieces.front().size());
  config.training.seq_len = runs.batch().row_tokens();
  config.training.local_batch_size = local;
  config.training.global_batch_size = local * data_ranks * std::ssize(pieces);
  config.pipeline.micro_batches = -1;
  config.optimizer = {};
  config.optimizer.name = OptimizerName::kSgd;
  try {
    const auto step = dry_step(config, runs.source(), 0, runs.dims().world_size());
    cost.activation_bytes = activation_bytes(step, rank_memory(step)).peak;
    cost.sent_bytes = step_traffic(config, step).total();
  } catch (const Error& error) {  // the errors of gradients are found without it
    log::warn("--precision-what-if: activations and bytes sent are not counted: ", error.what());
  }
  return cost;
}

void check_request(const WhatIfRequest& request) {
  const auto& config = request.config;
  TESSERA_CHECK(config.compile.mode == CompileChoice::kOff, ErrorKind::kConfig,
                "compile.mode: found ", word_of(config.compile.mode),
                ", expected off with --precision-what-if, which runs each policy once");
  TESSERA_CHECK(config.lora.dropout == 0.0, ErrorKind::kConfig, "lora.dropout: found ",
                config.lora.dropout,
                ", expected 0 with --precision-what-if: what is drawn is no rounding");
}

/// The candidates of one group each, and the noise that they are judged by.
void measure_candidates(Runs& runs, const BatchLoss& wide, WhatIfReport& report) {
  const auto& groups = report.groups;
  const std::vector<bool> wires(groups.size(), false);
  const auto config_of = [&](const WideGroups& which) {
    return runs.config(rules_of(groups, which, wires));
  };
  const WideGroups none(groups.size(), false), all(groups.size(), true);
  report.table.wide_noise = runs.measure_twice(config_of(all), wide).errors;
  report.narrow = runs.measure(config_of(none), wide);
  report.table.narrow = report.narrow.errors;
  report.table.narrow_noise =
      differences(runs.measure_twice(config_of(none), wide).errors, report.narrow.errors);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    log::info("precision what-if: group ", g + 1, " of ", groups.size(), ", ", groups[g].name);
    auto alone = none, others = all;
    alone[g] = true;
    others[g] = false;
    report.widened.push_back(runs.measure(config_of(alone), wide));
    report.narrowed.push_back(runs.measure(config_of(others), wide));
    report.table.widened.push_back(report.widened.back().errors);
    report.table.narrowed.push_back(report.narrowed.back().errors);
  }
}

GroupCosts costs_of_groups(const Runs& runs, const WhatIfReport& report) {
  const std::size_t groups = report.groups.size();
  const std::vector<bool> wires(groups, false);
  std::vector<PolicyCost> costs;
  for (std::size_t g = 0; g < groups; ++g) {
    WideGroups alone(groups, false);
    alone[g] = true;
    costs.push_back(counted_cost(runs, runs.config(rules_of(report.groups, alone, wires))));
  }
  return group_costs(report.narrow_cost, costs);
}

/// Gradients in bfloat16 on the wire, where the layout has a wire that rounds.
void choose_wires(Runs& runs, const BatchLoss& wide, const std::vector<GradContract>& contracts,
                  WhatIfReport& report) {
  const std::size_t groups = report.groups.size();
  report.narrow_wire.assign(groups, false);
  auto on_the_wire = runs.measure(runs.config(rules_of(report.groups, WideGroups(groups, true),
                                                       std::vector<bool>(groups, true))),
                                  wide);
  if (std::ranges::all_of(on_the_wire.errors, [](double error) { return error == 0; })) return;
  report.wire = std::move(on_the_wire);
  report.narrow_wire = narrow_wires(report.found.errors, report.wire->errors,
                                    trained_places(report.groups, contracts, report.names),
                                    held_parameters(report.table, report.bound), report.bound);
}

}  // namespace

WhatIfReport precision_what_if(const WhatIfRequest& request, World& world,
                               const std::function<void()>& on_first_step) {
  check_request(request);
  Runs runs(request, world, on_first_step);
  const auto contract = runs.contract(runs.config({Runs::everything(DType::kFloat32)}));
  const auto narrow_contract = runs.contract(runs.config({Runs::everything(DType::kBFloat16)}));
  WhatIfReport report{.bound = request.bound,
                      .rows = runs.batch().rows_in_step(),
                      .tokens = runs.batch().row_tokens(),
                      .ranks = world.size(),
                      .names = runs.names(),
                      .groups = precision_groups(runs.source().description.parameters,
                                                 contract.parameters, narrow_contract.parameters)};
  report.routing_is_imposed = request.impose_routing;
  const auto& groups = report.groups;
  const BatchLoss wide = runs.keep_reference();
  report.wide_loss = wide.mean();
  double choices = 0;
  for (const auto& layer : wide.chosen) {
    for (const double count : layer) choices += count;
  }
  report.choices = std::llround(choices);
  measure_candidates(runs, wide, report);

  report.wide_cost = counted_cost(runs, runs.config({Runs::everything(DType::kFloat32)}));
  report.narrow_cost = counted_cost(runs, runs.config({Runs::everything(DType::kBFloat16)}));
  report.costs = costs_of_groups(runs, report);
  const PolicyProblem problem{
      .table = report.table, .costs = report.costs.bytes, .bound = request.bound};
  const std::vector<bool> wide_wires(groups.size(), false);
  report.found = cheapest_policy(problem, [&](const WideGroups& which) {
    return runs.measure(runs.config(rules_of(groups, which, wide_wires)), wide).errors;
  });
  if (world.size() > 1) {
    choose_wires(runs, wide, contract.parameters, report);
  } else {
    report.narrow_wire = wide_wires;
  }
  report.precision = shortest(runs, groups, report.found.wide, report.narrow_wire);
  auto config = runs.config({});
  config.precision = report.precision;
  report.verified = runs.measure(config, wide);
  report.passes = runs.passes();
  report.found_cost = counted_cost(runs, config);
  return report;
}

}  // namespace tessera::train
