// What ranks of tp and ep send each other of activations in a step, counted: the formulas of
// docs/communication.md, and nothing else.
//
// Every token goes to every expert (experts a token = experts), so that dispatch is known without
// imposing it; which rows go where is tests/dist's. Text only: Gemma 4's tower does not run.
#include <gmock/gmock.h>

#include <fstream>
#include <map>
#include <ostream>

#include "train/model_plan.h"
#include "train/parallelize.h"
#include "train/trainer.h"
#include "unit/train/read_trace.h"
#include "unit/train/run_case.h"

namespace tessera::train {
namespace {

constexpr std::int64_t kPositions = 16;
constexpr std::int64_t kFloatBytes = 4;
constexpr std::int64_t kExperts = 8;

struct Sent {
  std::int64_t count = 0;
  std::int64_t bytes = 0;
  bool operator==(const Sent&) const = default;
};
void PrintTo(const Sent& sent, std::ostream* out) {
  *out << sent.count << " of " << sent.bytes << " B together";
}
/// By "axis kind".
using Activations = std::map<std::string, Sent>;

enum class Mlps { kDense, kRouted, kRoutedAndShared, kGemma };

struct Family {
  std::string name;
  Mlps mlps = Mlps::kDense;
  std::int64_t dense_layers = 0;  ///< in front of those with experts
};

std::ostream& operator<<(std::ostream& out, const Family& family) { return out << family.name; }

struct Degrees {
  std::string name;
  int shard = 1;
  int tp = 1;
  int ep = 1;
  int etp = 1;
  bool sequence = true;
  models::RouterTokens router = models::RouterTokens::kShards;
  RecomputeMode recompute = RecomputeMode::kNone;
  std::int64_t micro_batches = 1;
  int ranks() const { return shard * tp; }
};

std::ostream& operator<<(std::ostream& out, const Degrees& degrees) { return out << degrees.name; }

/// The formulas, for one rank.
class Formulas {
 public:
  Formulas(const models::ModelSpec& spec, const Family& family, const Degrees& degrees)
      : spec_(spec),
        family_(family),
        d_(degrees),
        stream_(kPositions * spec.hidden_size * kFloatBytes) {}

  Activations of_step() {
    for (std::int64_t m = 0; m < d_.micro_batches; ++m) {
      embedding();
      for (std::int64_t layer = 0; layer < spec_.num_hidden_layers; ++layer) {
        forward(layer);
        if (d_.recompute != RecomputeMode::kNone) forward(layer);
        backward(layer);
      }
      head();
    }
    return sent_;
  }

 private:
  enum class Way { kOwn, kSliced, kCut, kAllRouted };
  Way way() const {
    if (d_.tp == 1) return Way::kOwn;
    if (d_.etp > 1) return Way::kCut;
    if (d_.router == models::RouterTokens::kAll) return Way::kAllRouted;
    return d_.sequence ? Way::kOwn : Way::kSliced;
  }
  bool sums_at_exit() const { return way() != Way::kOwn; }
  bool routed(std::int64_t layer) const {
    return family_.mlps != Mlps::kDense && layer >= family_.dense_layers;
  }

  void add(const std::string& what, std::int64_t bytes) {
    sent_[what].count += 1;
    sent_[what].bytes += bytes;
  }
  /// A gather or a reduce-scatter of the stream.
  std::int64_t part() const { return stream_ / d_.tp * (d_.tp - 1); }

  void enter() {
    if (d_.tp > 1 && d_.sequence) add("tp all_gather", part());
  }
  void leave() {
    if (d_.tp == 1) return;
    d_.sequence ? add("tp reduce_scatter", part()) : add("tp all_reduce", (d_.tp - 1) * stream_);
  }
  void enter_backward() {
    if (d_.tp == 1) return;
    d_.sequence ? add("tp reduce_scatter", part()) : add("tp all_reduce", (d_.tp - 1) * stream_);
  }
  void leave_backward() {
    if (d_.tp > 1 && d_.sequence) add("tp all_gather", part());
  }

  void embedding() {
    leave();
    leave_backward();
  }
  void head() {
    enter();
    enter_backward();
    if (d_.tp > 1) add("tp all_gather", (d_.tp - 1) * kPositions * 3 * kFloatBytes);
  }

  /// Entries of the region in front of the experts: Gemma 4's router sees another tensor.
  int entries() const { return family_.mlps == Mlps::kGemma ? 2 : 1; }
  bool has_dense_block(std::int64_t layer) const {
    return !routed(layer) || family_.mlps == Mlps::kGemma ||
           (family_.mlps == Mlps::kRoutedAndShared && !sums_at_exit());
  }

  void forward(std::int64_t layer) {
    enter();  // attention
    leave();
    if (has_dense_block(layer)) {
      enter();
      leave();
    }
    if (!routed(layer)) return;
    if (d_.ep > 1) add("ep all_to_all", (d_.ep - 1) * (kExperts / d_.ep + 1) * 8);
    dispatch();
    if (!sums_at_exit()) return;
    for (int i = 0; i < entries(); ++i) enter();
    leave();
  }

  void backward(std::int64_t layer) {
    enter_backward();
    leave_backward();
    if (has_dense_block(layer)) {
      enter_backward();
      leave_backward();
    }
    if (!routed(layer)) return;
    dispatch();
    if (!sums_at_exit()) return;
    leave_backward();
    const bool through_shared = way() == Way::kSliced && family_.mlps == Mlps::kRoutedAndShared;
    if (way() == Way::kSliced && !through_shared) {
      for (int i = 0; i < entries(); ++i) add("tp all_gather", part());
    } else {
      for (int i = 0; i < entries(); ++i) enter_backward();
    }
  }

  /// Rows to their experts and back.
  void dispatch() {
    if (d_.ep == 1) return;
    const bool all = d_.tp == 1 || way() == Way::kCut;
    const std::int64_t tokens = all ? kPositions : kPositions / d_.tp;
    const std::int64_t bytes =
        tokens * kExperts / d_.ep * (d_.ep - 1) * spec_.hidden_size * kFloatBytes;
    add("ep all_to_all", bytes);
    add("ep all_to_all", bytes);
  }

  const models::ModelSpec& spec_;
  const Family& family_;
  const Degrees& d_;
  std::int64_t stream_;  ///< bytes of all positions of a micro-batch of one row
  Activations sent_;
};

/// The reference's model with every expert chosen by every token, and room for bytes.
void write_model(const testing::TemporaryFolder& folder, const Family& family) {
  std::ifstream in(std::string(TESSERA_TEST_DATA) + "/" + family.name + "-fp32/config.json");
  auto model = nlohmann::json::parse(in);
  auto& text = model.contains("text_config") ? model["text_config"] : model;
  text["vocab_size"] = 264;
  for (const char* key : {"num_experts_per_tok", "top_k_experts"}) {
    if (text.contains(key)) text[key] = kExperts;
  }
  if (family.mlps == Mlps::kGemma) {
    text["vocab_size_per_layer_input"] = 264;
    model["image_token_id"] = 260;
    model["video_token_id"] = 261;
    model["audio_token_id"] = 262;
  }
  folder.write("model.json", model.dump());
}

Config traffic_case(const testing::TemporaryFolder& folder, const Degrees& d) {
  Config config = run_case(folder, Head::kOwn);
  auto& parallelism = config.parallelism;
  parallelism.data_parallel_shard_degree = d.shard;
  parallelism.tensor_parallel_degree = d.tp;
  parallelism.expert_parallel_degree = d.ep;
  parallelism.expert_tensor_parallel_degree = d.etp;
  parallelism.sequence_parallel = d.sequence;
  parallelism.moe_router = d.router;
  config.activation_checkpoint.mode = d.recompute;
  config.precision.param_dtype.dtype = DType::kFloat32;
  config.training.seq_len = kPositions;
  config.training.global_batch_size = d.shard * d.micro_batches;
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

class ActivationTraffic : public ::testing::TestWithParam<std::tuple<Family, Degrees>> {};

TEST_P(ActivationTraffic, IsThatOfTheFormulas) {
  const auto& [family, degrees] = GetParam();
  if (family.mlps == Mlps::kDense && (degrees.ep > 1 || degrees.etp > 1)) GTEST_SKIP();
  const testing::TemporaryFolder folder;
  Config config = traffic_case(folder, degrees);
  write_model(folder, family);
  on_ranks(degrees.ranks(), [&](World& world) { run_training(config, world); });

  const Rows rows = read_trace(folder / "run/metrics/trace/step-2.json");
  const ModelSource source = open_model(config.model);
  const Activations expected = Formulas(source.spec, family, degrees).of_step();
  const ParallelDims dims = resolve_parallelism(config.parallelism, degrees.ranks());
  const auto plan =
      plan_model(source.spec, resolve_model(source, config, dims).parameters, mesh_shape(dims));
  const auto traffic = layout::step_traffic(plan, layout::Reshard::kYes, degrees.micro_batches);
  for (int rank = 0; rank < degrees.ranks(); ++rank) {
    SCOPED_TRACE(rank);
    EXPECT_EQ(counted(rows, rank), expected);
    if (family.mlps == Mlps::kGemma) continue;  // the plan counts the tower, too
    const auto sent_in = [&](const char* row) {
      const auto spans = rows.find({rank, row});
      return spans == rows.end() ? 0 : sent(spans->second);
    };
    EXPECT_EQ(sent_in("gathers"), traffic.gathers);
    EXPECT_EQ(sent_in("reductions"), traffic.reductions);
  }
}

constexpr auto kAll = models::RouterTokens::kAll;
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
    {.name = "tp4_whole", .tp = 4, .sequence = false},
    {.name = "tp2_full", .tp = 2, .recompute = RecomputeMode::kFull},
    {.name = "dp2_tp2_two", .shard = 2, .tp = 2, .micro_batches = 2},
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
INSTANTIATE_TEST_SUITE_P(Experts, ActivationTraffic,
                         ::testing::Combine(::testing::ValuesIn(kFamilies.begin() + 1,
                                                                kFamilies.end()),
                                            ::testing::ValuesIn(kExpertLayouts)),
                         name_of);

}  // namespace
}  // namespace tessera::train
