// `tessera gradients` against transformers under every layout, and against itself bit for bit.
//
// [Note: same bits] The batch has two rows. Where no forward has more than one row, every
// parameter's gradient is g0 + g1 and perhaps + 0 for each rank without a row: on the wire in rank
// order, in an accumulator in the order of micro-batches, over replicas after shards. So all such
// layouts agree in every bit. One forward of both rows adds inside its matrix products, in another
// order: it agrees with itself under reshard_after_forward, and with the rest within the bounds.
// One exception: a tied weight has two uses a row, which arrive one by one. One rank adds all four
// in turn, ((head0 + embedding0) + head1) + embedding1; several ranks add the pairs first.
#include <gtest/gtest.h>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "unit/io/temporary_folder.h"

namespace tessera::golden::gradients_test {
namespace {

class GoldenGradients : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  Gradients gradients(const Layout& layout, Spelling spelling = Spelling::kWritten,
                      Files files = Files::kOne) const {
    return run_gradients(model_folder(GetParam(), spelling, files), layout, reference().batches());
  }
};

TEST_P(GoldenGradients, EveryLayoutIsWithinTheBoundsAndOneRowAForwardAlwaysHasTheSameBits) {
  const auto whole = gradients({.ranks = 1});
  const auto by_row = gradients({.ranks = 2});
  const auto by_row_on_one = gradients({.ranks = 1, .micro_batches = MicroBatches::kOneRow});
  expect_same_row_sums(by_row_on_one, by_row, reference().tied());
  int index = 0;
  for (const auto& layout : grid()) {
    SCOPED_TRACE(to_string(layout));
    // Every layout reads another of the four forms of the folder, which hold the same numbers.
    const auto spelling = index % 2 == 0 ? Spelling::kWritten : Spelling::kHub;
    const auto files = index / 3 % 2 == 0 ? Files::kOne : Files::kSeveral;
    ++index;
    const auto found = gradients(layout, spelling, files);
    expect_within_bounds(found, reference());
    const bool one_rank = layout.ranks == 1;
    expect_same_bits(found, !layout.one_row_a_forward() ? whole
                            : one_rank                  ? by_row_on_one
                                                        : by_row);
  }
}

TEST_P(GoldenGradients, FilesAndSpellingOfTheConfigChangeNoBit) {
  for (const int ranks : {1, 3}) {
    const auto expected = gradients({.ranks = ranks});
    for (const auto spelling : {Spelling::kWritten, Spelling::kHub}) {
      for (const auto files : {Files::kOne, Files::kSeveral}) {
        SCOPED_TRACE(concat(ranks, " ranks, ", spelling == Spelling::kHub ? "hub" : "written", ", ",
                            files == Files::kSeveral ? "several files" : "one file"));
        expect_same_bits(gradients({.ranks = ranks}, spelling, files), expected);
      }
    }
    const auto published = data_folder(GetParam()) / "sharded";  // as save_pretrained cuts it
    if (!std::filesystem::exists(published)) continue;
    expect_same_bits(run_gradients(published, {.ranks = ranks}, reference().batches()), expected);
  }
}

TEST_P(GoldenGradients, GlooGivesTheBitsOfTheInProcessBackend) {
  const auto expected = gradients({.ranks = 2});
  const Layout layouts[] = {
      {.ranks = 2, .backend = ThreadBackend::kGloo},
      {.ranks = 3,
       .reshard_after_forward = false,
       .micro_batches = MicroBatches::kOneRowEachSync,
       .backend = ThreadBackend::kGloo},
      {.ranks = 4, .replicas = 2, .backend = ThreadBackend::kGloo},
  };
  for (const auto& layout : layouts) {
    SCOPED_TRACE(to_string(layout));
    expect_same_bits(gradients(layout), expected);
  }
}

TEST_P(GoldenGradients, ASecondRunHasTheSameBits) {
  for (const Layout& layout :
       {Layout{.ranks = 1}, Layout{.ranks = 3}, Layout{.ranks = 4, .replicas = 2}}) {
    SCOPED_TRACE(to_string(layout));
    expect_same_bits(gradients(layout), gradients(layout));
  }
}

// Property: in our own models nothing leaves the dtype of its unit but what does so on purpose, in
// fp32, in bf16, and where a mixed folder records fp32 norms; the check itself changes no bit.
TEST_P(GoldenGradients, CheckDtypesFindsNothing) {
  for (const bool narrow : {false, true}) {
    const Layout layout{.ranks = narrow ? 3 : 1};  // the third rank has no row
    SCOPED_TRACE(narrow ? "bf16" : "fp32");
    auto config = config_for(layout);
    config.model.path = data_folder(GetParam());
    if (narrow) config.precision = {};
    const auto expected = run_gradients(config, layout, reference().batches());
    config.debug.check_dtypes = true;
    expect_same_bits(run_gradients(config, layout, reference().batches()), expected);
  }
}

// Case 6 of the plan: an embedding that a rule computes in fp32 makes the whole residual stream
// fp32, silently.
TEST(GoldenCheckDtypes, AnEmbeddingInFloat32IsFoundWhereItsResultArrives) {
  for (const int ranks : {1, 2}) {
    const Layout layout{.ranks = ranks};
    auto config = config_for(layout);
    config.model.path = data_folder("llama-fp32");
    config.precision = {};
    config.precision.rule.emplace_back();
    config.precision.rule[0].match = {"embed_tokens"};
    config.precision.rule[0].param_dtype = DType::kFloat32;
    config.debug.check_dtypes = true;
    const auto& batches = Reference::of("llama-fp32").batches();
    const auto message =
        testing::error_of(ErrorKind::kContract, [&] { run_gradients(config, layout, batches); });
    EXPECT_NE(message.find("debug.check_dtypes: found"), std::string::npos) << message;
    EXPECT_NE(message.find("because of input 0 of unit model.layers.0"), std::string::npos)
        << message;
    config.debug.check_dtypes = false;
    run_gradients(config, layout, batches);
  }
}

INSTANTIATE_TEST_SUITE_P(Dense, GoldenGradients, ::testing::ValuesIn(kFolders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(DeepseekV2, GoldenGradients, ::testing::ValuesIn(kDeepseekFolders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(Gemma4, GoldenGradients, ::testing::ValuesIn(kGemmaFolders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(SharedExperts, GoldenGradients, ::testing::ValuesIn(kSharedExpertFolders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(Gpt2, GoldenGradients, ::testing::ValuesIn(kGpt2Folders),
                         [](const auto& each) { return test_name(each.param); });
INSTANTIATE_TEST_SUITE_P(Moe, GoldenGradients, ::testing::ValuesIn(kMoeFolders),
                         [](const auto& each) { return test_name(each.param); });

}  // namespace
}  // namespace tessera::golden::gradients_test
