// Which bits ranks that share rows (context parallelism) keep: fp32, on the CPU, a thread a rank.
//
// With as many parts of a row, logits and the gradient of the stream in front of every layer are
// those of one rank, bit for bit, in every family; where ranks exchange heads they are those of one
// rank without parts. Two exceptions, which are within bounds: an expert that has 1 to 3 rows on
// some rank, whose product rounds otherwise, and backward where latents are gathered, whose
// gradients have one addend a rank. Gradients of parameters differ from one rank's by the order in
// which tokens are added; the same layout has the same bits twice. What this rests on is a property
// of the machine's products, which has a test of its own. All of it under `scripts/full context`, a
// seeded part in ./test --all.
//
// The class of bug: sums whose order follows from the ranks and not from the parts, and products
// whose rows depend on how many others there are in a product.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <mutex>
#include <random>

#include "base/test_hooks.h"
#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "io/safetensors.h"
#include "layout/context_cut.h"
#include "models/description.h"
#include "nn/linear.h"
#include "nn/parameter.h"
#include "proof.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/test.h"
#include "train/contract_of_run.h"
#include "train/data/data.h"
#include "train/hf/model_source.h"

namespace tessera::golden::context_bits_test {
namespace {

using models::ModelInputs;
using models::ModelSpec;
using test::same_bits;

constexpr int kParts = 8;

/// Gradients of parameters, and those of gathered latents, are sums in another order: of 256 tokens
/// at most, 2^-24 a rounding, whose errors average out. 7.3e-7 was the most that was found.
constexpr double kSumBound = 1e-5;
/// Each rank rounds the sum of its tokens' losses to fp32, and one rank that of all.
constexpr double kLossOfRanks = 2 * 0x1p-24;

/// fp32 folders whose layers pass no state along the row.
std::vector<std::string> folders_of_rows() {
  std::vector<std::string> all = all_folders();
  all.insert(all.end(), kGemmaFolders.begin(), kGemmaFolders.end());
  std::erase_if(all, [](const std::string& folder) {
    return !folder.ends_with("-fp32") || has_state(spec_of(folder));
  });
  std::ranges::sort(all);
  all.erase(std::ranges::unique(all).begin(), all.end());
  return all;
}

bool heads_divide(const ModelSpec& spec, int cp) {
  std::vector<std::int64_t> groups{spec.mla ? spec.num_attention_heads : spec.num_key_value_heads};
  if (spec.gemma4) {
    for (const auto& layer : spec.gemma4->layers) groups.push_back(layer.num_key_value_heads);
  }
  return std::ranges::all_of(groups, [&](std::int64_t heads) { return heads % cp == 0; });
}

/// Positions of a row: of experts so many that each has 4 rows or more on each of 4 ranks.
std::int64_t positions_of(const ModelSpec& spec) {
  if (spec.family == models::Family::kGpt2) return 32;
  return spec.moe ? 128 : 64;
}

enum class Rows { kOneDocument, kPacked };

/// Documents of 1 to 20 positions, other ones in each row.
at::Tensor starts_of(std::int64_t rows, std::int64_t positions) {
  std::mt19937 draw(5);
  at::Tensor starts = at::zeros({rows, positions}, at::kLong);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t begin = 0; begin < positions;) {
      const std::int64_t size = 1 + static_cast<std::int64_t>(draw() % 20);
      const std::int64_t end = std::min(positions, begin + size);
      starts[row].narrow(0, begin, end - begin).fill_(begin);
      begin = end;
    }
  }
  return starts;
}

/// Experts in turn, from another one on in each layer.
std::vector<at::Tensor> even_routing(const ModelSpec& spec, std::int64_t tokens) {
  const models::RoutedExperts routed = models::routed_experts(spec);
  std::vector<at::Tensor> all;
  for (const std::int64_t layer : routed.layers) {
    all.push_back((at::arange(tokens * routed.experts_per_token, at::kLong) + layer)
                      .remainder(routed.experts)
                      .view({tokens, routed.experts_per_token}));
  }
  return all;
}

/// Who chooses the experts: the routers, or even_routing().
enum class Choice { kEven, kOwn };

/// The rows of the reference, images included, with drawn tokens after them.
ModelInputs batch_of(const std::string& folder, Rows kind, Choice choice = Choice::kEven) {
  const ModelSpec spec = spec_of(folder);
  const auto source =
      train::open_gradients_batch(Reference::of(folder).batches(),
                                  train::vocabulary_of(spec, /*reads_bytes=*/false), std::nullopt);
  ModelInputs inputs = source->load(1, {0, source->rows_in_step()}).inputs();
  const std::int64_t rows = inputs.input_ids.size(0), positions = positions_of(spec);
  const auto longer = [&](const at::Tensor& given, const at::Tensor& more) {
    return at::cat({given, more}, 1).contiguous();
  };
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  const std::int64_t most = std::min<std::int64_t>(spec.vocab_size, 64);
  const at::Tensor drawn =
      at::randint(most / 4 + 2, 3 * most / 4, {rows, positions - inputs.input_ids.size(1)},
                  generator, at::TensorOptions().dtype(at::kLong));
  if (inputs.token_types) inputs.token_types = longer(*inputs.token_types, at::zeros_like(drawn));
  inputs.input_ids = longer(inputs.input_ids, drawn);
  inputs.targets = longer(*inputs.targets, drawn.roll(-1, 1));
  if (choice == Choice::kEven) inputs.imposed_routing = even_routing(spec, rows * positions);
  if (kind == Rows::kPacked) inputs.documents.starts = starts_of(rows, positions);
  return inputs;
}

struct Sharing {
  int cp = 1;
  ContextForm form = ContextForm::kGather;
  int parts = kParts;
  Rows rows = Rows::kOneDocument;
  RecomputeMode recompute = RecomputeMode::kNone;
  Choice choice = Choice::kEven;
};

std::string to_string(const Sharing& one) {
  return concat("cp ", one.cp, one.form == ContextForm::kGather ? " gather" : " heads", ", ",
                one.parts, " parts", one.rows == Rows::kPacked ? ", packed" : "",
                one.recompute == RecomputeMode::kNone ? "" : ", recomputed");
}

/// Head and tail for one document; for packed rows by work, which is drawn.
layout::ContextCut cut_of(const Sharing& sharing, std::int64_t positions) {
  if (sharing.rows == Rows::kOneDocument || sharing.parts == 1) {
    return layout::head_tail(positions, sharing.cp, sharing.parts);
  }
  return layout::by_work(positions, sharing.cp, std::vector<double>{1, 7, 2, 6, 5, 3, 8, 4});
}

/// Of whole rows.
struct Found {
  double loss = 0;
  at::Tensor logits;
  std::vector<at::Tensor> streams;  ///< the gradients in front of each layer, and of the head
  Tensors parameters;               ///< gradients, added in the order of the ranks
  bool has_small_products = false;  ///< of 1 to 3 rows of an expert, on some rank
};

/// Each layer is a stage of its own, on the same rank: so each border is seen.
models::StagesOfRank layer_by_layer(const ModelSpec& spec) {
  const std::int64_t layers = spec.num_hidden_layers;
  models::StagesOfRank stages{{true, {0, 0}, false}};
  for (std::int64_t i = 0; i < layers; ++i) stages.push_back({false, {i, i + 1}, false});
  stages.push_back({false, {layers, layers}, true});
  return stages;
}

at::Tensor values_of(const models::ParameterSpec& row, const Tensors& stored) {
  if (row.stacked.empty()) return stored.at(row.tied_to.empty() ? row.name : row.tied_to);
  std::vector<at::Tensor> parts;
  for (const std::string& name : row.stacked) parts.push_back(stored.at(name));
  return at::stack(parts).view(row.shape);
}

/// A model that is whole on this rank, with the folder's weights.
std::shared_ptr<models::LanguageModel> model_of(const std::string& folder, const Sharing& sharing,
                                                const Mesh& mesh) {
  const ModelSpec spec = spec_of(folder);
  models::ModelAxes axes;
  axes.context = {parallel::axis_of(mesh, axis::kContext), sharing.form, sharing.parts};
  axes.stages = layer_by_layer(spec);
  auto model = models::make_language_model(spec, axes);
  nn::materialize(*model);
  auto parameters = model->named_parameters();
  for (const models::ParameterSpec& row : models::describe(spec).parameters) {
    at::Tensor* const parameter = parameters.find(row.name);
    if (parameter == nullptr) continue;
    parameter->set_data(values_of(row, Reference::of(folder).parameters()).clone());
    if (row.name.find("vision") != std::string::npos) parameter->set_requires_grad(false);
  }
  const SafetensorsFile file(data_folder(folder) / "model.safetensors");
  for (auto& item : model->named_buffers()) item.value().set_data(read_tensor(file, item.key()));
  model->set_recompute(sharing.recompute);
  return model;
}

/// Forward and backward of a rank, with the borders as leaves.
class OfRank {
 public:
  OfRank(models::LanguageModel& model, ModelInputs inputs)
      : model_(model), inputs_(std::move(inputs)) {}

  void run() {
    inputs_.router_statistics = models::RouterStatistics::kCounts;
    const std::optional<at::Tensor> targets = std::exchange(inputs_.targets, std::nullopt);
    const std::size_t last = model_.stages().size() - 1;
    std::vector<at::Tensor> results{model_.forward_stage({inputs_, 0, {}}).result};
    for (std::size_t stage = 1; stage <= last; ++stage) {
      borders_.push_back(results.back().detach().requires_grad_(true));
      const models::ModelOutput output = model_.forward_stage({inputs_, stage, borders_.back()});
      for (const models::RouterLoad& load : output.loads) note(load.counts);
      results.push_back(output.result);
    }
    logits_ = results.back().detach();
    inputs_.targets = targets;
    const at::Tensor loss = model_.forward_stage({inputs_, last, borders_.back()}).result;
    loss_ = loss.item<double>();
    loss.backward();
    for (std::size_t stage = last; stage-- > 0;) results[stage].backward(borders_[stage].grad());
  }

  /// Puts what this rank has at its places of whole rows.
  void join(Found& found) const {
    found.loss += loss_;
    found.has_small_products = found.has_small_products || has_small_products_;
    found.streams.resize(borders_.size());
    join(found.logits, logits_);
    for (std::size_t i = 0; i < borders_.size(); ++i) join(found.streams[i], borders_[i].grad());
    for (const auto& item : model_.named_parameters()) {
      const at::Tensor& gradient = item.value().grad();
      if (!gradient.defined()) continue;
      at::Tensor& sum = found.parameters[item.key()];
      sum = sum.defined() ? sum + gradient : gradient;
    }
  }

 private:
  void note(const at::Tensor& rows_of_experts) {
    const at::Tensor is_small = rows_of_experts.gt(0).logical_and(rows_of_experts.lt(4));
    has_small_products_ = has_small_products_ || is_small.any().item<bool>();
  }
  void join(at::Tensor& whole, const at::Tensor& own) const {
    const auto rows = model_.context_rows(inputs_);
    const at::Tensor places =
        rows ? rows->places : at::arange(inputs_.input_ids.size(1), at::kLong);
    std::vector<std::int64_t> sizes = own.sizes().vec();
    sizes[1] = inputs_.input_ids.size(1);
    if (!whole.defined()) whole = at::full(sizes, std::nan(""), own.options());
    whole.index_copy_(1, places, own);
  }

  models::LanguageModel& model_;
  ModelInputs inputs_;
  double loss_ = 0;
  bool has_small_products_ = false;
  at::Tensor logits_;
  std::vector<at::Tensor> borders_;
};

Found computed(const std::string& folder, const Sharing& sharing) {
  const ModelInputs batch = batch_of(folder, sharing.rows, sharing.choice);
  const layout::ContextCut cut = cut_of(sharing, batch.input_ids.size(1));
  std::vector<std::shared_ptr<models::LanguageModel>> models(static_cast<std::size_t>(sharing.cp));
  std::vector<std::unique_ptr<OfRank>> of_ranks(models.size());
  test::ranks(sharing.cp).run([&](World& world) {
    at::set_num_threads(1);
    const auto rank = static_cast<std::size_t>(world.rank());
    models[rank] = model_of(folder, sharing, world.mesh(train::mesh_shape({.cp = sharing.cp})));
    ModelInputs inputs = batch;
    if (models[rank]->context().cuts()) inputs.cut = cut;
    of_ranks[rank] = std::make_unique<OfRank>(*models[rank], std::move(inputs));
    of_ranks[rank]->run();
  });
  Found found;
  for (const auto& of_rank : of_ranks) of_rank->join(found);
  return found;
}

/// What is the same to the last bit; the rest is within kSumBound.
enum class SameBits { kNone, kForward, kBoth };

void expect_near(const at::Tensor& found, const at::Tensor& expected, bool to_the_bit,
                 const std::string& name) {
  const double error = relative_error(found, expected);
  EXPECT_LT(error, kSumBound) << name;
  if (!to_the_bit) return;
  EXPECT_TRUE(same_bits(found, expected)) << name << ", relative " << error;
}

void expect_same(const Found& found, const Found& expected, SameBits same) {
  expect_near(found.logits, expected.logits, same != SameBits::kNone, "logits");
  ASSERT_EQ(found.streams.size(), expected.streams.size());
  for (std::size_t i = found.streams.size(); i-- > 0;) {
    expect_near(found.streams[i], expected.streams[i], same == SameBits::kBoth,
                concat("in front of layer ", i));
  }
  EXPECT_NEAR(found.loss, expected.loss, kLossOfRanks * expected.loss);
  ASSERT_EQ(found.parameters.size(), expected.parameters.size());
  for (const auto& [name, gradient] : expected.parameters) {
    expect_near(found.parameters.at(name), gradient, false, name);
  }
}

class ContextBits : public ::testing::TestWithParam<std::string> {
 protected:
  const std::string& folder() const { return GetParam(); }
  ModelSpec spec() const { return spec_of(folder()); }
  std::vector<Sharing> sharings() const {
    std::vector<Sharing> all;
    for (const Rows rows : {Rows::kOneDocument, Rows::kPacked}) {
      for (const ContextForm form : {ContextForm::kGather, ContextForm::kHeads}) {
        for (const int cp : {2, 4}) {
          if (form == ContextForm::kHeads && !heads_divide(spec(), cp)) continue;
          all.push_back({.cp = cp, .form = form, .rows = rows});
        }
      }
    }
    return all;
  }
  /// What a sharing is compared with.
  static Sharing on_one_rank(Sharing sharing) {
    sharing.cp = 1;
    if (sharing.form == ContextForm::kHeads) sharing.parts = 1;
    return sharing;
  }
  SameBits promised(const Sharing& sharing, const Found& found) const {
    if (found.has_small_products) return SameBits::kNone;
    // Latents that are gathered have one addend a rank to their gradients.
    const bool gathers_latents = spec().mla && sharing.form == ContextForm::kGather;
    return gathers_latents ? SameBits::kForward : SameBits::kBoth;
  }
};

TEST_P(ContextBits, LogitsAndGradientsOfActivationsAreOneRanks) {
  for (const Sharing& sharing : test::in_turn(sharings(), 3, folders_of_rows(), folder())) {
    SCOPED_TRACE(to_string(sharing));
    const Found found = computed(folder(), sharing);
    EXPECT_FALSE(found.has_small_products);
    expect_same(found, computed(folder(), on_one_rank(sharing)), promised(sharing, found));
  }
}

// Products of 1 to 3 rows round otherwise than those of 4 and more. A router may give an expert so
// few on one rank and more on another.
TEST_P(ContextBits, WithOwnRoutingBitsHoldWhereEachExpertHasFourRowsAndBoundsElsewhere) {
  if (!spec().moe) return;
  for (Sharing sharing : test::in_turn(sharings(), 3, folders_of_rows(), folder())) {
    SCOPED_TRACE(to_string(sharing));
    sharing.choice = Choice::kOwn;
    const Found found = computed(folder(), sharing);
    expect_same(found, computed(folder(), on_one_rank(sharing)), promised(sharing, found));
  }
}

TEST_P(ContextBits, RecomputedIsKept) {
  for (Sharing sharing : test::in_turn(sharings(), 4, folders_of_rows(), folder())) {
    SCOPED_TRACE(to_string(sharing));
    const Found kept = computed(folder(), sharing);
    sharing.recompute = RecomputeMode::kFull;
    const Found found = computed(folder(), sharing);
    expect_same(found, kept, SameBits::kBoth);
    expect_same_bits(found.parameters, kept.parameters);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, ContextBits, ::testing::ValuesIn(folders_of_rows()),
                         folder_name);

/// `tessera gradients` of drawn rows.
Gradients written(const std::string& folder, int cp, ContextForm form, const std::string& batch) {
  const Degrees degrees{.cp = cp, .form = form};
  train::Config config = config_for(folder, degrees);
  config.parallelism.context_parallel_parts = kParts;
  return run_gradients(config, layout_of(degrees), batch);
}

std::vector<std::string> dense_folders() {
  std::vector<std::string> all = folders_of_rows();
  std::erase_if(all, [](const std::string& folder) { return spec_of(folder).moe.has_value(); });
  return all;
}

class ContextBitsOfFiles : public ::testing::TestWithParam<std::string> {};

TEST_P(ContextBitsOfFiles, LogitsAreOneRanksAndALayoutTwiceIsTheSame) {
  const ModelSpec spec = spec_of(GetParam());
  const std::string batch = batch_file(spec, 2, positions_of(spec));
  const Gradients expected = written(GetParam(), 1, ContextForm::kGather, batch);
  for (const int cp : test::in_turn(std::vector{2, 4}, 2, dense_folders(), GetParam())) {
    SCOPED_TRACE(cp);
    const Gradients found = written(GetParam(), cp, ContextForm::kGather, batch);
    EXPECT_TRUE(same_bits(found.logits, expected.logits));
    EXPECT_NEAR(found.loss, expected.loss, 2 * kLossOfRanks * expected.loss);  // the file has fp32
    for (const auto& [name, gradient] : expected.by_name) {
      EXPECT_LT(relative_error(found.by_name.at(name), gradient), kSumBound) << name;
    }
    expect_same_bits(written(GetParam(), cp, ContextForm::kGather, batch), found);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, ContextBitsOfFiles, ::testing::ValuesIn(dense_folders()),
                         folder_name);

/// Tokens with the ends of documents of 3 to 40, as a run reads them.
train::Config run_of_tokens(const TemporaryFolder& folder, Rows kind) {
  std::mt19937 random(9);
  std::vector<std::uint16_t> tokens;
  std::vector<std::uint64_t> ends;
  while (tokens.size() < 4000) {
    const auto length = 3 + random() % 38;
    for (std::size_t i = 0; i < length; ++i) {
      tokens.push_back(static_cast<std::uint16_t>(2 + random() % 90));
    }
    ends.push_back(tokens.size());
  }
  const auto bytes = [](const auto& values) {
    return std::string_view(reinterpret_cast<const char*>(values.data()),
                            values.size() * sizeof values[0]);
  };
  folder.write("t.bin", bytes(tokens));
  folder.write("t.docs.bin", bytes(ends));
  folder.write("t.json", concat(R"({"dtype": "uint16", "num_tokens": )", tokens.size(),
                                R"(, "vocab_size": 128})"));
  train::Config config;
  config.data.path = {(folder / "t.bin").string()};
  config.data.packing =
      kind == Rows::kPacked ? train::Packing::kDocuments : train::Packing::kStream;
  config.training.seq_len = 64;
  config.training.global_batch_size = 4;
  config.training.steps = 6;
  config.optimizer.lr = 1e-3;
  config.checkpoint.folder = folder / "checkpoint";
  config.checkpoint.interval = 3;
  return config;
}

/// A run of several ranks of cp, and the rows that it took.
struct RunOfRows {
  std::vector<double> losses;
  std::vector<at::Tensor> rows;
};

RunOfRows run_over(int cp, const train::Config& of) {
  const Degrees degrees{.cp = cp};
  train::Config config = of;
  config.model.path = data_folder("qwen3-fp32");
  config.precision.param_dtype.dtype = DType::kFloat32;
  config.training.local_batch_size = 4;
  config.parallelism.context_parallel_degree = cp;
  config.parallelism.context_parallel_parts = kParts;
  RunOfRows run;
  const test_hooks::Set taken(test_hooks::took_micro_batch,
                              [&](const Mesh& mesh, const train::MicroBatch& batch) {
                                if (mesh.world()->rank() != 0) return;
                                run.rows.push_back(batch.input_ids.clone());
                              });
  run.losses = run_training(config, layout_of(degrees)).losses;
  return run;
}

TEST(ContextBitsOfRuns, ARunOfTwoRanksResumesOnOneAndOnFour) {
  for (const Rows kind : {Rows::kOneDocument, Rows::kPacked}) {
    SCOPED_TRACE(kind == Rows::kPacked ? "packed" : "one document");
    const TemporaryFolder folder;
    const train::Config config = run_of_tokens(folder, kind);
    const RunOfRows whole = run_over(2, config);
    ASSERT_EQ(whole.losses.size(), 6U);
    for (const int cp : {1, 2, 4}) {
      SCOPED_TRACE(cp);
      train::Config resumed = config;
      resumed.checkpoint.folder = folder / concat("from-2-on-", cp);
      std::filesystem::copy(folder / "checkpoint", resumed.checkpoint.folder,
                            std::filesystem::copy_options::recursive);
      for (const char* later : {"step-6", "latest"}) {
        std::filesystem::remove_all(std::filesystem::path(resumed.checkpoint.folder) / later);
      }
      const RunOfRows rest = run_over(cp, resumed);
      ASSERT_EQ(rest.losses.size(), 3U);
      for (std::size_t i = 0; i < rest.losses.size(); ++i) {
        // Forward's bits are the same; the sum of the tokens' losses is rounded once a rank.
        EXPECT_NEAR(rest.losses[i], whole.losses[i + 3], 1e-7 * whole.losses[i + 3]) << i;
        if (cp == 2) {
          EXPECT_EQ(rest.losses[i], whole.losses[i + 3]);
        }
        EXPECT_TRUE(at::equal(rest.rows.at(i), whole.rows.at(i + 3))) << i;
      }
    }
  }
}

/// The result and the gradient of x.
std::pair<at::Tensor, at::Tensor> product(const at::Tensor& x, const at::Tensor& weight,
                                          const at::Tensor& grad) {
  const at::Tensor leaf = x.clone().requires_grad_(true);
  const at::Tensor result = nn::linear(leaf, weight);
  result.backward(grad.contiguous());
  return {result.detach(), leaf.grad()};
}

// The condition of all bits above. On a machine where it fails, rows of a cut are equal within
// bounds only, and the contract of a run has to say "bounds".
TEST(ContextBitsOfProducts, ARowOfAProductDoesNotDependOnItsOtherRows) {
  struct Shape {
    std::int64_t in, out;
  };
  // Of the families here, and of larger ones: projections, MLPs, routers, heads.
  const std::vector<Shape> shapes{{32, 32},  {32, 16},    {32, 8},    {32, 128}, {64, 32},
                                  {48, 96},  {96, 48},    {16, 32},   {24, 20},  {384, 1024},
                                  {384, 64}, {1024, 384}, {256, 2000}};
  at::set_num_threads(1);
  for (const auto& [in, out] : shapes) {
    for (const std::int64_t positions : {32, 128, 512}) {
      const at::Tensor x = test::seeded(1, {positions, in});
      const at::Tensor weight = test::seeded(2, {out, in});
      const at::Tensor grad = test::seeded(3, {positions, out});
      const auto [result, grad_x] = product(x, weight, grad);
      for (const std::int64_t rows : {4, 5, 6, 7, 8, 12, 16, 31, 64, 128, 256}) {
        for (std::int64_t begin = 0; begin + rows <= positions; begin += positions / 4) {
          const auto part = [&](const at::Tensor& of) { return of.narrow(0, begin, rows); };
          const auto [of_part, grad_of_part] = product(part(x), weight, part(grad));
          EXPECT_TRUE(same_bits(of_part, part(result)))
              << in << " -> " << out << ", " << rows << " rows of " << positions;
          EXPECT_TRUE(same_bits(grad_of_part, part(grad_x)))
              << in << " -> " << out << " backward, " << rows << " rows of " << positions;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::golden::context_bits_test
