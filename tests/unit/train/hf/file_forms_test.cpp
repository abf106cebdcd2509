// Which tensors of a file hold a parameter, and where its elements lie in them.
#include "checkpoint/file_forms.h"

#include <array>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <random>

#include "support/temporary_folder.h"
#include "train/hf/model_forms.h"
#include "train/hf/renamed_tensors.h"

namespace tessera::train::file_forms_test {
namespace {

using checkpointing::part_of;
using checkpointing::pieces_in_file;

models::ParameterSpec experts(std::int64_t count) {
  models::ParameterSpec parameter;
  parameter.name = "model.layers.0.mlp.experts.gate_up_proj";
  parameter.shape = {count, 6, 4};
  for (std::int64_t e = 0; e < count; ++e) {
    for (const char* part : {"gate", "up"}) {
      parameter.stacked.push_back(
          concat("model.layers.0.mlp.experts.", e, ".", part, "_proj.weight"));
    }
  }
  parameter.stacked_shape = {3, 4};
  return parameter;
}

TEST(FileForms, AStackedParameterIsItsTensorsAndAnyOtherOneOfItsName) {
  const models::ParameterSpec norm{.name = "model.norm.weight", .shape = {4}};
  const FileForms forms = file_forms({norm, experts(3)});
  GradContract contract;
  contract.name = "model.layers.0.mlp.experts.gate_up_proj";
  contract.shape = {3, 6, 4};
  const FileForm stacked = forms.of(contract);
  EXPECT_EQ(stacked.names, experts(3).stacked);
  EXPECT_EQ(stacked.file.count, 6);
  EXPECT_EQ(stacked.file.shape, (std::vector<std::int64_t>{3, 4}));
  for (const char* name : {"model.norm.weight", "an.adapter.lora_A.weight"}) {
    contract.name = name;
    contract.shape = {4};
    const FileForm own = forms.of(contract);
    EXPECT_EQ(own.names, std::vector<std::string>{name});
    EXPECT_EQ(own.file.count, 1);
    EXPECT_EQ(own.file.shape, contract.shape);
  }
  contract.name = "model.layers.0.mlp.experts.gate_up_proj";
  contract.shape = {3, 6, 4};
  EXPECT_EQ(FileForms().of(contract).names.size(), 1U) << "without a table nothing is stacked";
}

// Muon takes whole: each matrix of a layer as files have it, each expert's by itself.
TEST(HiddenMatrices, AreThoseOfLayersButRoutersVectorsNormsAndBiases) {
  using models::DecayClass;
  std::vector<models::ParameterSpec> table{
      {.name = "model.embed_tokens.weight", .shape = {9, 4}, .decay = DecayClass::kEmbedding},
      {.name = "q_proj.weight", .shape = {6, 4}, .layer = 0},
      {.name = "q_proj.bias", .shape = {6}, .decay = DecayClass::kBias, .layer = 0},
      {.name = "norm.weight", .shape = {4}, .decay = DecayClass::kNorm, .layer = 0},
      {.name = "gate.weight", .shape = {3, 4}, .part = models::ModelPart::kRouter, .layer = 0},
      {.name = "shared_expert_gate.weight", .shape = {1, 4}, .layer = 0},
      {.name = "q_proj.lora_B.weight", .shape = {6, 1}, .layer = 0},
      {.name = "down_proj", .shape = {3, 4, 2}, .layer = 0},
      {.name = "experts_of_one", .shape = {1, 4, 2}, .layer = 0},
      {.name = "down_proj_bias", .shape = {3, 4}, .decay = DecayClass::kBias, .layer = 0},
      {.name = "lm_head.weight", .shape = {9, 4}}};
  table.push_back(experts(3));
  table.back().layer = 0;
  const auto found = hidden_matrices(table);
  ASSERT_EQ(found.size(), 4U);
  const auto expect = [&](const std::string& name, std::int64_t count, std::int64_t rows,
                          std::int64_t columns) {
    EXPECT_EQ(found.at(name).count, count) << name;
    EXPECT_EQ(found.at(name).shape, (std::vector<std::int64_t>{rows, columns})) << name;
  };
  expect("q_proj.weight", 1, 6, 4);
  expect("down_proj", 3, 4, 2);
  expect("experts_of_one", 1, 4, 2);
  expect(table.back().name, 6, 3, 4);
}

using layout::FusedMatrices;

// Gate and up of experts in the three ways in which families store them, and a dense one.
std::vector<models::ParameterSpec> fused_table() {
  using Order = FusedMatrices::Order;
  const FusedMatrices halves{2, 1, Order::kSideBySide}, in_turn{2, 1, Order::kInTurn};
  std::vector<models::ParameterSpec> table{
      {.name = "halves", .shape = {3, 4, 10}, .layer = 0, .fused = halves},
      {.name = "in_turn", .shape = {3, 4, 10}, .layer = 0, .fused = in_turn},
      {.name = "rows", .shape = {3, 10, 4}, .layer = 0, .fused = {2, 0, Order::kSideBySide}},
      {.name = "c_attn", .shape = {4, 12}, .layer = 0, .fused = {3, 1, Order::kSideBySide}},
      {.name = "plain", .shape = {6, 4}, .layer = 0}};
  table.push_back(experts(3));
  table.back().layer = 0;
  table.back().fused = {2, 0, Order::kSideBySide};
  return table;
}

TEST(HiddenMatrices, OfFusedWeightsAreEachPartUnlessARuleSaysOtherwise) {
  const auto table = fused_table();
  const std::string stacked = table.back().name;
  const auto apart = hidden_matrices(table);
  const auto expect = [](const fsdp::MatrixForm& form, std::int64_t count,
                         const std::vector<std::int64_t>& shape, const FusedMatrices& fused) {
    EXPECT_EQ(form.count, count);
    EXPECT_EQ(form.shape, shape);
    EXPECT_EQ(form.fused, fused);
  };
  expect(apart.at("halves"), 3, {4, 10}, table[0].fused);
  expect(apart.at("in_turn"), 3, {4, 10}, table[1].fused);
  expect(apart.at("rows"), 6, {5, 4}, {});
  expect(apart.at("c_attn"), 1, {4, 12}, table[3].fused);
  expect(apart.at("plain"), 1, {6, 4}, {});
  expect(apart.at(stacked), 6, {3, 4}, {});
  const std::vector<OptimizerRule> rules{{.match = {"*"}, .split_fused = false},
                                         {.match = {"in_turn"}, .split_fused = true}};
  const auto as_one = fused_as_one(table, rules);
  EXPECT_EQ(as_one, (std::vector<std::string>{"halves", "rows", "c_attn", stacked}));
  const auto together = hidden_matrices(table, as_one);
  expect(together.at("halves"), 3, {4, 10}, {});
  expect(together.at("in_turn"), 3, {4, 10}, table[1].fused);
  expect(together.at("rows"), 3, {10, 4}, {});
  expect(together.at("c_attn"), 1, {4, 12}, {});
  expect(together.at(stacked), 3, {6, 4}, {});
}

// Drawn: rules that speak of fused weights, of others, or of nothing, with a second number or not.
// Naive: a choice that changes nothing is taken silently.
TEST(SplitFused, IsRefusedWhereItHasNoEffect) {
  const auto table = fused_table();
  const std::pair<const char*, bool> patterns[] = {{"halves", true}, {"row*", true},
                                                   {"*", true},      {"plain", false},
                                                   {"*lain", false}, {"nothing", false}};
  std::mt19937 random(11);
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    OptimizerRule rule{.match = {}, .split_fused = random() % 2 == 0};
    if (random() % 3 == 0) rule.lr_scale = 2.0;
    int without = 0;
    const int count = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < count; ++i) {
      const auto& [pattern, is_of_fused] = patterns[random() % std::size(patterns)];
      rule.match.emplace_back(pattern);
      without += !is_of_fused;
    }
    std::vector<OptimizerRule> rules(random() % 3, OptimizerRule{{"plain"}, 1.0});
    rules.push_back(rule);
    const auto check = [&](fsdp::OptimizerName name) { check_split_fused(table, rules, name); };
    const std::string key = concat("optimizer.rule[", rules.size(), "].split_fused: found ");
    if (without == 0 || (rule.lr_scale && without < count)) {
      EXPECT_NO_THROW(check(fsdp::OptimizerName::kMuon));
    } else {
      ++refused;
      const auto said = error_of(ErrorKind::kContract, [&] { check(fsdp::OptimizerName::kMuon); });
      EXPECT_THAT(said, StartsWith(key + "the pattern \""));
      EXPECT_THAT(said, Says("this model has 5, as \"halves\""));
    }
    const auto other = error_of(ErrorKind::kConfig, [&] { check(fsdp::OptimizerName::kAdamW); });
    EXPECT_THAT(other, StartsWith(key + (*rule.split_fused ? "true" : "false")));
    rules.back().split_fused.reset();
    EXPECT_NO_THROW(check(fsdp::OptimizerName::kAdamW));
  }
  EXPECT_GT(refused, 50);
  EXPECT_REFUSED(
      kContract,
      check_split_fused({}, {{.match = {"*"}, .split_fused = false}}, fsdp::OptimizerName::kMuon),
      "this model has none");
}

// The matrices of a checkpoint that was written before there was a choice.
TEST(HiddenMatrices, WereOneWhereFilesHoldOneTensor) {
  EXPECT_EQ(fused_in_files(fused_table()),
            (std::vector<std::string>{"halves", "in_turn", "rows", "c_attn"}));
  EXPECT_EQ(fused_weights(fused_table()).size(), 5U);
  EXPECT_EQ(fused_as_one(fused_table(), {}), std::vector<std::string>());
}

TEST(FileForms, TensorsThatAreNotTheParameterAreOurMistake) {
  auto parameter = experts(3);
  parameter.stacked.pop_back();
  EXPECT_REFUSED(kInternal, file_form(parameter));
}

// The short way is layout::pieces of a layout that cuts nothing, and knows parameters without dims.
TEST(PiecesInFile, OfAWholeParameterAreARangeOfEachTensor) {
  std::mt19937_64 random(3);
  const auto below = [&](std::int64_t most) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most));
  };
  ParameterLayout replicated;
  replicated.axes = {{"tp", 2, {PlacementKind::kReplicate}, {PlacementKind::kPartial}}};
  for (int i = 0; i < 200; ++i) {
    const std::int64_t count = 1 + below(5);
    const std::vector<std::int64_t> each{1 + below(4), 1 + below(4)};
    const std::vector<std::int64_t> shape{count, each[0], each[1]};
    const std::int64_t numel = count * each[0] * each[1];
    const std::int64_t begin = below(numel + 1);
    const layout::Range range{begin, begin + below(numel - begin + 1)};
    const layout::FileShape file{count, each};
    const auto expected = layout::pieces({}, shape, file, {}, range);
    EXPECT_EQ(pieces_in_file({}, shape, file, {}, range), expected);
    EXPECT_EQ(pieces_in_file(replicated, shape, file, {1}, range), expected);
  }
  const auto scalar = pieces_in_file({}, {}, {1, {}}, {}, {0, 1});
  ASSERT_EQ(scalar.size(), 1U);
  EXPECT_EQ(scalar[0].in_box, (layout::Range{0, 1}));
}

TEST(PiecesInFile, OfACutParameterAreThoseOfTheLayout) {
  ParameterLayout layout;
  layout.sharded_shape = {3, 2, 3, 4};
  layout.axes = {{"etp", 3, {PlacementKind::kShard, 2}, {PlacementKind::kShard, 2}}};
  const layout::FileShape file{6, {3, 4}};
  const auto found = pieces_in_file(layout, {3, 6, 4}, file, {1}, {2, 15});
  EXPECT_EQ(found, layout::pieces(layout, {3, 6, 4}, file, {1}, {2, 15}));
  ASSERT_EQ(found.size(), 4U);
  EXPECT_EQ(found[0].in_box, (layout::Range{6, 8})) << "row 1 of expert 0's gate";
  EXPECT_EQ(part_of(found[1], 1, 3).in_box, (layout::Range{5, 7}));
  EXPECT_EQ(part_of(found[1], 1, 3).local, (layout::Range{5, 7}));
  EXPECT_REFUSED(kInternal, part_of(found[0], 0, 3));
}

// A folder of a larger model, seen as the one of the model in it.

/// Each tensor holds its name's first letters, a byte each.
class Letters final : public TensorSource {
 public:
  explicit Letters(const std::vector<std::string>& names) {
    for (const std::string& name : names) tensors_[name] = {DType::kUInt8, {2}, DType::kUInt8};
  }
  const std::filesystem::path& path() const override { return path_; }
  const Tensors& tensors() const override { return tensors_; }
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override {
    std::memcpy(out.data(), name.data() + begin, static_cast<std::size_t>(end - begin));
  }
  std::vector<HashedFile> hashed_files() const override { return {{"one", 7}}; }

 private:
  std::filesystem::path path_ = "folder";
  Tensors tensors_;
};

std::string text_in_it(std::string_view name) {
  if (name.starts_with("vision.")) return {};
  return std::string(name.starts_with("text.") ? name.substr(5) : name);
}

std::string letters(const TensorSource& source, std::string_view name) {
  std::array<std::byte, 2> out{};
  source.read(name, 0, 2, out);
  return {reinterpret_cast<const char*>(out.data()), 2};
}

TEST(RenamedTensors, HaveTheModelsNamesAndTheFoldersBytes) {
  const RenamedTensors renamed(
      std::make_shared<Letters>(std::vector<std::string>{"text.norm", "vision.a", "head"}),
      text_in_it);
  EXPECT_EQ(renamed.tensors().size(), 2U);
  EXPECT_EQ(letters(renamed, "norm"), "te");
  EXPECT_EQ(letters(renamed, "head"), "he");
  EXPECT_THAT(renamed.left_out(), ElementsAre("vision.a"));
  EXPECT_TRUE(renamed.changes());
  EXPECT_EQ(renamed.hashed_files().front().bytes, 7);
  EXPECT_THROW(letters(renamed, "text.norm"), Error);
  EXPECT_THROW(letters(renamed, "vision.a"), Error);
}

TEST(RenamedTensors, OfTheModelItselfChangeNothing) {
  const RenamedTensors renamed(std::make_shared<Letters>(std::vector<std::string>{"norm", "head"}),
                               text_in_it);
  EXPECT_FALSE(renamed.changes());
  EXPECT_EQ(letters(renamed, "norm"), "no");
}

TEST(RenamedTensors, TwoOfOneNameAreRefusedWithBoth) {
  EXPECT_REFUSED(
      kFormat,
      const RenamedTensors renamed(
          std::make_shared<Letters>(std::vector<std::string>{"text.norm", "norm"}), text_in_it),
      "'norm' and 'text.norm'");
}

}  // namespace
}  // namespace tessera::train::file_forms_test
