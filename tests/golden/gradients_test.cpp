// `tessera gradients` against transformers under every layout, and against itself bit for bit.
//
// [Note: same bits] The batch has two rows. Where no forward has more than one row, every
// parameter's gradient is g0 + g1 and perhaps + 0 for each rank without a row: on the wire in rank
// order, in an accumulator in the order of micro-batches, over replicas after shards. So all such
// layouts agree in every bit. One forward of both rows adds inside its matrix products, in another
// order: it agrees with itself under reshard_after_forward, and with the rest within the bounds.
// One exception: a tied weight has two uses a row, which arrive one by one. One rank adds all four
// in turn, ((head0 + embedding0) + head1) + embedding1; several ranks add the pairs first.
//
// ./test runs a third of a pairwise part of layouts and forms of the folder, another part for each
// folder, `scripts/full golden` all of them.

#include <iterator>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "proof.h"
#include "support/temporary_folder.h"

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

/// A layout, and one of the four forms of the folder, which hold the same numbers.
struct GridCase {
  Layout layout;
  Spelling spelling;
  Files files;
};

std::string to_string(const GridCase& c) {
  return concat(to_string(c.layout), ", ", c.spelling == Spelling::kHub ? "hub" : "written", ", ",
                c.files == Files::kSeveral ? "several files" : "one file");
}

/// Another pairwise part for each folder.
std::vector<GridCase> grid(const std::string& folder) {
  constexpr std::pair<int, int> kShapes[] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {2, 2}, {4, 2}};
  constexpr MicroBatches kMicroBatches[] = {MicroBatches::kWhole, MicroBatches::kOneRow,
                                            MicroBatches::kOneRowEachSync};
  constexpr Spelling kSpellings[] = {Spelling::kWritten, Spelling::kHub};
  constexpr Files kFiles[] = {Files::kOne, Files::kSeveral};
  const auto found = std::ranges::find(all_folders(), folder);
  const auto seed = static_cast<std::uint32_t>(found - all_folders().begin());
  std::vector<GridCase> all;
  for (const auto& choice : test::cases(
           {std::size(kShapes), 2, std::size(kMicroBatches), std::size(kSpellings),
            std::size(kFiles)},
           [](const test::Choice&) { return true; }, seed)) {
    const auto [ranks, replicas] = kShapes[choice[0]];
    all.push_back({{ranks, replicas, choice[1] == 0, kMicroBatches[choice[2]]},
                   kSpellings[choice[3]],
                   kFiles[choice[4]]});
  }
  return all;
}

TEST_P(GoldenGradients, EveryLayoutIsWithinTheBoundsAndOneRowAForwardAlwaysHasTheSameBits) {
  const auto whole = gradients({.ranks = 1});
  const auto by_row = gradients({.ranks = 2});
  const auto by_row_on_one = gradients({.ranks = 1, .micro_batches = MicroBatches::kOneRow});
  expect_same_row_sums(by_row_on_one, by_row, reference().tied());
  for (const auto& each : test::in_turn(grid(GetParam()), 3, all_folders(), GetParam())) {
    SCOPED_TRACE(to_string(each));
    const auto found = gradients(each.layout, each.spelling, each.files);
    expect_within_bounds(found, reference());
    const bool one_rank = each.layout.ranks == 1;
    expect_same_bits(found, !each.layout.one_row_a_forward() ? whole
                            : one_rank                       ? by_row_on_one
                                                             : by_row);
  }
}

TEST_P(GoldenGradients, GlooGivesTheBitsOfTheInProcessBackend) {
  const auto expected = gradients({.ranks = 2});
  const std::vector<Layout> layouts{
      {.ranks = 2, .backend = ThreadBackend::kGloo},
      {.ranks = 3,
       .reshard_after_forward = false,
       .micro_batches = MicroBatches::kOneRowEachSync,
       .backend = ThreadBackend::kGloo},
      {.ranks = 4, .replicas = 2, .backend = ThreadBackend::kGloo},
  };
  for (const auto& layout : test::in_turn(layouts, 3, all_folders(), GetParam())) {
    SCOPED_TRACE(to_string(layout));
    expect_same_bits(gradients(layout), expected);
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

// As save_pretrained cuts them; cut by ourselves: EveryLayout.
TEST(GoldenPublished, FoldersInSeveralFilesHaveTheBitsOfOneFile) {
  int count = 0;
  for (const auto& folder : all_folders()) {
    const auto published = data_folder(folder) / "sharded";
    if (!std::filesystem::exists(published)) continue;
    ++count;
    const auto& batches = Reference::of(folder).batches();
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(concat(folder, ", ", ranks, " ranks"));
      expect_same_bits(run_gradients(published, {.ranks = ranks}, batches),
                       run_gradients(data_folder(folder), {.ranks = ranks}, batches));
    }
  }
  EXPECT_GE(count, 6);
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
        error_of(ErrorKind::kContract, [&] { run_gradients(config, layout, batches); });
    EXPECT_NE(message.find("debug.check_dtypes: found"), std::string::npos) << message;
    EXPECT_NE(message.find("because of input 0 of unit model.layers.0"), std::string::npos)
        << message;
    config.debug.check_dtypes = false;
    run_gradients(config, layout, batches);
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenGradients, ::testing::ValuesIn(all_folders()), folder_name);

}  // namespace
}  // namespace tessera::golden::gradients_test
