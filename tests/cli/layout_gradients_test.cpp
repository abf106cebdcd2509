// `tessera gradients` of models with experts as processes, against transformers: what every layout
// does on thread ranks (golden/parallel_test.cpp), here through the program, its launch and its
// sockets.

#include <span>

#include "cli/layout_run.h"
#include "cli/program.h"
#include "golden/model_folder.h"
#include "golden/reference.h"
#include "io/safetensors.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::cli::layout_gradients_test {
namespace {

using golden::Gradients;
using golden::Reference;

const std::vector<std::string> kFloat32{"--precision.param_dtype=float32"};

/// The gradients of the folder's one batch. The file says in which layout it was made: it is the
/// one asked for.
Gradients gradients(const std::string& name, const ProcessLayout& layout,
                    const std::vector<std::string>& more) {
  const TemporaryFolder folder;
  auto words = in_layout(layout, {"gradients", "--model", golden::data_folder(name).string(),
                                  "--batch", Reference::of(name).batches(), "--out", "g"});
  words.insert(words.end(), more.begin(), more.end());
  const Outcome outcome = succeeded(run_program(folder, words));
  if (outcome.code != 0) return {};
  const auto metadata = SafetensorsFile(folder / "g").header().metadata;
  EXPECT_THAT(metadata.at("layout"),
              Says(concat("dp_shard ", layout.shard, " x cp ", layout.cp, " x tp ", layout.tp)));
  if (layout.ep > 1) {
    EXPECT_THAT(metadata.at("layout"), Says(concat("ep ", layout.ep, " x etp ", layout.etp)));
  }
  return golden::read_gradients(folder / "g");
}

class LayoutGradients : public ::testing::TestWithParam<std::string> {};

const std::vector<std::string> kFamilies{"qwen3-moe-fp32", "gpt-oss-mxfp4", "deepseek-v2-fp32"};

TEST_P(LayoutGradients, OfEveryParameterAreTransformersOnProcesses) {
  const std::vector<ProcessLayout> layouts{
      {.tp = 2},                                 // experts whole, tokens on shards
      {.shard = 2, .tp = 2, .ep = 2},            // experts on two ranks, and sharded
      {.shard = 2, .tp = 2, .ep = 2, .etp = 2},  // experts on two ranks, and cut
      {.ep = 2, .cp = 2}};                       // positions on two ranks, and experts
  for (const ProcessLayout& layout : test::in_turn(layouts, 2, kFamilies, GetParam())) {
    SCOPED_TRACE(to_string(layout));
    golden::expect_within_bounds(gradients(GetParam(), layout, kFloat32),
                                 Reference::of(GetParam()));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, LayoutGradients, ::testing::ValuesIn(kFamilies),
                         [](const auto& each) { return golden::test_name(each.param); });

/// 3 rows, which two data ranks do not share alike.
void write_uneven_batch(const std::filesystem::path& path) {
  std::vector<std::int64_t> ids(3 * 16);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 7 % 50);
  SafetensorsWriter writer(
      path, {{"input_ids", DType::kInt64, {3, 16}}, {"labels", DType::kInt64, {3, 16}}});
  writer.write("input_ids", std::as_bytes(std::span(ids)));
  writer.write("labels", std::as_bytes(std::span(ids)));
  writer.finish();
}

// Naive: one pass, whose regions are eager and whose gathers no plan has; plans by the rows of each
// rank, which are no longer one.
TEST(CompiledGradients, AreThoseOfEagerPasses) {
  const std::string name = "qwen3-moe-fp32";
  const std::vector<std::vector<std::string>> compiled{
      {"--compile.mode", "plan", "--compile.memory_budget", "90%"}, {"--compile.mode", "replay"}};
  const std::vector<std::size_t> numbers{0, 1};  // in ./test --all each layout has one of the modes
  for (const std::size_t number : numbers) {
    const auto layout =
        number == 0 ? ProcessLayout{.shard = 2} : ProcessLayout{.shard = 2, .tp = 2, .ep = 2};
    SCOPED_TRACE(to_string(layout));
    const TemporaryFolder folder;
    write_uneven_batch(folder / "batch.safetensors");
    const auto run = [&](const std::string& out, const std::vector<std::string>& more) {
      auto words = in_layout(layout, {"gradients", "--model", golden::data_folder(name).string(),
                                      "--batch", "batch.safetensors", "--out", out});
      words.insert(words.end(), more.begin(), more.end());
      return run_program(folder, words);
    };
    ASSERT_EQ(run("eager", {}).code, 0);
    const auto expected = read_file(folder / "eager");
    for (const auto& more : test::in_turn(compiled, 2, numbers, number)) {
      const Outcome outcome = succeeded(run(more[1], more));
      EXPECT_TRUE(read_file(folder / more[1]) == expected) << more[1];
      const auto at = outcome.err.find(" calls replayed");
      EXPECT_EQ(at != std::string::npos, more[1] == "replay") << outcome.err;
      EXPECT_EQ(outcome.err.find(" 0 calls replayed"), std::string::npos) << outcome.err;
    }
    EXPECT_THAT(run("below", {"--compile.mode", "plan", "--compile.memory_budget", "1000"}),
                Exits(2, "compile.memory_budget: found 1000 bytes a rank"));
  }
}

// The bounds are those recorded for transformers' own bf16 (golden/narrow_layouts_test.cpp).
TEST(NarrowGradients, InBFloat16PointTheSameWayOnProcessesWithTheRecordedRouting) {
  const std::string name = "qwen3-moe-fp32";
  const Reference& reference = Reference::of(name);
  const auto found = gradients(name, {.shard = 2, .tp = 2, .ep = 2}, {"--impose-routing"});
  EXPECT_NEAR(found.loss, reference.result("loss").item<double>(), 0.02);
  ASSERT_EQ(found.by_name.size(), reference.gradients().size());
  double most = 0;
  for (const auto& [parameter, expected] : reference.gradients()) {
    const double difference = golden::cosine_difference(found.by_name.at(parameter), expected);
    EXPECT_LT(difference, reference.bfloat16_bound()) << parameter;
    most = std::max(most, difference);
  }
  EXPECT_GT(most, 1e-6) << "it was not bf16";
}

}  // namespace
}  // namespace tessera::cli::layout_gradients_test
