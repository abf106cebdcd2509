#include "models/decoder.h"

#include <ATen/ops/randint.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "models/description.h"
#include "nn/parameter.h"
#include "tessera/error.h"
#include "unit/models/small_spec.h"

namespace tessera::models::decoder_test {
namespace {

ModelSpec tied_with_biases() {
  ModelSpec spec = tiny(Family::kLlama, 2);
  spec.tie_word_embeddings = true;
  spec.attention_bias = true;
  spec.mlp_bias = true;
  return spec;
}

TEST(Decoder, ParametersAreThoseOfTheTable) {
  for (const ModelSpec& spec : {tiny(Family::kQwen3, 2), tied_with_biases()}) {
    Decoder model(spec);
    std::map<std::string, std::vector<std::int64_t>> found;
    for (const auto& item : model.named_parameters()) {
      EXPECT_TRUE(found.emplace(item.key(), item.value().sizes().vec()).second) << item.key();
      EXPECT_TRUE(item.value().requires_grad());
    }
    std::map<std::string, std::vector<std::int64_t>> expected;
    for (const ParameterSpec& row : describe(spec).parameters) expected[row.name] = row.shape;
    EXPECT_EQ(found, expected);
  }
}

TEST(Decoder, UnitsCoverEveryParameterUnderItsTrueName) {
  const ModelSpec spec = tiny(Family::kQwen3, 2);
  Decoder model(spec);
  std::map<std::string, at::Tensor> found;
  const auto add = [&](const std::string& unit, const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) {
      found[model.canonical_name(unit, item.key())] = item.value();
    }
  };
  add("model.embed_tokens", *model.embedding().module());
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    add("model.layers." + std::to_string(i), *model.layers()[i].module());
  }
  add("head", *model.head().module());
  for (const ParameterSpec& row : describe(spec).parameters) {
    ASSERT_TRUE(found.contains(row.name)) << row.name;
    EXPECT_TRUE(found.at(row.name).is_same(model.named_parameters()[row.name])) << row.name;
  }
  EXPECT_EQ(found.size(), describe(spec).parameters.size());
}

TEST(Decoder, AFreshModelHasNoMemoryAndSaysSo) {
  Decoder model(tiny(Family::kQwen3, 2));
  for (const auto& item : model.named_parameters()) {
    EXPECT_EQ(item.value().storage().nbytes(), 0u) << item.key();
  }
  try {
    model.logits(at::zeros({1, 3}, at::kLong));
    FAIL() << "ran without weights";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("parameter has no data yet"), std::string::npos)
        << error.what();
  }
}

TEST(Decoder, TiedHeadIsAnotherLeafOverTheSameMemory) {
  Decoder model(tied_with_biases());
  const at::Tensor& head = model.head().module()->lm_head()->weight;
  const at::Tensor& embedding = model.embedding().module()->weight;
  EXPECT_FALSE(head.is_same(embedding));
  EXPECT_TRUE(head.is_alias_of(embedding));
  nn::materialize(model);
  EXPECT_EQ(head.data_ptr(), embedding.data_ptr());
  model.loss_sum(at::ones({1, 3}, at::kLong), at::ones({1, 3}, at::kLong)).backward();
  EXPECT_TRUE(head.grad().defined());
  EXPECT_TRUE(embedding.grad().defined());
  EXPECT_FALSE(head.grad().is_alias_of(embedding.grad()));
}

TEST(Decoder, NoRowsRunForwardAndBackward) {
  for (const ModelSpec& spec : {tiny(Family::kQwen3, 2), tied_with_biases()}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      Decoder model(spec);
      nn::materialize(model);
      model.to(dtype);
      const at::Tensor none = at::zeros({0, 5}, at::kLong);
      EXPECT_EQ(model.logits(none).sizes(), (at::IntArrayRef{0, 5, 20}));
      const at::Tensor loss = model.loss_sum(none, none);
      EXPECT_EQ(loss.item<double>(), 0.0);
      loss.backward();
      for (const auto& item : model.named_parameters()) {
        ASSERT_TRUE(item.value().grad().defined()) << item.key();
        EXPECT_EQ(item.value().grad().abs().sum().item<double>(), 0.0) << item.key();
      }
    }
  }
}

}  // namespace
}  // namespace tessera::models::decoder_test
