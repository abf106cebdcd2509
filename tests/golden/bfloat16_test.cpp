// bf16 compute under sharding: gradients still point where the fp32 ones do, and what a checkpoint
// stores wider than its bulk is computed as wide.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "train/parallelize.h"

namespace tessera::golden {
namespace {

class GoldenBFloat16 : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  bool mixed() const { return GetParam().ends_with("-mixed"); }
  train::Config config(const Layout& layout) const {
    auto config = config_for(layout);
    config.model.path = data_folder(GetParam());
    config.precision = {};  // the defaults: bf16 compute, fp32 for storage, sums and wire
    return config;
  }
  Gradients gradients(const Layout& layout) const {
    return run_gradients(config(layout), layout, reference().batches());
  }
};

TEST_P(GoldenBFloat16, GradientsPointTheSameWayOnEveryLayout) {
  const Layout layouts[] = {{.ranks = 1},
                            {.ranks = 1, .micro_batches = MicroBatches::kOneRow},
                            {.ranks = 2},
                            {.ranks = 4}};
  for (const auto& layout : layouts) {
    SCOPED_TRACE(to_string(layout));
    const auto found = gradients(layout);
    // 8 bits of mantissa: 2^-8 of a loss between 5 and 6, and rounding errors average out.
    EXPECT_NEAR(found.loss, reference().result("loss").item<double>(), 0.02);
    ASSERT_EQ(found.by_name.size(), reference().gradients().size());
    for (const auto& [name, expected] : reference().gradients()) {
      EXPECT_LT(cosine_difference(found.by_name.at(name), expected), reference().bfloat16_bound())
          << name;
    }
  }
}

// Slots, wire and sums are fp32, so that [Note: same bits] of gradients_test.cpp holds here as
// well.
TEST_P(GoldenBFloat16, OneRowAForwardHasTheSameBitsUnderEveryLayout) {
  const auto expected = gradients({.ranks = 2});
  const Layout layouts[] = {
      {.ranks = 1, .micro_batches = MicroBatches::kOneRow},
      {.ranks = 1, .reshard_after_forward = false, .micro_batches = MicroBatches::kOneRowEachSync},
      {.ranks = 3},
      {.ranks = 4, .replicas = 2},
      {.ranks = 2, .replicas = 2},
      {.ranks = 4, .backend = ThreadBackend::kGloo}};
  for (const auto& layout : layouts) {
    SCOPED_TRACE(to_string(layout));
    expect_same_bits(gradients(layout), expected);
  }
}

TEST_P(GoldenBFloat16, ContractComputesNormsOfMixedFoldersInFloat32) {
  const auto run = config({});
  const auto contracts =
      train::resolve_model(train::open_model(run.model), run, train::resolve_parallelism({}, 2));
  for (const auto& contract : contracts) {
    const bool norm = contract.name.ends_with("norm.weight");
    EXPECT_EQ(contract.compute.dtype, norm && mixed() ? DType::kFloat32 : DType::kBFloat16)
        << contract.name << ": " << contract.reason(ContractField::kCompute);
    EXPECT_EQ(contract.storage.dtype, DType::kFloat32) << contract.name;
  }
}

bool is_bfloat16(const at::Tensor& values) {
  return at::equal(values.to(at::kBFloat16).to(at::kFloat), values);
}

// One forward, one rank: nothing is added after the layer, so a gradient has the digits of its
// computation.
TEST_P(GoldenBFloat16, NormsOfMixedFoldersHaveGradientsOfFloat32) {
  const auto found = gradients({.ranks = 1});
  int norms = 0;
  for (const auto& [name, gradient] : found.by_name) {
    if (!name.ends_with("norm.weight")) continue;
    ++norms;
    EXPECT_EQ(is_bfloat16(gradient), !mixed()) << name;
  }
  EXPECT_GT(norms, 0);
}

INSTANTIATE_TEST_SUITE_P(Dense, GoldenBFloat16, ::testing::ValuesIn(kFolders),
                         [](const auto& info) { return test_name(info.param); });

}  // namespace
}  // namespace tessera::golden
