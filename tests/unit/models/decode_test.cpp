// Logits over a key-value cache against those of the whole text, on the reference models.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/error.h"
#include "unit/models/reference.h"

namespace tessera::models::decode_test {
namespace {

class Decode : public ::testing::TestWithParam<const char*> {};

/// Logits of the last position of every prefix, token by token after a prompt. [B, T - prompt, V]
at::Tensor cached_logits(Decoder& model, const at::Tensor& ids, std::int64_t prompt) {
  DecoderCache cache = model.make_cache(ids.size(1));
  std::vector<at::Tensor> steps{model.decode(ids.narrow(1, 0, prompt), cache)};
  for (std::int64_t t = prompt; t < ids.size(1); ++t) {
    steps.push_back(model.decode(ids.narrow(1, t, 1), cache));
  }
  EXPECT_EQ(cache.length(), ids.size(1));
  return at::stack(steps, 1);
}

TEST_P(Decode, CachedLogitsAreThoseOfTheWholeText) {
  const Reference reference(GetParam());
  const auto model = reference.model(Reference::Compute::kFloat32);
  const at::Tensor ids = reference.result("input_ids");
  for (const std::int64_t prompt : {std::int64_t{1}, std::int64_t{13}, ids.size(1)}) {
    const at::Tensor found = cached_logits(*model, ids, prompt);
    const at::Tensor expected =
        model->logits(ids).detach().narrow(1, prompt - 1, ids.size(1) - prompt + 1);
    // The bound of the data's README for a second fp32 implementation: only the order of sums
    // differs.
    EXPECT_LT((found - expected).abs().max().item<double>(), 5e-5) << "prompt of " << prompt;
  }
}

TEST_P(Decode, Bfloat16LogitsStayWithinItsRoundings) {
  const Reference reference(GetParam());
  const auto model = reference.model(Reference::Compute::kBFloat16);
  const at::Tensor ids = reference.result("input_ids");
  const at::Tensor whole = reference.result("logits");
  const at::Tensor found = cached_logits(*model, ids, 5).to(at::kFloat);
  const at::Tensor expected = whole.narrow(1, 4, ids.size(1) - 4);
  const at::Tensor plain = model->logits(ids).detach().to(at::kFloat).narrow(1, 4, ids.size(1) - 4);
  // Both round to bf16 at the same places, so both are about as far from the fp32 truth.
  const double error = (found - expected).norm().item<double>();
  const double plain_error = (plain - expected).norm().item<double>();
  EXPECT_LT(error, 1.5 * plain_error);
}

INSTANTIATE_TEST_SUITE_P(Folders, Decode,
                         ::testing::Values("qwen3-fp32", "qwen3-mixed", "llama-fp32", "llama-mixed",
                                           "qwen2-fp32", "qwen2-mixed", "mistral-fp32",
                                           "mistral-mixed", "olmo2-fp32", "olmo2-mixed",
                                           "gemma3-text-fp32", "gemma3-text-mixed"),
                         [](const auto& folder) {
                           std::string name = folder.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

TEST(DecodeErrors, MorePositionsThanTheCacheHasRoomForAreRefused) {
  const Reference reference("qwen3-fp32");
  const auto model = reference.model(Reference::Compute::kFloat32);
  DecoderCache cache = model->make_cache(3);
  EXPECT_THROW(model->decode(at::zeros({1, 4}, at::kLong), cache), Error);
}

}  // namespace
}  // namespace tessera::models::decode_test
