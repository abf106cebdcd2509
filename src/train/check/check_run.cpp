#include "train/check/check_run.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <utility>

#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "check/carried_contracts.h"
#include "check/rank_order.h"
#include "comm/batch.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/dry/dry_batches.h"
#include "train/dry/rank_memory.h"
#include "train/dry/step_traffic.h"
#include "train/pipeline/pipeline_memory.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/plan_of_run.h"
#include "train/small/compare_runs.h"

namespace tessera::train {
namespace {

using check::Finding;
using check::FindingKind;

/// A rank that stands for those of its place.
struct Role {
  int rank;
  std::string place;
};

/// One of each place of the pipeline; and for each other axis the second and the last rank.
std::vector<Role> roles_of(const MeshShapes& mesh) {
  std::vector<Role> roles;
  const auto add = [&](int rank, std::string place) {
    const bool known =
        std::ranges::any_of(roles, [&](const Role& role) { return role.rank == rank; });
    if (!known) roles.push_back({rank, std::move(place)});
  };
  const auto stages = mesh.ranks_of(0, {axis::kPipeline});
  for (std::size_t pp = 0; pp < stages.size(); ++pp) {
    add(stages[pp], stages.size() == 1 ? "first of all axes" : concat("pp ", pp));
  }
  for (const std::string_view name : {axis::kReplicate, axis::kShard, axis::kContext, axis::kTensor,
                                      axis::kExpert, axis::kExpertTensor}) {
    if (mesh.size_of(name) == 1) continue;
    const auto ranks = mesh.ranks_of(0, {name});
    add(ranks[1], concat("second of ", name));
    add(ranks.back(), concat("last of ", name));
  }
  return roles;
}

/// A message of control: ranks agree first on how many bytes the longest of them has, which a dry
/// rank knows of itself alone.
bool is_of_bytes(const comm::Entry& entry) {
  return !entry.ops.empty() && std::ranges::all_of(entry.ops, [](const comm::OpFacts& op) {
    return op.wire == at::kByte;
  });
}

check::NotedRank noted(const Role& role, const DryStep& step) {
  check::NotedRank rank{.rank = role.rank, .place = role.place};
  for (const comm::DryCollective& one : step.collectives) {
    const bool is_control = is_of_bytes(one.entry);
    rank.collectives.push_back({.group = one.group,
                                .fingerprint = is_control ? 0 : one.entry.fingerprint,
                                .unit = one.entry.label.unit,
                                .words = is_control ? concat(to_string(one.entry.ops.front().kind),
                                                             " of ", one.entry.label.unit)
                                                    : to_string(one.entry)});
  }
  for (const comm::DryMessage& one : step.messages) {
    rank.messages.push_back(
        {.words = one.tag, .sends = one.sends, .peer = one.peer, .bytes = one.bytes});
  }
  return rank;
}

/// Lists the dtypes in which the sharding of units sends, by unit.
std::vector<check::SeenDtype> wires_of(const DryStep& step) {
  std::vector<check::SeenDtype> seen;
  for (const comm::DryCollective& one : step.collectives) {
    for (const comm::OpFacts& op : one.entry.ops) {
      const bool gathers = op.kind == comm::Kind::kAllGather && one.group.starts_with("gather");
      const bool reduces = op.kind == comm::Kind::kReduceScatter && one.group.starts_with("reduce");
      if (!gathers && !reduces) continue;
      seen.push_back({.unit = one.entry.label.unit,
                      .what = gathers ? "gather" : "reduction",
                      .dtype = std::string(to_string(to_dtype(op.wire)))});
    }
  }
  return seen;
}

/// By parameter of the contract, its unit.
std::vector<std::string> units_of(const ModelContract& contract,
                                  const models::ModelDescription& model) {
  std::map<std::string, std::string> unit_of;
  for (const auto& row : model.parameters) unit_of.emplace(row.name, row.unit);
  std::vector<std::string> units;
  for (const auto& one : contract.parameters) units.push_back(unit_of[one.name]);
  return units;
}

/// "float32", where libtorch says "Float".
std::string word_of(const std::string& dtype) {
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    if (c10::toString(type) == dtype) return std::string(to_string(to_dtype(type)));
  }
  return dtype;
}

std::vector<Finding> findings_of(const std::vector<DtypeFinding>& dtypes) {
  std::vector<Finding> findings;
  for (const DtypeFinding& one : dtypes) {
    findings.push_back(
        {.kind = FindingKind::kDtype,
         .operation = one.op,
         .unit = one.unit,
         .found = concat("a result of ", word_of(one.found), ", made so by ", one.cause),
         .expected = concat(to_string(one.expected), ", in which the unit computes"),
         .mend = "cast it, or put what is wide on purpose into a WideScope"});
  }
  return findings;
}

/// Sums that the policy wants rounded before they are whole.
std::vector<std::string> early_roundings(const ModelContract& contract,
                                         const PrecisionConfig& precision) {
  std::map<std::string, std::int64_t> narrow;
  for (const auto& one : contract.parameters) {
    if (one.trainable && size_of(one.reduce) < size_of(one.accumulate)) {
      ++narrow[std::string(to_string(one.reduce))];
    }
  }
  std::vector<std::string> notes;
  for (const auto& [dtype, count] : narrow) {
    notes.push_back(concat("gradients of ", count_text(count, "parameter"), " are rounded to ",
                           dtype, " before they are summed over ranks (precision.reduce_dtype)"));
  }
  const auto& sums = precision.activation_reduce_dtype.dtype;
  if (sums && size_of(*sums) < 4) {
    notes.push_back(concat("sums of activations over tp are rounded to ", to_string(*sums),
                           " first (precision.activation_reduce_dtype)"));
  }
  return notes;
}

check::Place place_of(int pp, const Role& role, const Config& config, const DryStep& step) {
  const RankMemory held = rank_memory(step);
  check::Place place{.pp = pp, .rank = role.rank, .peak = step.peak};
  place.held = {{"parameters", held.parameters},
                {"gradients", held.gradients},
                {"moments", held.moments},
                {"master", held.master},
                {"unsharded peak", held.unsharded},
                {"reductions", held.reductions},
                {"activations", activation_bytes(step, held).peak}};
  for (const DryPass& one : step.passes) {
    place.passes.push_back({one.unit, one.is_forward, one.before, one.most, one.after});
  }
  const StepTraffic traffic = step_traffic(config, step);
  place.sent = {{"dp", "gathers of parameters", traffic.gathers},
                {"dp", "reductions of gradients", traffic.reductions},
                {"dp", "sums over replicas", traffic.replicas}};
  if (traffic.of_tokens) {
    place.sent.push_back({"tp", "activations", traffic.of_tokens->activations});
    if (traffic.of_tokens->context > 0) {
      place.sent.push_back({"cp", "keys and values of attention", traffic.of_tokens->context});
    }
    place.sent.push_back({"ep", "rows of experts", traffic.of_tokens->experts});
    place.sent.push_back({"pp", "messages between stages", traffic.of_tokens->messages});
  }
  return place;
}

/// The same run with no more micro-batches than order and dtypes need: twice as many as there are
/// stages.
Config with_few_micro_batches(const Config& stepped, const ParallelDims& dims,
                              const std::optional<PipelinePlan>& pipeline) {
  const auto batch = resolve_batch(stepped.training, dims.data_ranks());
  const std::int64_t few = 2 * (pipeline ? pipeline->schedule.stages() : 1);
  Config config = stepped;
  if (batch.micro_batches > few) {
    config.training.global_batch_size = few * batch.local * dims.data_ranks();
  }
  return config;
}

/// Dry steps of ranks that stand for all, and what they find.
class WholeRun {
 public:
  WholeRun(const ModelSource& source, const ParallelDims& dims, const ModelContract& resolved,
           const ExpertLoads& loads, check::Report& report)
      : source_(source),
        dims_(dims),
        mesh_(mesh_shape(dims)),
        resolved_(resolved),
        units_(units_of(resolved, source.description)),
        loads_(loads),
        report_(report) {}

  /// One rank of each place of the pipeline, as it steps.
  std::vector<DryStep> step_places(const Config& config, const Config& stepped) {
    std::vector<DryStep> places;
    std::vector<check::NotedRank> noted_ranks;
    for (Role role : roles_of(mesh_)) {
      if (std::ssize(places) == dims_.pp) break;
      role.rank = busiest_rank(loads_, mesh_, role.rank);
      DryStep step = dry_step(stepped, source_, role.rank, dims_.world_size(),
                              {.dtypes = WatchDtypes::kYes, .loads = loads_});
      if (!step.failed.empty()) {
        check::append(report_.findings, findings_of(step.dtypes));
        throw Error(ErrorKind::kUsage, step.failed);
      }
      look_at(role, step, noted_ranks);
      report_.places.push_back(place_of(static_cast<int>(places.size()), role, config, step));
      places.push_back(std::move(step));
    }
    check::append(report_.findings, check::wrong_order(noted_ranks));
    return places;
  }
  /// The first rank of all, and the second and last one of each other axis.
  void step_others(const Config& few) {
    const auto roles = roles_of(mesh_);
    if (std::ssize(roles) == dims_.pp) return;
    std::vector<check::NotedRank> noted_ranks;
    for (std::size_t i = 0; i < roles.size(); ++i) {
      if (i > 0 && std::cmp_less(i, dims_.pp)) continue;
      look_at(roles[i],
              dry_step(few, source_, roles[i].rank, dims_.world_size(), {.loads = loads_}),
              noted_ranks);
    }
    check::append(report_.findings, check::wrong_order(noted_ranks));
  }

  std::string as_text() const {
    return concat(
        "contracts, dtypes and order of ", count_text(std::ssize(ranks_), "rank"),
        ", which stand for all: ", count_text(std::ssize(resolved_.parameters), "parameter"), ", ",
        collectives_, " collectives and messages");
  }

 private:
  void look_at(const Role& role, const DryStep& step, std::vector<check::NotedRank>& ranks) {
    ranks.push_back(noted(role, step));
    ranks_.insert(role.rank);
    collectives_ += step.collectives.size() + step.messages.size();
    auto found = check::wrong_contracts(step.contract, resolved_, mesh_);
    check::append(found, check::wrong_wires(wires_of(step), resolved_, units_));
    check::append(found, findings_of(step.dtypes));
    for (Finding& one : found) {
      if (known_.insert(to_string(one)).second) report_.findings.push_back(std::move(one));
    }
  }

  const ModelSource& source_;
  const ParallelDims dims_;
  const MeshShapes mesh_;
  const ModelContract& resolved_;
  const std::vector<std::string> units_;
  const ExpertLoads& loads_;
  check::Report& report_;
  std::set<int> ranks_;
  std::size_t collectives_ = 0;
  std::set<std::string> known_;
};

void check_small(const Config& config, const ModelSource& source, const ParallelDims& dims,
                 check::Report& report) {
  const SmallRun small = small_run(config, source, dims);
  auto compared = compare_in_small(small);
  check::append(report.findings, std::move(compared.findings));
  if (small.dims.world_size() == 1) {
    report.compared.emplace_back(
        "the model in small ran on one rank: there is no layout to compare");
    return;
  }
  report.compared.push_back(
      concat("transitions, units and gradients of the model in small, in float32 on ",
             count_text(small.dims.world_size(), "rank"), " (", to_string(mesh_shape(small.dims)),
             ") and on one: ", count_text(compared.gradients, "gradient")));
}

void check_memory(check::Report& report) {
  if (!report.memory) return;
  for (const check::Place& place : report.places) {
    if (place.peak <= *report.memory) continue;
    report.findings.push_back(
        {.kind = FindingKind::kMemory,
         .operation = concat("a step of rank ", place.rank),
         .axis = report.places.size() > 1 ? concat("pp ", place.pp) : "",
         .found = concat(size_text(place.peak), " at the most of it"),
         .expected = concat("at most ", size_text(*report.memory), " (", report.memory_from, ")"),
         .mend =
             "shard over more ranks, recompute activations (activation_checkpoint.mode), or take "
             "fewer rows (training.local_batch_size)"});
  }
}

}  // namespace

CheckedRun check_run(const Config& config, const ModelSource& source, int world,
                     std::optional<std::int64_t> memory, const std::string& from,
                     const ExpertLoads& loads) {
  const ParallelDims dims = resolve_parallelism(config.parallelism, world);
  resolve_batch(config.training, dims.data_ranks());  // refuses rows that they do not divide
  CheckedRun checked;
  check::Report& report = checked.report;
  report.model = config.model.path.empty() ? config.model.config : config.model.path;
  report.layout = to_string(mesh_shape(dims));
  report.world = world;
  report.knows_tokens = config.training.seq_len.has_value();
  report.memory = memory;
  report.memory_from = from;
  ModelContract resolved = resolve_model(source, config, dims);
  const Config stepped = stepped_config(config, dims);
  const auto pipeline = resolve_pipeline(
      config, dims, source.spec, source.description,
      {resolve_micro_batches(config, Verb::kContract, rows_in_step(config.training, dims),
                             dims.data_ranks()),
       config.training.seq_len.value_or(0)});
  if (pipeline) note_copies(*pipeline, source.description, resolved);
  require_locked(config, resolved, SaysDifferences::kYes);
  report.notes = early_roundings(resolved, config.precision);
  if (!loads.are_even()) report.notes.emplace_back("experts are chosen by the given loads");
  if (const auto images = images_text(config, source); !images.empty()) {
    report.notes.push_back(images);
  }
  std::exception_ptr uncounted;
  try {
    WholeRun whole(source, dims, resolved, loads, report);
    checked.steps = whole.step_places(config, stepped);
    whole.step_others(with_few_micro_batches(stepped, dims, pipeline));
    report.compared.push_back(whole.as_text());
  } catch (const Error& error) {
    const bool is_refused =
        error.kind() == ErrorKind::kConfig || error.kind() == ErrorKind::kContract;
    if (is_refused) throw;
    uncounted = std::current_exception();  // what stops a dry step may be what the small run finds
  }
  check_small(config, source, dims, report);
  if (uncounted) {
    if (report.findings.empty()) std::rethrow_exception(uncounted);
    report.places.clear();  // of earlier places alone
    checked.steps.clear();
    report.notes.emplace_back(
        "the dry step of the whole run ended early, so that neither its order nor "
        "its memory is known");
  }
  check_memory(report);
  return checked;
}

}  // namespace tessera::train
