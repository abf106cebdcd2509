// bf16 compute under sharding: gradients still point where the fp32 ones do, and what a checkpoint
// stores wider than its bulk is computed as wide.
#include <ATen/ATen.h>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "support/test.h"
#include "train/parallelize.h"

namespace tessera::golden::bfloat16_test {
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
    expect_same_directions(gradients(layout), reference());
  }
}

// Slots, wire and sums are fp32, so that [Note: same bits] of gradients_test.cpp holds here as
// well.
TEST_P(GoldenBFloat16, OneRowAForwardHasTheSameBitsUnderEveryLayout) {
  const auto expected = gradients({.ranks = 2});
  const Layout layouts[] = {
      {.ranks = 2, .micro_batches = MicroBatches::kOneRow},
      {.ranks = 1, .micro_batches = MicroBatches::kOneRow},
      {.ranks = 1, .reshard_after_forward = false, .micro_batches = MicroBatches::kOneRowEachSync},
      {.ranks = 3},
      {.ranks = 4, .replicas = 2},
      {.ranks = 2, .replicas = 2},
      {.ranks = 4, .backend = ThreadBackend::kGloo}};
  for (const auto& layout : layouts) {
    SCOPED_TRACE(to_string(layout));
    if (layout.ranks == 1) {
      expect_same_row_sums(gradients(layout), expected, reference().tied());
    } else {
      expect_same_bits(gradients(layout), expected);
    }
  }
}

/// Whether it decays a state; such parameters are in fp32 in every policy.
bool decays_a_state(const GradContract& contract) {
  return contract.name.ends_with(".A_log") || contract.name.ends_with(".dt_bias");
}

TEST_P(GoldenBFloat16, ContractComputesNormsOfMixedFoldersInFloat32) {
  const auto run = config({});
  const auto resolved =
      train::resolve_model(train::open_model(run.model), run, train::resolve_parallelism({}, 2));
  for (const auto& contract : resolved.parameters) {
    const bool norm = contract.name.ends_with("norm.weight");
    const bool is_wide = (norm && mixed()) || decays_a_state(contract);
    EXPECT_EQ(contract.compute.dtype, is_wide ? DType::kFloat32 : DType::kBFloat16)
        << contract.name << ": " << contract.reason(ContractField::kCompute);
    EXPECT_EQ(contract.storage.dtype, DType::kFloat32) << contract.name;
  }
}

/// The folder with norm weights of at most 8 bits, or those and a quarter of their last bit.
std::filesystem::path with_norms(const std::string& folder, bool above) {
  return changed_folder(folder, [&](std::vector<StoredTensor>& tensors) {
    for (auto& tensor : tensors) {
      if (!tensor.spec.name.ends_with("norm.weight")) continue;
      auto values = at::from_blob(tensor.bytes.data(), tensor.spec.shape, at::kFloat);
      values.copy_(values.to(at::kBFloat16));
      if (above) values.mul_(1 + 0x1p-10);
    }
  });
}

// Digits that bf16 rounds away make a difference exactly where norms are computed in fp32.
TEST_P(GoldenBFloat16, DigitsOfNormWeightsCountInMixedFoldersOnly) {
  const auto short_norms = with_norms(GetParam(), false);
  const auto long_norms = with_norms(GetParam(), true);
  const Layout layout{.ranks = 2};
  const auto run = [&](const std::filesystem::path& folder,
                       const std::vector<PrecisionRule>& rules) {
    auto changed = config(layout);
    changed.model.path = folder;
    changed.precision.rule = rules;
    return run_gradients(changed, layout, reference().batches());
  };
  const auto few = run(short_norms, {});
  const auto more = run(long_norms, {});
  if (mixed()) {
    EXPECT_FALSE(at::equal(few.logits, more.logits));
  } else {
    expect_same_bits(more, few);
  }
  PrecisionRule in_bfloat16;
  in_bfloat16.match = {"*norm"};
  in_bfloat16.param_dtype = DType::kBFloat16;
  expect_same_bits(run(long_norms, {in_bfloat16}), run(short_norms, {in_bfloat16}));
}

// Storage narrowed to what it computes in loses what the gather would have rounded away.
TEST_P(GoldenBFloat16, NarrowedStorageHasTheGradientsOfWideStorage) {
  const Layout layout{.ranks = 2};
  auto narrow = config(layout);
  narrow.precision.intrinsic = Intrinsic::kNone;  // all in bf16
  auto wide = narrow;
  narrow.precision.storage_dtype.dtype = DType::kBFloat16;
  narrow.precision.on_narrower_request = NarrowerRequest::kNarrow;
  const auto resolved = train::resolve_model(train::open_model(narrow.model), narrow,
                                             train::resolve_parallelism({}, 2));
  for (const auto& contract : resolved.parameters) {
    EXPECT_EQ(contract.storage.dtype, decays_a_state(contract) ? DType::kFloat32 : DType::kBFloat16)
        << contract.name;
  }
  expect_same_bits(run_gradients(narrow, layout, reference().batches()),
                   run_gradients(wide, layout, reference().batches()));
}

// Naive: the optimizer steps 16 bits, and small updates are lost; or gradients are rounded to the
// storage dtype on their way to the master.
TEST_P(GoldenBFloat16, StorageAsInTheFileTrainsWithTheBitsOfFloat32Storage) {
  for (const Layout& layout : {Layout{.ranks = 1}, Layout{.ranks = 4, .replicas = 2}}) {
    SCOPED_TRACE(to_string(layout));
    auto wide = training_config(reference(), OptimizerKind::kAdamW, layout);
    wide.model.path = data_folder(GetParam());
    wide.precision = {};
    wide.precision.param_rounding = Rounding::kHalfAway;  // as the masters of 16-bit shards
    auto as_stored = wide;
    as_stored.precision.storage_dtype = {};
    const auto expected = run_training(wide, layout);
    const auto found = run_training(as_stored, layout);
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_EQ(found.norms, expected.norms);
  }
}

INSTANTIATE_TEST_SUITE_P(Dense, GoldenBFloat16, ::testing::ValuesIn(kFolders), folder_name);

}  // namespace
}  // namespace tessera::golden::bfloat16_test
