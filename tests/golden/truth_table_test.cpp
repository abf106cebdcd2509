// The truth table of dtypes on real files: each row is written as a Hugging Face folder, resolved
// from its header, loaded by the trainer's loader into the shards of two ranks, and its gradients
// compared with an fp64 computation of one process that reads the same file.
#include "golden/truth_table.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "base/random.h"
#include "golden/truth_table_model.h"
#include "io/hf_folder.h"
#include "support/test.h"
#include "train/hf/weights.h"

namespace tessera::golden::truth_table_test {
namespace {

/// Resolves the parameters: from the folder's header, or as yet to be drawn.
std::vector<GradContract> resolve(const TruthRow& row, const TensorSource* folder) {
  std::vector<ParameterMeta> metas;
  for (const auto& [name, shape] : shapes()) {
    ParameterMeta meta;
    meta.name = name;
    meta.shape = shape;
    meta.trainable = name != "order" && !(row.frozen_first && name == "row.first");
    meta.drawn = folder == nullptr && name != "order";
    if (name == "order") meta.dtype = DType::kInt64;
    if (folder != nullptr) {
      meta.dtype = folder->find(name)->dtype;
      meta.checkpoint = meta.dtype;
      meta.checkpoint_bulk = folder->bulk_dtype();
    }
    metas.push_back(meta);
  }
  ReductionPlan reductions{{std::string(axis::kShard)}, {}, kRanks};
  return resolve_contracts(metas, row.policy(), reductions);
}

/// Rank 0's values are some bits further up, so that the sum over ranks has more bits than a
/// product: as many as fit into fp32 with those of the row.
at::Tensor input_of(const TruthRow& row, int rank, Values values) {
  const auto draw = test::seeded(100 + static_cast<std::uint64_t>(rank), {kRows, kIn});
  if (values == Values::kRandom) return draw;
  const double up = row.compute == DType::kFloat32 ? 32 : 512;
  return draw.sign() * (draw.abs().gt(0.6).to(at::kFloat) + 1.0) * (rank == 0 ? up : 1.0);
}

at::Tensor seed_of_backward(int rank, Values values) {
  const auto draw = test::seeded(200 + static_cast<std::uint64_t>(rank), {kRows, kOut});
  return values == Values::kRandom ? draw : draw.sign();
}

/// The inputs of the truth.
struct Given {
  const TruthRow& row;
  Values values;
  test::Tensors weights;
  bool casts_inputs;  ///< to bf16, as the unit does
};
enum class Look { kAsTheyAre, kAbsolute };

/// The mean over ranks of the gradients, in fp64 throughout; kAbsolute: of the absolute values of
/// all that goes in.
test::Tensors truth(const Given& given, Look how) {
  const auto look = [how](const at::Tensor& t) {
    return how == Look::kAbsolute ? t.abs() : t.clone();
  };
  test::Tensors leaves;
  for (const auto& [name, weight] : given.weights) {
    leaves[name] = name == "order" ? weight : look(weight.to(at::kDouble)).set_requires_grad(true);
  }
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto input = input_of(given.row, rank, given.values);
    const auto x = look((given.casts_inputs ? input.to(at::kBFloat16) : input).to(at::kDouble));
    const auto of = [&](const std::string& pair, const at::Tensor& in) {
      return at::linear(at::linear(in, leaves.at(pair + ".first")), leaves.at(pair + ".second"));
    };
    const auto y = of("bulk", x.index_select(1, leaves.at("order"))) + of("row", x);
    loss = loss + (y * look(seed_of_backward(rank, given.values).to(at::kDouble))).sum();
  }
  test::backward(loss / kRanks);
  test::Tensors gradients;
  for (const auto& [name, leaf] : leaves) {
    if (name != "order") gradients[name] = leaf.grad();
  }
  return gradients;
}

/// The unit roundoff: half the distance from 1 to the next number.
double roundoff(DType dtype) { return dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-24; }

/// Most roundings between the numbers that go in and one gradient: both inputs (2), a sum of kIn or
/// of kOut products, another of kRows, the result of either product (2), ranks and final (2).
constexpr double kRoundings = 2 + kIn + kOut + kRows + 2 + 2;

struct Run {
  test::Tensors gradients, parameters;
  at::ScalarType row_computes_in = at::kByte, bulk_computes_in = at::kByte;
};

Run run_sharded(const TruthRow& row, Values values, const TensorSource* folder) {
  const auto contracts = std::make_shared<const std::vector<GradContract>>(resolve(row, folder));
  Run run;
  test::ranks(kRanks).run([&](World& world) {
    auto model = std::make_shared<Model>(row);
    ShardOptions options;
    options.contracts = contracts;
    auto handle = fully_shard(model, test::data_mesh(world), row.policy(), options);
    if (folder != nullptr) {
      train::load_weights(handle, *folder);
    } else {
      train::draw_weights(handle, specs(), kSeed);
    }
    handle.set_loaded();
    const auto y = handle.forward(input_of(row, world.rank(), values));
    test::backward((y * seed_of_backward(world.rank(), values)).sum());
    const auto gradients = test::whole_gradients(handle);
    const auto parameters = test::whole_parameters(handle);
    if (world.rank() != 0) return;
    run.gradients = gradients;
    run.parameters = parameters;
    run.row_computes_in = model->pair->computes_in;
    run.bulk_computes_in = model->bulk->computes_in;
  });
  return run;
}

class TruthTable : public ::testing::TestWithParam<TruthRow> {
 protected:
  std::shared_ptr<const TensorSource> folder(Values values) const {
    if (!GetParam().checkpoint) return nullptr;
    stored_ = stored_tensors(GetParam(), values);
    return std::make_shared<HfTensors>(HfFolder::open(write_folder(stored_)));
  }

  /// The values that the model begins with, as the file or the generator has them.
  test::Tensors first_values() const {
    if (GetParam().checkpoint) return stored_;
    test::Tensors drawn;
    for (const auto& [name, shape] : shapes()) {
      auto values = at::empty(shape, at::kFloat);
      fill_normal(values.data_ptr<float>(), 0, values.numel(), kSeed, name, 0.0F, 1.0F);
      drawn[name] = name == "order" ? at::ones(shape, at::kLong) : values;
    }
    return drawn;
  }

  DType storage_of(const std::string& name) const {
    const auto& row = GetParam();
    if (name == "row.first" && row.storage_of_first) return *row.storage_of_first;
    if (is_of_row(name)) return row.storage;
    const bool narrows = row.policy().on_narrower_request == NarrowerRequest::kNarrow;
    if (!row.requested || (represents(row.bulk, *row.requested) && !narrows && row.checkpoint))
      return row.bulk;
    return *row.requested;
  }
  DType compute_of(const std::string& name) const {
    const auto& row = GetParam();
    if (is_of_row(name)) return row.compute;
    const bool all = row.policy().intrinsic == Intrinsic::kAll;
    return all || !row.has_policy ? row.bulk : DType::kBFloat16;
  }

  /// Stored, then computed with: the two casts of the contract and no other.
  test::Tensors rounded() const {
    test::Tensors weights = first_values();
    for (auto& [name, weight] : weights) {
      if (name == "order") continue;
      weight = weight.to(to_scalar_type(storage_of(name))).to(to_scalar_type(compute_of(name)));
    }
    return weights;
  }

  Given given(Values values) const {
    const bool any =
        compute_of("row.first") == DType::kBFloat16 || compute_of("bulk.first") == DType::kBFloat16;
    return {GetParam(), values, rounded(), GetParam().has_policy && any};
  }

  mutable test::Tensors stored_;
};

INSTANTIATE_TEST_SUITE_P(Rows, TruthTable, ::testing::ValuesIn(truth_table()),
                         [](const auto& each) { return each.param.name; });

TEST_P(TruthTable, ContractHasTheRowsDtypes) {
  const auto& row = GetParam();
  const auto source = folder(Values::kExact);
  for (const auto& contract : resolve(row, source.get())) {
    const auto& name = contract.name;
    if (name == "order") {
      EXPECT_EQ(contract.storage.dtype, DType::kInt64);
      EXPECT_EQ(contract.compute.dtype, DType::kInt64);
      continue;
    }
    EXPECT_EQ(contract.storage.dtype, storage_of(name))
        << name << ": " << contract.reason(ContractField::kStorage);
    EXPECT_EQ(contract.compute.dtype, compute_of(name))
        << name << ": " << contract.reason(ContractField::kCompute);
    EXPECT_EQ(contract.reduce, DType::kFloat32) << name;
    EXPECT_EQ(contract.accumulate, DType::kFloat32) << name;
    if (!contract.trainable) continue;
    EXPECT_EQ(contract.final, DType::kFloat32) << name;
    EXPECT_EQ(contract.state, DType::kFloat32) << name;
    EXPECT_TRUE(!is_of_row(name) || contract.master == row.master)
        << name << ": " << to_string(contract.master);
  }
}

TEST_P(TruthTable, ParametersAreTheFilesInStorageAndComputedWithInCompute) {
  const auto source = folder(Values::kExact);
  const auto run = run_sharded(GetParam(), Values::kExact, source.get());
  EXPECT_EQ(run.row_computes_in, to_scalar_type(GetParam().compute));
  EXPECT_EQ(run.bulk_computes_in, to_scalar_type(compute_of("bulk.first")));
  for (const auto& [name, value] : first_values()) {
    const auto expected = name == "order" ? value : value.to(to_scalar_type(storage_of(name)));
    EXPECT_TRUE(test::same_bits(run.parameters.at(name), expected)) << name;
  }
}

/// Drawn values have all their digits: no sum of them is exact.
class TruthTableOfFiles : public TruthTable {};

std::vector<TruthRow> rows_of_files() {
  auto all = truth_table();
  std::erase_if(all, [](const auto& row) { return !row.checkpoint; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Rows, TruthTableOfFiles, ::testing::ValuesIn(rows_of_files()),
                         [](const auto& each) { return each.param.name; });

// Naive: a sum in bf16 on the wire, a product in the wrong dtype, a gradient rounded to storage.
TEST_P(TruthTableOfFiles, GradientsOfFewBitsAreExact) {
  const auto source = folder(Values::kExact);
  const auto run = run_sharded(GetParam(), Values::kExact, source.get());
  const auto expected = truth(given(Values::kExact), Look::kAsTheyAre);
  EXPECT_EQ(run.gradients.size(), GetParam().frozen_first ? 3U : 4U);
  bool needs_a_wide_wire = false;
  for (const auto& [name, gradient] : run.gradients) {
    const auto& exact = expected.at(name);
    ASSERT_TRUE(at::equal(exact.to(at::kFloat).to(at::kDouble), exact)) << "not a float: " << name;
    needs_a_wide_wire =
        needs_a_wide_wire || !at::equal(exact.to(at::kBFloat16).to(at::kDouble), exact);
    EXPECT_TRUE(test::same_bits(gradient, exact.to(at::kFloat))) << name;
  }
  EXPECT_TRUE(needs_a_wide_wire) << "a sum in bf16 would not be seen";
}

TEST_P(TruthTable, GradientsOfRandomValuesAreWithinTheRoundingsOfTheirComputeDtype) {
  const auto source = folder(Values::kRandom);
  const auto run = run_sharded(GetParam(), Values::kRandom, source.get());
  const auto expected = truth(given(Values::kRandom), Look::kAsTheyAre);
  // The same sums of absolute values: what each rounding is relative to.
  const auto scale = truth(given(Values::kRandom), Look::kAbsolute);
  for (const auto& [name, gradient] : run.gradients) {
    const double bound = kRoundings * roundoff(compute_of(name));
    const auto error = (gradient.to(at::kDouble) - expected.at(name)).abs();
    EXPECT_TRUE(error.le(scale.at(name) * bound).all().item<bool>())
        << name << ": " << (error / scale.at(name)).max().item<double>() << " of " << bound;
  }
}

// --- rows that are errors

std::string refusal(const TruthRow& row) {
  const auto path = write_folder(stored_tensors(row, Values::kExact));
  const HfTensors folder(HfFolder::open(path));
  return refusal_of(ErrorKind::kContract, [&] { resolve(row, &folder); });
}

TEST(TruthTableErrors, APinOnABFloat16TensorIsRefusedWithItsNameUnlessItMayWiden) {
  for (const auto requested : {std::optional<DType>{}, std::optional(DType::kBFloat16)}) {
    TruthRow row{"", DType::kBFloat16, requested};
    row.also = rows::pin;
    EXPECT_THAT(refusal(row), Says("row.first: found bfloat16 in the checkpoint", "rule 1 (row)",
                                   "widen = true"));
  }
}

TEST(TruthTableErrors, ARequestNarrowerThanTheFileIsRefusedWhereErrorIsAsked) {
  TruthRow row{"", DType::kFloat32, DType::kBFloat16};
  row.also = [](PrecisionPolicy& policy) { policy.on_narrower_request = NarrowerRequest::kError; };
  EXPECT_THAT(refusal(row), Says("row.first: found float32", "bfloat16", "on_narrower_request"));
}

// Naive: dtypes of the model's classes instead of the file's, which a warning says.
TEST(TruthTableErrors, AHeaderThatCannotBeReadIsRefusedAndNoDtypeIsGuessed) {
  const TruthRow row{"", DType::kBFloat16, {}};
  const auto path = write_folder(stored_tensors(row, Values::kExact));
  const auto file = path / "model-2-of-2.safetensors";
  std::filesystem::resize_file(file, 20);
  EXPECT_REFUSED(kFormat, const HfTensors folder(HfFolder::open(path)), file.string());
}

TEST(TruthTableErrors, TrainedPackedStorageIsRefused) {
  const TruthRow row{"", DType::kFloat8E4M3, {}};
  EXPECT_THAT(refusal(row), Says("row.first: found a trainable parameter stored as "
                                 "float8_e4m3fn",
                                 "storage_dtype"));
}

}  // namespace
}  // namespace tessera::golden::truth_table_test
