// Layouts x compute dtypes x recomputation x micro-batches x backends x resharding against
// transformers: what parallel_test.cpp, narrow_layouts_test.cpp and recompute_layouts_test.cpp do
// one by one, together. A pairwise part of it in ./test, all of it under `scripts/full layouts`. The
// families that came later stand in a product of their own, `scripts/full families`.
//
// The class of bug: two settings that are right alone, such as gradients kept between micro-batches
// while experts of another rank are sent a recomputed forward.

#include <iterator>

#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "proof.h"
#include "support/test.h"
#include "unit/train/parallel_degrees.h"

namespace tessera::golden::layout_product_test {
namespace {

enum class Compute { kFloat32, kBFloat16 };

struct Case {
  std::string folder;
  Degrees degrees;
  Compute compute = Compute::kFloat32;
  RecomputeMode recompute = RecomputeMode::kNone;
  Layout layout;
};

std::string to_string(const Case& c) {
  constexpr const char* kRecomputed[] = {"nothing", "layers", "all but weight products"};
  return concat(c.folder, ", ", to_string(c.degrees), ", ",
                c.compute == Compute::kFloat32 ? "fp32" : "bf16", ", ",
                kRecomputed[static_cast<int>(c.recompute)], " recomputed, ", to_string(c.layout));
}

// The values of the dimensions, in the order of a choice.
const std::vector<std::string> kFamilies{"llama-fp32", "qwen3-moe-fp32", "gpt-oss-fp32",
                                         "deepseek-v2-fp32", "gemma4-fp32"};
const std::vector<Degrees>& layouts() {
  static const auto all =
      test::full_proof() ? all_degrees(Experts::kSome) : one_of_each_form(Experts::kSome);
  return all;
}
constexpr Compute kComputes[] = {Compute::kFloat32, Compute::kBFloat16};
constexpr RecomputeMode kModes[] = {RecomputeMode::kNone, RecomputeMode::kFull,
                                    RecomputeMode::kSelective};
constexpr MicroBatches kMicroBatches[] = {MicroBatches::kWhole, MicroBatches::kOneRow,
                                          MicroBatches::kOneRowEachSync};
constexpr ThreadBackend kBackends[] = {ThreadBackend::kInProcess, ThreadBackend::kGloo};
constexpr bool kReshard[] = {true, false};

std::vector<std::size_t> sizes() {
  return {kFamilies.size(),         layouts().size(),     std::size(kComputes), std::size(kModes),
          std::size(kMicroBatches), std::size(kBackends), std::size(kReshard)};
}

Case case_of(const test::Choice& choice) {
  const Degrees& degrees = layouts()[choice[1]];
  Case c{.folder = kFamilies[choice[0]],
         .degrees = degrees,
         .compute = kComputes[choice[2]],
         .recompute = kModes[choice[3]],
         .layout = layout_of(degrees)};
  c.layout.micro_batches = kMicroBatches[choice[4]];
  c.layout.backend = kBackends[choice[5]];
  c.layout.reshard_after_forward = kReshard[choice[6]];
  return c;
}

/// Not what is refused (layout_refusals_test.cpp), and not what another case is already.
bool is_case(const Case& c) {
  const Degrees& degrees = c.degrees;
  const bool of_experts = degrees.ep > 1 || degrees.etp > 1 || degrees.router == RouterTokens::kAll;
  if (of_experts && experts_of(c.folder) == Experts::kNone) return false;
  if (heads_of(c.folder) % degrees.tp != 0) return false;
  // The batch has two rows: two ranks with rows of their own have one each, in one forward.
  const bool shares_rows = degrees.replicate * degrees.shard > 1;
  if (shares_rows && c.layout.micro_batches != MicroBatches::kWhole) return false;
  // One rank sends nothing.
  return degrees.ranks() > 1 || c.layout.backend == ThreadBackend::kInProcess;
}

std::vector<Case> cases_of(const std::string& folder) {
  constexpr std::uint32_t kSeed = 1;
  static const auto choices = test::cases(
      sizes(), [](const test::Choice& choice) { return is_case(case_of(choice)); }, kSeed);
  std::vector<Case> cases;
  for (const auto& choice : choices) {
    if (folder == kFamilies[choice[0]]) cases.push_back(case_of(choice));
  }
  return cases;
}

void expect_transformers_gradients(const Case& c) {
  const Reference& reference = Reference::of(c.folder);
  auto config = config_for(c.layout);
  train::set_parallelism(config, c.degrees);
  config.model.path = data_folder(c.folder);
  config.activation_checkpoint.mode = c.recompute;
  if (c.compute == Compute::kFloat32) {
    expect_within_bounds(run_gradients(config, c.layout, reference.batches()), reference);
    return;
  }
  config.precision = {};  // the defaults: bf16 compute, fp32 for storage, sums and wire
  expect_same_directions(
      run_gradients(config, c.layout, reference.batches(), Routing::kImposed), reference,
      [&](const std::string& name) { return !is_one_draw(c.folder, name, c.degrees); });
}

class LayoutProduct : public ::testing::TestWithParam<std::string> {};

TEST_P(LayoutProduct, EveryGradientIsTransformers) {
  const auto cases = cases_of(GetParam());
  ASSERT_FALSE(cases.empty());
  for (const Case& each : cases) {
    SCOPED_TRACE(to_string(each));
    EXPECT_NO_THROW(expect_transformers_gradients(each));  // what one throws does not end the rest
  }
}

INSTANTIATE_TEST_SUITE_P(Families, LayoutProduct, ::testing::ValuesIn(kFamilies), folder_name);

// ------------------------------------------------------------------------ later families

// The whole product has both dtypes of a folder. How rows are cut, what carries sums and when
// memory is resharded does not depend on a family: here these change from case to case.

const std::vector<std::string>& later_folders() {
  static const auto all = [] {
    std::vector<std::string> folders;
    for (const std::string& family : kLaterFamilies) {
      folders.push_back(family + "-fp32");
      if (test::full_proof()) folders.push_back(family + "-mixed");
    }
    return folders;
  }();
  return all;
}

/// GoldenParallel has them all, with one value of the other dimensions.
const std::vector<Degrees>& later_layouts() {
  static const auto all =
      test::full_proof() ? all_degrees(Experts::kSome)
                         : std::vector<Degrees>{{.replicate = 2, .shard = 2},
                                                {.shard = 2, .tp = 2},
                                                {.tp = 2, .sequence = false},
                                                {.tp = 2, .ep = 2, .router = RouterTokens::kAll},
                                                {.shard = 2, .tp = 2, .ep = 2, .etp = 2}};
  return all;
}

Case later_case(const test::Choice& choice) {
  const Degrees& degrees = later_layouts()[choice[1]];
  Case c{.folder = later_folders()[choice[0]],
         .degrees = degrees,
         .compute = kComputes[choice[2]],
         .recompute = kModes[choice[3]],
         .layout = layout_of(degrees)};
  const std::size_t turn = choice[0] + choice[1] + choice[2] + choice[3];
  if (degrees.replicate * degrees.shard == 1) {
    c.layout.micro_batches = kMicroBatches[turn % std::size(kMicroBatches)];
  }
  if (degrees.ranks() > 1) c.layout.backend = kBackends[turn % std::size(kBackends)];
  c.layout.reshard_after_forward = kReshard[turn / 2 % std::size(kReshard)];
  return c;
}

using LaterProduct = LayoutProduct;

TEST_P(LaterProduct, EveryGradientIsTransformers) {
  constexpr std::uint32_t kSeed = 4;
  static const auto choices = test::cases(
      {later_folders().size(), later_layouts().size(), std::size(kComputes), std::size(kModes)},
      [](const test::Choice& choice) { return is_case(later_case(choice)); }, kSeed);
  std::size_t met = 0;
  for (const auto& choice : choices) {
    const Case each = later_case(choice);
    if (!each.folder.starts_with(GetParam() + "-")) continue;
    ++met;
    SCOPED_TRACE(to_string(each));
    EXPECT_NO_THROW(expect_transformers_gradients(each));
  }
  EXPECT_GT(met, 0U);
}

INSTANTIATE_TEST_SUITE_P(Families, LaterProduct, ::testing::ValuesIn(kLaterFamilies), folder_name);

}  // namespace
}  // namespace tessera::golden::layout_product_test
