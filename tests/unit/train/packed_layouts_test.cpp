// Rows that are packed of documents under layouts: every rank's gradients are those of the
// documents alone, tensor and sequence parallel, sharded experts, recomputed and replayed. No
// router's load counts the places that packing leaves empty, whichever rank has them.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "support/test.h"
#include "tessera/compile.h"
#include "tessera/group.h"
#include "train/expert_balance.h"
#include "train/parallelize.h"
#include "train/step.h"
#include "unit/train/parallel_degrees.h"
#include "unit/train/run_case.h"

namespace tessera::train::packed_layouts_test {
namespace {

struct Layout {
  std::string name;
  std::string family;
  ParallelDims dims = {};
  RecomputeMode mode = RecomputeMode::kNone;
};
void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

Config config_of(const Layout& layout, const TemporaryFolder& folder) {
  Config config = run_case(folder, Head::kOwn);
  write_model(folder, layout.family + "-fp32");
  set_parallelism(config, layout.dims);
  config.precision.param_dtype.dtype = DType::kFloat32;
  config.activation_checkpoint.mode = layout.mode;
  if (layout.family == "gemma4") config.model.freeze = {"model.vision_tower", "model.embed_vision"};
  return config;
}

constexpr std::int64_t kPositions = 48;

struct Documents {
  at::Tensor ids, starts;  ///< [1, T]
  std::vector<std::int64_t> lengths;
};

/// Draws the documents of a data rank: the same lengths on all, so that all run as many documents.
/// Lengths are multiples of `unit`, so that each can be cut alone, too: by tp, and into two parts
/// for each rank of cp.
Documents drawn(std::uint64_t seed, int data_rank, std::int64_t vocabulary, std::int64_t unit = 2) {
  auto lengths = at::make_generator<at::CPUGeneratorImpl>(seed);
  auto tokens =
      at::make_generator<at::CPUGeneratorImpl>(seed + 100 + static_cast<unsigned>(data_rank));
  Documents documents;
  std::vector<at::Tensor> starts;
  for (std::int64_t begin = 0; begin < kPositions;) {
    const auto length = std::min<std::int64_t>(
        kPositions - begin,
        unit * at::randint(1, 2 + 16 / unit, {1}, lengths, at::kLong).item<std::int64_t>());
    starts.push_back(at::full({1, length}, begin, at::kLong));
    documents.lengths.push_back(length);
    begin += length;
  }
  documents.starts = at::cat(starts, 1);
  // None of them is a placeholder of an image.
  documents.ids =
      at::randint(vocabulary / 4 + 2, 3 * vocabulary / 4, {1, kPositions}, tokens, at::kLong);
  return documents;
}

using Model = std::shared_ptr<Sharded<models::LanguageModel>>;

void run(Model& model, const models::ModelInputs& inputs, bool is_last) {
  model->set_requires_gradient_sync(is_last);
  model->call(&models::LanguageModel::forward_routed, inputs).result.backward();
}

/// The gradients of a step of these micro-batches.
std::vector<at::Tensor> gradients_of(Model& model,
                                     const std::vector<models::ModelInputs>& batches) {
  model->zero_grad();
  for (const models::ModelInputs& inputs : batches) run(model, inputs, &inputs == &batches.back());
  std::vector<at::Tensor> gradients;
  for (const ShardView& view : model->shards()) {
    if (view.shard.grad().defined()) gradients.push_back(view.shard.grad().clone());  // else frozen
  }
  return gradients;
}

/// Parts of a row by the pairs of query and key in them, as data of packed rows are cut.
layout::ContextCut cut_by_work(const Documents& documents, const ParallelDims& dims) {
  std::vector<double> work(static_cast<std::size_t>(dims.context_parts), 0.0);
  const std::int64_t size = kPositions / dims.context_parts;
  const auto* starts = documents.starts.const_data_ptr<std::int64_t>();
  for (std::int64_t place = 0; place < kPositions; ++place) {
    work[static_cast<std::size_t>(place / size)] += static_cast<double>(place - starts[place] + 1);
  }
  return layout::by_work(kPositions, dims.cp, work);
}

std::vector<at::Tensor> packed_gradients(Model& model, const Documents& documents,
                                         std::optional<layout::ContextCut> cut = {}) {
  models::ModelInputs inputs;
  inputs.input_ids = documents.ids;
  inputs.targets = documents.ids;
  inputs.documents.starts = documents.starts;
  inputs.cut = std::move(cut);
  return gradients_of(model, {inputs});
}

std::vector<at::Tensor> gradients_alone(Model& model, const Documents& documents) {
  std::vector<models::ModelInputs> batches;
  std::int64_t begin = 0;
  for (const std::int64_t length : documents.lengths) {
    models::ModelInputs& inputs = batches.emplace_back();
    inputs.input_ids = documents.ids.narrow(1, begin, length).contiguous();
    inputs.targets = inputs.input_ids;
    begin += length;
  }
  return gradients_of(model, batches);
}

/// The error of all shards of a rank together: parts of one parameter may be as small as they like.
double relative_error(const std::vector<at::Tensor>& found,
                      const std::vector<at::Tensor>& expected) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    difference += (found[i] - expected[i]).square().sum().item<double>();
    norm += expected[i].square().sum().item<double>();
  }
  return std::sqrt(difference / norm);
}

/// fp32: 2^-24 a rounding, some hundred of them in a row.
constexpr double kBound = 2e-5;

struct Family {
  std::string name;
  bool has_experts = false;
};
std::vector<Family> families() {
  return {{"qwen3"},
          {"llama"},
          {"qwen2"},
          {"mistral"},
          {"olmo2"},
          {"granite"},
          {"smollm3"},
          {"phi3"},
          {"phi4-mini"},
          {"gemma3-text"},
          {"gpt2"},
          {"qwen3-5-text"},
          {"qwen3-moe", true},
          {"mixtral", true},
          {"gpt-oss", true},
          {"gemma4", true},
          {"deepseek-v2", true},
          {"glm4-moe", true},
          {"deepseek-v3", true},
          {"llama4-text", true},
          {"qwen3-next", true},
          {"nemotron-h", true}};
}

std::string case_name(const char* kind, std::size_t number, const std::string& family) {
  std::string name = concat(kind, "_", number, "_", family);
  std::ranges::replace(name, '-', '_');
  return name;
}

/// Two of each family: one of the layouts that share out its experts, where it has any, and one of
/// all that apply, with recomputation of any kind.
std::vector<Layout> drawn_layouts() {
  const std::vector<ParallelDims> of_all{
      {.dp_replicate = 2}, {.dp_shard = 2},
      {.tp = 2},           {.tp = 2, .sequence = SequenceParallel::kNo},
      {.dp_shard = 3},     {.dp_shard = 2, .tp = 2}};
  const std::vector<ParallelDims> of_experts{
      {.dp_shard = 2, .ep = 2},
      {.tp = 2, .ep = 2},
      {.tp = 2, .etp = 2},
      {.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2},
      {.tp = 2, .etp = 2, .sequence = SequenceParallel::kNo}};
  std::mt19937 random(20261127);
  std::vector<Layout> drawn;
  const auto draw = [&](const Family& family, const std::vector<ParallelDims>& from) {
    const auto& dims = from[random() % from.size()];
    const auto mode = static_cast<RecomputeMode>(random() % 3);
    drawn.push_back({case_name("drawn", drawn.size(), family.name), family.name, dims, mode});
  };
  for (const Family& family : families()) {
    auto applies = of_all;
    if (family.has_experts) applies.insert(applies.end(), of_experts.begin(), of_experts.end());
    draw(family, family.has_experts ? of_experts : of_all);
    draw(family, applies);
  }
  return drawn;
}

/// One of each family: both forms, and with other axes.
std::vector<Layout> context_layouts() {
  constexpr auto kHeads = ContextForm::kHeads;
  const std::vector<ParallelDims> of_all{{.cp = 2, .context_parts = 4},
                                         {.cp = 4, .context_parts = 8},
                                         {.cp = 2, .context_form = kHeads, .context_parts = 4},
                                         {.dp_shard = 2, .cp = 2, .context_parts = 4},
                                         {.cp = 2, .tp = 2, .context_parts = 4}};
  const ParallelDims of_experts{.cp = 2, .ep = 2, .context_parts = 4};
  std::vector<Layout> all;
  for (const Family& family : families()) {
    if (family.name == "qwen3-5-text" || family.name == "qwen3-next" ||
        family.name == "nemotron-h") {
      continue;  // ranks of cp do not pass states
    }
    const std::size_t number = all.size();
    const auto mode = static_cast<RecomputeMode>(number % 3);
    const bool shares_experts = family.has_experts && number % 2 == 0;
    all.push_back({case_name("context", number, family.name), family.name,
                   shares_experts ? of_experts : of_all[number % of_all.size()], mode});
  }
  return all;
}

class PackedLayouts : public ::testing::TestWithParam<Layout> {};

TEST_P(PackedLayouts, GradientsAreThoseOfTheDocumentsAlone) {
  const Layout& layout = GetParam();
  const TemporaryFolder folder;
  const Config config = config_of(layout, folder);
  const ModelSource source = open_model(config.model, config.lora);
  on_ranks(layout.dims.world_size(), [&](World& world) {
    const ParallelDims dims = resolve_parallelism(config.parallelism, world.size());
    auto model = parallelize(source, config, world.mesh(mesh_shape(dims)));
    const std::int64_t unit = dims.cp == 1 ? 2 : dims.context_parts * std::int64_t{dims.tp};
    for (const std::uint64_t seed : {1U, 2U}) {
      const Documents documents =
          drawn(seed, data_rank(model->mesh()), source.spec.vocab_size, unit);
      std::vector<std::optional<layout::ContextCut>> cuts{std::nullopt};  // head and tail
      if (dims.cp > 1) cuts.emplace_back(cut_by_work(documents, dims));
      const auto alone = gradients_alone(model, documents);
      for (const auto& cut : cuts) {
        EXPECT_LT(relative_error(packed_gradients(model, documents, cut), alone), kBound)
            << layout.name << " on " << to_string(mesh_shape(dims)) << ", recomputed "
            << static_cast<int>(layout.mode) << ", documents " << seed << ", rank " << world.rank()
            << (cut ? to_string(*cut) : "");
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, PackedLayouts,
    ::testing::Values(
        Layout{"qwen3_tp", "qwen3", {.tp = 2}},
        Layout{"qwen3_tp_whole_sequence", "qwen3", {.tp = 2, .sequence = SequenceParallel::kNo}},
        Layout{"llama_dp_tp_full", "llama", {.dp_shard = 2, .tp = 2}, RecomputeMode::kFull},
        Layout{"gpt_oss_tp", "gpt-oss", {.tp = 2}},
        Layout{"deepseek_tp", "deepseek-v2", {.tp = 2}, RecomputeMode::kSelective},
        Layout{"qwen3_moe_ep", "qwen3-moe", {.dp_shard = 2, .ep = 2}},
        Layout{"gemma4_tp", "gemma4", {.tp = 2}}, Layout{"olmo2_tp", "olmo2", {.tp = 2}},
        Layout{"granite_tp", "granite", {.tp = 2}}, Layout{"phi4_mini_tp", "phi4-mini", {.tp = 2}},
        Layout{"gemma3_tp", "gemma3-text", {.tp = 2}}, Layout{"gpt2_tp", "gpt2", {.tp = 2}},
        Layout{"llama4_ep", "llama4-text", {.dp_shard = 2, .ep = 2}},
        Layout{"glm4_tp", "glm4-moe", {.tp = 2}},
        Layout{"qwen3_next_tp", "qwen3-next", {.tp = 2}, RecomputeMode::kFull},
        Layout{"nemotron_tp", "nemotron-h", {.tp = 2}}),
    [](const auto& one) { return one.param.name; });

INSTANTIATE_TEST_SUITE_P(Drawn, PackedLayouts, ::testing::ValuesIn(drawn_layouts()),
                         [](const auto& one) { return one.param.name; });

INSTANTIATE_TEST_SUITE_P(Context, PackedLayouts, ::testing::ValuesIn(context_layouts()),
                         [](const auto& one) { return one.param.name; });

// Phi-4-mini's longrope: rows of at most 16 positions turn otherwise than longer ones. Documents of
// 17 tokens, one more than that, fill a row of 84 inputs and a target. Property: each turns as its
// row of 16 inputs and 16 targets alone. Naive: all but the last one are rows of 17 inputs.
TEST(PackedLongRope, ADocumentTurnsAsAloneWhereverItIsInItsRow) {
  constexpr std::int64_t kTokens = 17, kCount = 5;
  const TemporaryFolder folder;
  Config config = config_of({"longrope", "phi4-mini"}, folder);
  config.model.config = "";
  config.model.path = TESSERA_TEST_DATA "/phi4-mini-fp32";
  const ModelSource source = open_model(config.model, config.lora);
  ASSERT_EQ(source.spec.rope.original_max_position_embeddings, kTokens - 1);
  std::vector<std::uint16_t> tokens;
  std::vector<std::uint64_t> ends;
  std::mt19937 random(3);
  for (std::int64_t i = 0; i < kCount * kTokens; ++i) {
    tokens.push_back(static_cast<std::uint16_t>(2 + random() % 60));
    if ((i + 1) % kTokens == 0) ends.push_back(static_cast<std::uint64_t>(i + 1));
  }
  folder.write("t.bin", {reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size()});
  folder.write("t.docs.bin", {reinterpret_cast<const char*>(ends.data()), 8 * ends.size()});
  folder.write("t.json", R"({"dtype": "uint16", "num_tokens": 85, "vocab_size": 64})");
  BatchRequest request;
  request.path = {(folder / "t.bin").string()};
  request.packing = Packing::kDocuments;
  request.training.seq_len = kCount * kTokens - 1;
  request.training.global_batch_size = 1;
  request.vocabulary = vocabulary_of(source.spec, false);
  const models::ModelInputs packed = open_batches(request)->load(1, {0, 1}).inputs();
  std::vector<models::ModelInputs> alone;
  for (std::int64_t begin = 0; begin < kCount * kTokens; begin += kTokens) {
    const std::vector<std::int64_t> ids(tokens.begin() + begin, tokens.begin() + begin + kTokens);
    const at::Tensor document = at::tensor(ids, at::kLong).unsqueeze(0);
    models::ModelInputs& inputs = alone.emplace_back();
    inputs.input_ids = document.narrow(1, 0, kTokens - 1).contiguous();
    inputs.targets = document.narrow(1, 1, kTokens - 1).contiguous();
  }
  on_ranks(1, [&](World& world) {
    auto model = parallelize(source, config, world.mesh(mesh_shape({})));
    EXPECT_LT(relative_error(gradients_of(model, {packed}), gradients_of(model, alone)), kBound);
  });
}

/// Every layout for at least two of the families with experts.
std::vector<Layout> layouts_with_fillers() {
  constexpr auto kWhole = SequenceParallel::kNo;
  const std::vector<ParallelDims> all{{.dp_replicate = 2},
                                      {.dp_shard = 3},
                                      {.tp = 2},
                                      {.tp = 2, .sequence = kWhole},
                                      {.tp = 2, .router = RouterTokens::kAll},
                                      {.dp_shard = 2, .ep = 2},
                                      {.tp = 2, .ep = 2},
                                      {.tp = 2, .ep = 2, .sequence = kWhole},
                                      {.tp = 2, .etp = 2},
                                      {.tp = 2, .etp = 2, .sequence = kWhole},
                                      {.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2}};
  constexpr int kLayoutsOfAFamily = 3;
  std::vector<Layout> dealt;
  for (const Family& family : families()) {
    for (int i = 0; family.has_experts && i < kLayoutsOfAFamily; ++i) {
      const std::size_t number = dealt.size();
      dealt.push_back({case_name("fillers", number, family.name), family.name,
                       all[number % all.size()], static_cast<RecomputeMode>(i)});
    }
  }
  return dealt;
}

/// Two rows for each data rank. Fillers are the last document of a row, or any places.
std::vector<models::ModelInputs> rows_with_fillers(std::uint64_t seed, int data_ranks,
                                                   std::int64_t vocabulary) {
  auto places = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<models::ModelInputs> of_ranks;
  for (int rank = 0; rank < data_ranks; ++rank) {
    const Documents first = drawn(seed, 2 * rank, vocabulary);
    const Documents second = drawn(seed + 10, 2 * rank + 1, vocabulary);
    models::ModelInputs inputs;
    inputs.input_ids = at::cat({first.ids, second.ids});
    inputs.targets = inputs.input_ids;
    inputs.documents.starts = at::cat({first.starts, second.starts});
    const at::Tensor& starts = inputs.documents.starts;
    inputs.fillers = seed % 2 == 1 ? starts.eq(starts.amax(1, /*keepdim=*/true))
                                   : at::rand(starts.sizes(), places, at::kFloat).lt(0.3);
    inputs.router_statistics = models::RouterStatistics::kAndProbabilities;
    of_ranks.push_back(std::move(inputs));
  }
  return of_ranks;
}

/// By layer, of these micro-batches of every rank. Collective.
std::vector<models::RouterLoad> loads_of_all(Model& model,
                                             const std::vector<models::ModelInputs>& batches) {
  std::vector<models::RouterLoad> sums;
  for (const models::ModelInputs& inputs : batches) {
    const auto output = model->call(&models::LanguageModel::forward_routed, inputs);
    output.result.backward();
    if (sums.empty()) sums.resize(output.loads.size(), {at::zeros({1}, at::kLong), at::zeros({1})});
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const auto& [counts, probabilities] = output.loads[i];
      sums[i] = pool({sums[i], {counts, probabilities.detach()}});
    }
  }
  for (auto& [counts, probabilities] : sums) {
    counts = chosen_by_all(*model, counts);
    const at::Tensor mine = probabilities.to(at::kDouble).contiguous();
    const auto* begin = mine.const_data_ptr<double>();
    // RankSum::kSources are numbers that are not whole.
    probabilities = at::tensor(
        sum_over_ranks(*model, RankSum::kSources, {begin, begin + mine.numel()}), at::kDouble);
  }
  return sums;
}

Model model_of(const ModelSource& source, const Config& config, World& world) {
  const ParallelDims dims = resolve_parallelism(config.parallelism, world.size());
  return parallelize(source, config, world.mesh(mesh_shape(dims)));
}

class LayoutsWithFillers : public ::testing::TestWithParam<Layout> {};

// Naive: a rank masks the fillers of other tokens than those that its router sees.
TEST_P(LayoutsWithFillers, LoadsOverAllRanksAreThoseOfOneRankAndOfNoFiller) {
  const Layout& layout = GetParam();
  const TemporaryFolder folder;
  const Config config = config_of(layout, folder);
  Config alone = config;
  alone.parallelism = {};
  const ModelSource source = open_model(config.model, config.lora);
  const std::int64_t choices = source.spec.moe->experts_per_token;
  for (const std::uint64_t seed : {1U, 2U}) {
    const auto batches = rows_with_fillers(seed, layout.dims.data_ranks(), source.spec.vocab_size);
    std::int64_t places = 0, kept = 0;
    for (const models::ModelInputs& inputs : batches) {
      places += inputs.fillers->numel();
      kept += inputs.fillers->logical_not().sum().item<std::int64_t>();
    }
    ASSERT_LT(kept, places);
    std::vector<models::RouterLoad> expected;
    on_ranks(1, [&](World& world) {
      Model model = model_of(source, alone, world);
      expected = loads_of_all(model, batches);
    });
    ASSERT_EQ(expected.size(), models::routed_experts(source.spec).layers.size());
    on_ranks(layout.dims.world_size(), [&](World& world) {
      Model model = model_of(source, config, world);
      models::ModelInputs own = batches[static_cast<std::size_t>(data_rank(model->mesh()))];
      const auto found = loads_of_all(model, {own});
      own.fillers.reset();
      const auto of_all_places = loads_of_all(model, {own});
      ASSERT_EQ(found.size(), expected.size());
      ASSERT_EQ(of_all_places.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        const std::string where =
            concat(layout.name, " on ", to_string(mesh_shape(layout.dims)), ", layer ", i,
                   ", fillers ", seed, ", rank ", world.rank());
        EXPECT_TRUE(found[i].counts.equal(expected[i].counts))
            << where << ": found " << found[i].counts << ", expected " << expected[i].counts;
        EXPECT_EQ(found[i].counts.sum().item<double>(), static_cast<double>(kept * choices))
            << where;
        EXPECT_LT(relative_error({found[i].probabilities}, {expected[i].probabilities}), kBound)
            << where;
        // Able to fail: fillers are routed as other places are.
        EXPECT_EQ(of_all_places[i].counts.sum().item<double>(),
                  static_cast<double>(places * choices))
            << where;
        EXPECT_GT(of_all_places[i].probabilities.sum().item<double>(),
                  found[i].probabilities.sum().item<double>())
            << where;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Dealt, LayoutsWithFillers, ::testing::ValuesIn(layouts_with_fillers()),
                         [](const auto& one) { return one.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Context, LayoutsWithFillers,
    ::testing::Values(
        Layout{"qwen3_moe_cp", "qwen3-moe", {.cp = 2, .context_parts = 4}},
        Layout{"mixtral_cp_ep", "mixtral", {.cp = 2, .ep = 2, .context_parts = 4}},
        Layout{"gpt_oss_cp_tp", "gpt-oss", {.cp = 2, .tp = 2, .context_parts = 4}},
        Layout{"deepseek_dp_cp", "deepseek-v2", {.dp_shard = 2, .cp = 2, .context_parts = 4}}),
    [](const auto& one) { return one.param.name; });

// Borders are data: a region that was recorded with others is replayed.
TEST(PackedReplays, RegionsAreReplayedWithOtherBordersAndTheSameBits) {
  for (const std::string family : {"qwen3", "gpt-oss", "deepseek-v2", "gemma4"}) {
    const TemporaryFolder folder;
    const Layout layout{family, family};
    const Config config = config_of(layout, folder);
    const ModelSource source = open_model(config.model, config.lora);
    on_ranks(1, [&](World& world) {
      const auto made = [&] {
        return parallelize(source, config,
                           world.mesh(mesh_shape(resolve_parallelism(config.parallelism, 1))));
      };
      auto plain = made(), replayed = made();
      compile(*replayed, {.mode = CompileMode::kReplay});
      for (std::uint64_t step = 0; step < 8; ++step) {
        const Documents documents = drawn(step, 0, source.spec.vocab_size);
        const auto expected = packed_gradients(plain, documents);
        const auto found = packed_gradients(replayed, documents);
        ASSERT_EQ(found.size(), expected.size());
        for (std::size_t i = 0; i < found.size(); ++i) {
          EXPECT_TRUE(found[i].equal(expected[i])) << family << ", step " << step;
        }
      }
      const ReplayCalls calls = replay_calls(*replayed);
      // The first call is eager, the second recorded, two are compared.
      EXPECT_GE(calls.replayed, 4 * source.spec.num_hidden_layers) << family;
      for (const auto& [reason, count] : calls.eager) {
        EXPECT_EQ(reason.find("operation"), std::string::npos) << family << ": " << reason;
      }
    });
  }
}

}  // namespace
}  // namespace tessera::train::packed_layouts_test
