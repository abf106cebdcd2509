// Rows that are packed of documents, in every family: loss and gradients are those of the documents
// alone.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

#include "nn/loss.h"
#include "support/test.h"
#include "unit/models/reference.h"

namespace tessera::models::packed_model_test {
namespace {

struct Sums {
  double loss = 0.0;
  std::map<std::string, at::Tensor> gradients;
};

/// Returns the sums of the batches, one after the other.
Sums sums_of(LanguageModel& model, const std::vector<ModelInputs>& batches) {
  Sums sums;
  model.zero_grad();
  for (const ModelInputs& inputs : batches) {
    const at::Tensor loss = model.forward(inputs);
    sums.loss += loss.item<double>();
    loss.backward();
  }
  sums.gradients = gradients(model, model.spec());
  return sums;
}

/// fp32: 2^-24 a rounding, some hundred of them in a row through the layers.
constexpr double kBound = 2e-5;

void expect_alike(const Sums& found, const Sums& expected, const std::string& what) {
  EXPECT_NEAR(found.loss, expected.loss, 1e-6 * expected.loss) << what;
  ASSERT_EQ(found.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    const double norm = gradient.norm().item<double>();
    EXPECT_LE((found.gradients.at(name) - gradient).norm().item<double>(), kBound * norm)
        << what << ": " << name;
  }
}

bool has_gemma4(const std::string& folder) { return folder.starts_with("gemma4"); }

class PackedModel : public ::testing::TestWithParam<const char*> {
 protected:
  PackedModel() : reference_(GetParam()) {
    if (has_gemma4(GetParam())) {
      model_ = reference_.gemma4(Reference::Compute::kFloat32);
    } else if (reference_.spec().family == Family::kGpt2) {
      model_ = reference_.gpt2(Reference::Compute::kFloat32);
    } else {
      model_ = reference_.model(Reference::Compute::kFloat32);
    }
    ids_ = reference_.result("input_ids");
    targets_ = nn::next_token_targets(reference_.result("labels"));
  }

  /// All rows of the reference as one, cut into documents of so many tokens.
  struct Cut {
    ModelInputs packed;
    std::vector<ModelInputs> alone;
  };
  Cut cut(const std::vector<std::int64_t>& lengths) const {
    Cut result;
    const at::Tensor ids = ids_.reshape({1, -1}), targets = targets_.reshape({1, -1});
    std::vector<at::Tensor> starts;
    std::int64_t begin = 0;
    for (const std::int64_t length : lengths) {
      ModelInputs one;
      one.input_ids = ids.narrow(1, begin, length);
      one.targets = targets.narrow(1, begin, length);
      result.alone.push_back(one);
      starts.push_back(at::full({1, length}, begin, at::kLong));
      begin += length;
    }
    EXPECT_EQ(begin, ids.size(1)) << "the documents fill the row";
    result.packed.input_ids = ids;
    result.packed.targets = targets;
    result.packed.documents.starts = at::cat(starts, 1);
    return result;
  }

  Reference reference_;
  std::shared_ptr<LanguageModel> model_;
  at::Tensor ids_, targets_;
};

std::vector<std::int64_t> lengths_of(std::uint64_t seed, std::int64_t tokens) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<std::int64_t> lengths;
  for (std::int64_t left = tokens; left > 0; left -= lengths.back()) {
    const auto drawn = at::randint(1, 24, {1}, generator, at::kLong).item<std::int64_t>();
    lengths.push_back(std::min(left, drawn));
  }
  return lengths;
}

TEST_P(PackedModel, LossAndAllGradientsAreThoseOfTheDocumentsAlone) {
  if (has_gemma4(GetParam())) {
    // Text alone: what its images' tokens would be are others of the vocabulary.
    const auto image = reference_.spec().gemma4->image_token_id;
    ids_ = ids_.masked_fill(ids_.eq(image), 5);
    for (auto& item : model_->named_parameters()) {
      if (item.key().find("embed_vision") != std::string::npos)
        item.value().set_requires_grad(false);
    }
  }
  for (const std::uint64_t seed : {1U, 2U}) {
    const Cut both = cut(lengths_of(seed, ids_.numel()));
    ASSERT_GT(both.alone.size(), 3U);
    const Sums expected = sums_of(*model_, both.alone);
    expect_alike(sums_of(*model_, {both.packed}), expected, "packed");
    if (seed != 1) continue;
    for (const RecomputeMode mode : {RecomputeMode::kFull, RecomputeMode::kSelective}) {
      model_->set_recompute(mode);
      expect_alike(sums_of(*model_, {both.packed}), expected, "packed, recomputed");
    }
    model_->set_recompute(RecomputeMode::kNone);
    if (reference_.spec().family == Family::kGpt2) continue;  // it has no row as long as that
    // Able to fail: without borders it is another loss.
    ModelInputs one = both.packed;
    one.documents = {};
    EXPECT_GT(std::abs(model_->forward(one).item<double>() - expected.loss), 1e-4 * expected.loss);
  }
}

TEST_P(PackedModel, RowsOfABatchAreDocumentsOfOneRow) {
  const Cut both =
      cut(std::vector<std::int64_t>(static_cast<std::size_t>(ids_.size(0)), ids_.size(1)));
  ModelInputs rows, packed = both.packed;
  rows.input_ids = ids_;
  rows.targets = targets_;
  if (has_gemma4(GetParam())) {
    // With the images that the rows have, in the same order.
    rows.images = packed.images =
        Images{reference_.result("pixel_values"), reference_.result("image_position_ids")};
    rows.token_types = reference_.result("mm_token_type_ids");
    packed.token_types = rows.token_types->reshape({1, -1});
  }
  expect_alike(sums_of(*model_, {packed}), sums_of(*model_, {rows}), "rows");
}

// Places that packing leaves empty, which form a document: routed, and not counted.
TEST_P(PackedModel, LoadsOfExpertsAreThoseOfTheDocumentsWithoutFillers) {
  if (!reference_.spec().moe) GTEST_SKIP() << "no experts";
  if (has_gemma4(GetParam())) {
    ids_ = ids_.masked_fill(ids_.eq(reference_.spec().gemma4->image_token_id), 5);
  }
  for (const std::int64_t kept : {7, 20, 31}) {
    Cut both = cut({kept, ids_.numel() - kept});
    ModelInputs packed = both.packed, alone = both.alone.front();
    packed.router_statistics = alone.router_statistics = RouterStatistics::kAndProbabilities;
    packed.fillers = at::arange(ids_.numel()).ge(kept).unsqueeze(0);
    for (const RecomputeMode mode : {RecomputeMode::kNone, RecomputeMode::kFull}) {
      model_->set_recompute(mode);
      const auto expected = model_->forward_routed(alone).loads;
      const auto found = model_->forward_routed(packed).loads;
      ASSERT_EQ(found.size(), expected.size());
      ASSERT_GT(found.size(), 0U);
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i].counts, expected[i].counts)) << "layer " << i;
        EXPECT_TRUE(at::allclose(found[i].probabilities, expected[i].probabilities, 0, 1e-4));
      }
      model_->zero_grad();
      found.front().probabilities.square().sum().backward();
    }
    model_->set_recompute(RecomputeMode::kNone);
    packed.fillers.reset();
    EXPECT_FALSE(at::equal(model_->forward_routed(packed).loads.front().counts,
                           model_->forward_routed(alone).loads.front().counts))
        << "able to fail";
  }
}

TEST_P(PackedModel, StartsThatFitNoDocumentAreRefused) {
  ModelInputs inputs = cut({ids_.numel()}).packed;
  inputs.documents.starts[0][3] = 2;
  EXPECT_THROW(model_->forward(inputs), Error);
  EXPECT_THROW(model_->check_values(inputs), Error);
}

/// Families with layers that keep a state.
class PackedStates : public PackedModel {};

// A chunk of the delta rule has at most 64 positions, one of the folder's Mamba-2 layers 32. Documents
// go over one border of chunks, or over all of them; none begins at one.
TEST_P(PackedStates, DocumentsLongerThanAChunkAreThoseOfTheDocumentsAlone) {
  ASSERT_EQ(ids_.numel(), 160);
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{70, 3, 87}, std::vector<std::int64_t>{3, 130, 27}}) {
    const Cut both = cut(lengths);
    const Sums expected = sums_of(*model_, both.alone);
    for (const RecomputeMode mode :
         {RecomputeMode::kNone, RecomputeMode::kFull, RecomputeMode::kSelective}) {
      model_->set_recompute(mode);
      expect_alike(sums_of(*model_, {both.packed}), expected, concat("a second of ", lengths[1]));
    }
    model_->set_recompute(RecomputeMode::kNone);
  }
}

std::string name_of_folder(const ::testing::TestParamInfo<const char*>& folder) {
  std::string name = folder.param;
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Folders, PackedStates,
                         ::testing::Values("qwen3-next-fp32", "qwen3-5-text-fp32",
                                           "nemotron-h-fp32"),
                         name_of_folder);

INSTANTIATE_TEST_SUITE_P(
    Folders, PackedModel,
    ::testing::Values("qwen3-fp32", "llama-fp32", "qwen2-fp32", "mistral-fp32", "qwen3-moe-fp32",
                      "deepseek-v2-fp32", "deepseek-v2-group-fp32", "gpt-oss-fp32", "gemma4-fp32",
                      "deepseek-v3-fp32", "gemma3-text-fp32", "glm4-moe-fp32", "gpt2-fp32",
                      "llama4-text-fp32", "mixtral-fp32", "olmo2-fp32", "granite-fp32",
                      "smollm3-fp32", "phi3-fp32", "phi4-mini-fp32", "kimi-k2-fp32",
                      "qwen3-next-fp32", "qwen3-5-text-fp32", "nemotron-h-fp32"),
    name_of_folder);

}  // namespace
}  // namespace tessera::models::packed_model_test
