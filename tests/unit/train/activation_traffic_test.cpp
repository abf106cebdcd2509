// Counts what ranks of cp, tp and ep send each other of activations in a step: the formulas of
// docs/communication.md, and nothing else.
//
// Every token goes to every expert (experts a token = experts), so that dispatch is known without
// imposing it, or all tokens to the same three; which rows go where is tests/dist's. Text only:
// Gemma 4's tower does not run. Parameters and gradients travel with them: bytes of the plan, calls
// of the document.

#include <fstream>

#include "support/test.h"
#include "train/dry/step_traffic.h"
#include "train/trainer.h"
#include "unit/train/parallel_degrees.h"
#include "unit/train/planned_run.h"
#include "unit/train/read_trace.h"
#include "unit/train/run_case.h"
#include "unit/train/traffic_formulas.h"

namespace tessera::train::activation_traffic_test {
namespace {

/// The reference's model with room for bytes, and with as many experts a token as asked.
void write_model_of(const TemporaryFolder& folder, const Family& family, const Degrees& degrees) {
  write_model(folder, family.name + "-fp32", [&](auto& model, auto& text) {
    make_room_for_bytes(model, text);
    for (const char* key : {"num_experts_per_tok", "top_k_experts"}) {
      if (text.contains(key)) text[key] = degrees.experts_per_token();
    }
    if (degrees.chosen == Chosen::kTheSame3) text["initializer_range"] = 0.0;
  });
}

Config traffic_case(const TemporaryFolder& folder, const Degrees& d) {
  Config config = run_case(folder, Head::kOwn);
  std::string text;
  for (int line = 0; line < 300; ++line) text += "line " + std::to_string(line) + " of a page.\n";
  folder.write("page.txt", text);
  set_parallelism(config, d);
  config.activation_checkpoint.mode = d.recompute;
  config.precision.param_dtype.dtype =
      d.dtypes == Dtypes::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
  if (d.dtypes == Dtypes::kBFloat16SumsIn32) {
    config.precision.activation_reduce_dtype.dtype = DType::kFloat32;
  }
  config.training.seq_len = d.positions;
  config.training.global_batch_size = d.data_ranks() * d.micro_batches;
  config.training.steps = 2;
  config.metrics.trace_steps = {2};
  return config;
}

Activations counted(const Rows& rows, int rank) {
  Activations found;
  const auto spans = rows.find({rank, "activations"});
  if (spans == rows.end()) return found;
  for (const Span& span : spans->second) {
    Sent& sent = found[span.arguments["axis"].get<std::string>() + " " +
                       span.arguments["kind"].get<std::string>()];
    sent.count += 1;
    sent.bytes += span.arguments["sent_bytes"].get<std::int64_t>();
  }
  return found;
}

Activations counted(const DryStep& step) {
  Activations found;
  for (const TraceSpan& span : step.spans) {
    if (span.row != TraceRow::kActivations) continue;
    const std::map<std::string, decltype(TraceSpan::Argument::second)> arguments(
        span.arguments.begin(), span.arguments.end());
    Sent& sent = found[std::get<std::string>(arguments.at("axis")) + " " +
                       std::get<std::string>(arguments.at("kind"))];
    sent.count += 1;
    sent.bytes += std::get<std::int64_t>(arguments.at("sent_bytes"));
  }
  return found;
}

/// The traffic of parameters and gradients, in calls and bytes: one rank's.
struct Parameters {
  Sent gathers;
  Sent reductions;
  Sent replicas;
  bool operator==(const Parameters&) const = default;
};
void PrintTo(const Parameters& sent, std::ostream* out) {
  *out << "gathers ";
  PrintTo(sent.gathers, out);
  *out << ", reductions ";
  PrintTo(sent.reductions, out);
  *out << ", replicas ";
  PrintTo(sent.replicas, out);
}

/// A unit's buckets go out as one batch a group.
std::int64_t batches(const layout::PlannedUnit& unit) {
  std::set<std::vector<std::string>> groups;
  for (const layout::BucketPlan& bucket : unit.plan.buckets) {
    const auto& axes = bucket.key.reductions.shard_axes;
    if (bucket.ranks > 1) groups.insert({axes.begin(), axes.end()});
  }
  return static_cast<std::int64_t>(groups.size());
}

/// All parameters are trainable; replicas are one or two.
Parameters planned(const RunOfPlan& run, const DryStep& dry, const Degrees& d) {
  const layout::ModelPlan& plan = run.plan;
  const StepTraffic traffic = step_traffic(run.config, dry);
  Parameters expected{{0, traffic.gathers}, {0, traffic.reductions}, {}};
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    const std::int64_t groups = batches(plan.units[u]);
    // Once the root, which is kept; again in each backward, but the last, which was kept for it.
    expected.gathers.count +=
        u == 0 ? groups : d.micro_batches * groups * (u + 1 < plan.units.size() ? 2 : 1);
    expected.reductions.count += groups;
    if (d.replicate == 1) continue;
    expected.replicas.count = 1;
    for (const layout::BucketPlan& bucket : plan.units[u].plan.buckets) {
      expected.replicas.bytes += layout::reduced_bytes(bucket) / bucket.ranks;
    }
  }
  return expected;
}

Parameters counted_parameters(const Rows& rows, int rank) {
  const auto of = [&](const char* row) {
    const auto spans = rows.find({rank, row});
    if (spans == rows.end()) return Sent{};
    return Sent{static_cast<std::int64_t>(spans->second.size()), sent(spans->second)};
  };
  return {of("gathers"), of("reductions"), of("sums over replicas")};
}

class ActivationTraffic : public ::testing::TestWithParam<std::tuple<Family, Degrees>> {};

TEST_P(ActivationTraffic, IsThatOfTheFormulas) {
  const auto& [family, degrees] = GetParam();
  if (family.mlps == Mlps::kDense && (degrees.ep > 1 || degrees.etp > 1)) GTEST_SKIP();
  const TemporaryFolder folder;
  Config config = traffic_case(folder, degrees);
  write_model_of(folder, family, degrees);
  on_ranks(degrees.ranks(), [&](World& world) { run_training(config, world); });

  const Rows rows = read_trace(folder / "run/metrics/trace/step-2.json");
  const PlannedRun known = planned_run(config, degrees.ranks());
  const RunOfPlan run = known.of(config);
  for (int rank = 0; rank < degrees.ranks(); ++rank) {
    SCOPED_TRACE(rank);
    const DryStep dry = dry_step(config, known.source, rank, degrees.ranks());
    EXPECT_EQ(counted(rows, rank), Formulas(run.spec, family, degrees, rank).of_step());
    // Experts get as many tokens each there, and all ranks have as many as this one.
    if (degrees.chosen == Chosen::kAll && degrees.positions % degrees.ranks() == 0) {
      EXPECT_EQ(counted(rows, rank), counted(dry));
    }
    if (family.mlps == Mlps::kGemma) continue;  // the plan counts the tower, too
    EXPECT_EQ(counted_parameters(rows, rank), planned(run, dry, degrees));
  }
}

constexpr auto kAll = RouterTokens::kAll;
const std::vector<Family> kFamilies{{"qwen3"},
                                    {"qwen3-moe", Mlps::kRouted},
                                    {"deepseek-v2", Mlps::kRoutedAndShared, 1},
                                    {"gpt-oss", Mlps::kRouted},
                                    {"gemma4", Mlps::kGemma}};
const std::vector<Degrees> kLayouts{
    {.name = "tp2", .tp = 2},
    {.name = "tp2_whole", .tp = 2, .sequence = false},
    {.name = "tp2_all", .tp = 2, .router = kAll},
    {.name = "tp2_etp2", .tp = 2, .etp = 2},
    {.name = "tp2_etp2_whole", .tp = 2, .etp = 2, .sequence = false},
    {.name = "tp2_all_whole", .tp = 2, .sequence = false, .router = kAll},
    {.name = "tp4", .tp = 4},
    {.name = "tp4_whole", .tp = 4, .sequence = false},
    {.name = "tp2_full", .tp = 2, .recompute = RecomputeMode::kFull},
    {.name = "dp2_tp2_two", .shard = 2, .tp = 2, .micro_batches = 2},
    {.name = "replicas_tp2", .replicate = 2, .tp = 2},
    {.name = "tp2_bf16", .tp = 2, .dtypes = Dtypes::kBFloat16},
    {.name = "tp2_bf16_sums32", .tp = 2, .dtypes = Dtypes::kBFloat16SumsIn32},
};
const std::vector<Degrees> kExpertLayouts{
    {.name = "ep2", .shard = 2, .ep = 2},
    {.name = "ep4_two", .shard = 4, .ep = 4, .micro_batches = 2},
    {.name = "dp4_ep2_full", .shard = 4, .ep = 2, .recompute = RecomputeMode::kFull},
    {.name = "tp2_ep2", .tp = 2, .ep = 2},
    {.name = "tp2_ep2_whole", .tp = 2, .ep = 2, .sequence = false},
    {.name = "tp2_ep2_all", .tp = 2, .ep = 2, .router = kAll},
    {.name = "tp2_ep2_all_whole", .tp = 2, .ep = 2, .sequence = false, .router = kAll},
    {.name = "dp2_tp2_ep4", .shard = 2, .tp = 2, .ep = 4},
    {.name = "dp2_tp2_ep2_etp2", .shard = 2, .tp = 2, .ep = 2, .etp = 2},
    {.name = "dp2_tp2_ep2_etp2_whole", .shard = 2, .tp = 2, .ep = 2, .etp = 2, .sequence = false},
    {.name = "tp2_ep2_selective", .tp = 2, .ep = 2, .recompute = RecomputeMode::kSelective},
    {.name = "replicas_tp2_ep2", .replicate = 2, .tp = 2, .ep = 2},
    {.name = "tp4_etp4", .tp = 4, .etp = 4},
    {.name = "uneven", .tp = 2, .ep = 2, .sequence = false, .positions = 15},
    {.name = "uneven_all", .tp = 2, .ep = 2, .sequence = false, .router = kAll, .positions = 15},
};
/// Layouts that one family shows for all.
constexpr auto kBf16 = Dtypes::kBFloat16;
constexpr auto kSums32 = Dtypes::kBFloat16SumsIn32;
const std::vector<Degrees> kOnceLayouts{
    {.name = "rounds_two", .tp = 4, .sequence = false, .positions = 1040},
    {.name = "rounds_one_bf16", .tp = 4, .sequence = false, .positions = 1024, .dtypes = kBf16},
    {.name = "rounds_two_bf16", .tp = 4, .sequence = false, .positions = 1040, .dtypes = kBf16},
    {.name = "rounds_two_sums32", .tp = 4, .sequence = false, .positions = 1040, .dtypes = kSums32},
    {.name = "uneven4_bf16", .tp = 4, .ep = 4, .sequence = false, .positions = 14, .dtypes = kBf16},
    {.name = "ep2_skewed", .shard = 2, .ep = 2, .chosen = Chosen::kTheSame3},
    {.name = "ep4_skewed", .tp = 4, .ep = 4, .chosen = Chosen::kTheSame3},
    {.name = "dp2_tp2_ep4_skewed", .shard = 2, .tp = 2, .ep = 4, .chosen = Chosen::kTheSame3},
    {.name = "ep2_etp2_skewed",
     .shard = 2,
     .tp = 2,
     .ep = 2,
     .etp = 2,
     .dtypes = kSums32,
     .chosen = Chosen::kTheSame3},
};

/// Ranks that share rows.
const std::vector<Family> kContextFamilies{
    {"qwen3"}, {"deepseek-v2", Mlps::kRoutedAndShared, 1}, {"gpt-oss", Mlps::kRouted}};
const std::vector<Degrees> kContextLayouts{
    {.name = "cp2", .cp = 2},
    {.name = "cp2_heads", .cp = 2, .form = ContextForm::kHeads},
    {.name = "cp2_tp2_full", .tp = 2, .recompute = RecomputeMode::kFull, .cp = 2},
};
const std::vector<Degrees> kOnceContextLayouts{
    {.name = "cp4_bf16", .positions = 32, .dtypes = kBf16, .cp = 4},
    {.name = "cp4_ep2", .ep = 2, .positions = 32, .cp = 4},
    {.name = "cp2_tp2_whole", .tp = 2, .sequence = false, .cp = 2},
    {.name = "dp2_cp2_ep4_two", .shard = 2, .ep = 4, .micro_batches = 2, .cp = 2},
};

std::string name_of(const ::testing::TestParamInfo<std::tuple<Family, Degrees>>& info) {
  std::string name = std::get<0>(info.param).name + "_" + std::get<1>(info.param).name;
  std::ranges::replace(name, '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Tensor, ActivationTraffic,
                         ::testing::Combine(::testing::ValuesIn(kFamilies),
                                            ::testing::ValuesIn(kLayouts)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(NormsOverHeads, ActivationTraffic,
                         ::testing::Combine(::testing::Values(Family{"olmo2"}),
                                            ::testing::ValuesIn(kLayouts)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Experts, ActivationTraffic,
                         ::testing::Combine(::testing::ValuesIn(kFamilies.begin() + 1,
                                                                kFamilies.end()),
                                            ::testing::ValuesIn(kExpertLayouts)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Once, ActivationTraffic,
                         ::testing::Combine(::testing::Values(Family{"qwen3-moe", Mlps::kRouted}),
                                            ::testing::ValuesIn(kOnceLayouts)),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Context, ActivationTraffic,
                         ::testing::Combine(::testing::ValuesIn(kContextFamilies),
                                            ::testing::ValuesIn(kContextLayouts)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(OnceContext, ActivationTraffic,
                         ::testing::Combine(::testing::Values(Family{"qwen3-moe", Mlps::kRouted}),
                                            ::testing::ValuesIn(kOnceContextLayouts)),
                         name_of);

}  // namespace
}  // namespace tessera::train::activation_traffic_test
