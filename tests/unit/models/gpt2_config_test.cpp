// What a config.json of GPT-2 says, in both spellings, and what is refused in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/adapters.h"
#include "models/description.h"
#include "models/family.h"
#include "models/model_spec.h"
#include "tessera/error.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::gpt2_config_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* kDropouts[] = {"attn_pdrop", "embd_pdrop", "resid_pdrop"};

constexpr ConfigOfFolder kConfig("gpt2-fp32");

TEST(Gpt2Config, BothSpellingsGiveTheSameSpec) {
  const ModelSpec spec = parse_spec(file_text("gpt2-fp32", "config.json")).spec;
  ModelSpec hub = parse_spec(file_text("gpt2-fp32", "config.hub.json")).spec;
  EXPECT_EQ(hub.dtype, std::nullopt) << "the published file names none";
  hub.dtype = spec.dtype;
  EXPECT_EQ(spec, hub);
  EXPECT_EQ(spec.family, Family::kGpt2);
  EXPECT_EQ(spec.head_dim, 8);
  EXPECT_EQ(spec.intermediate_size, 128);
  EXPECT_EQ(spec.max_position_embeddings, 32);
  EXPECT_TRUE(spec.tie_word_embeddings);
}

TEST(Gpt2Config, AbsentKeysAreTransformersDefaults) {
  const nlohmann::json bare{{"architectures", {"GPT2LMHeadModel"}}, {"model_type", "gpt2"}};
  const ModelSpec spec = parse_spec(bare.dump()).spec;
  // As published: 124 million.
  EXPECT_EQ(total_numel(describe(spec).parameters), 124'439'808);
  EXPECT_EQ(spec.rms_norm_eps, 1e-5);
}

TEST(Gpt2Config, DropoutIsLeftOutInTrainingWhichIsSaidAndKept) {
  EXPECT_THAT(parse_spec(kConfig.json().dump()).warnings, IsEmpty()) << "all are 0";
  nlohmann::json published = kConfig.json(), absent = kConfig.json();
  for (const char* key : kDropouts) published[key] = 0.1;
  for (const char* key : kDropouts) absent.erase(key);
  for (const nlohmann::json& config : {published, absent}) {
    const ParsedSpec found = parse_spec(config.dump());
    EXPECT_THAT(found.warnings,
                ElementsAre(HasSubstr("attn_pdrop = 0.1, embd_pdrop = 0.1, resid_pdrop = 0.1")));
    const auto written = nlohmann::json::parse(config_json(found.spec));
    for (const char* key : kDropouts) EXPECT_EQ(written[key], 0.1) << key;
    const ParsedSpec read = parse_spec(config.dump(), {.purpose = Purpose::kInference});
    EXPECT_THAT(read.warnings, IsEmpty());
    EXPECT_EQ(read.spec, found.spec);
  }
  const auto one = parse_spec(changed_config("gpt2-fp32", {{"resid_pdrop", 0.25}})).warnings;
  EXPECT_THAT(one, ElementsAre(AllOf(HasSubstr("found resid_pdrop = 0.25:"),
                                     Not(HasSubstr("embd_pdrop")))));
  EXPECT_THAT(kConfig.refusal({{"embd_pdrop", 1.5}}), HasSubstr("embd_pdrop: found 1.5"));
}

TEST(Gpt2Config, WhatIsWrittenIsReadAsTheSame) {
  kConfig.expect_kept(
      {nlohmann::json::object(), {{"n_inner", 96}}, {{"tie_word_embeddings", false}}});
}

TEST(Gpt2Config, MasksAreNoTensorsOfTheModelAndAPrefixIsNone) {
  const auto name = traits(Family::kGpt2).module_name;
  EXPECT_EQ(name("transformer.h.0.attn.c_attn.weight"), "h.0.attn.c_attn.weight");
  EXPECT_EQ(name("h.0.attn.c_attn.bias"), "h.0.attn.c_attn.bias");
  EXPECT_EQ(name("wte.weight"), "wte.weight");
  EXPECT_EQ(name("h.0.attn.bias"), "");
  EXPECT_EQ(name("transformer.h.11.attn.masked_bias"), "");
}

TEST(Gpt2Config, MatricesStandAsInFilesAndHaveNoAdapters) {
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const ParameterSpec& row : describe(kConfig.spec()).parameters) shapes[row.name] = row.shape;
  EXPECT_EQ(shapes.at("h.1.attn.c_attn.weight"), (std::vector<std::int64_t>{32, 96}));
  EXPECT_EQ(shapes.at("h.1.mlp.c_fc.weight"), (std::vector<std::int64_t>{32, 128}));
  EXPECT_EQ(shapes.at("wpe.weight"), (std::vector<std::int64_t>{32, 32}));
  try {
    plan_lora(kConfig.spec(), {.rank = 4, .targets = {"c_attn"}});
    FAIL() << "an adapter beside a matrix that stands [in, out]";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_THAT(error.what(), HasSubstr("lora.rank: found 4"));
  }
}

TEST(Gpt2Config, RowsHaveNoMorePositionsThanWereLearned) {
  EXPECT_NO_THROW(check_learned_positions(kConfig.spec(), 32));
  EXPECT_THROW(check_learned_positions(kConfig.spec(), 33), Error);
  EXPECT_NO_THROW(
      check_learned_positions(parse_spec(file_text("llama-fp32", "config.json")).spec, 1'000'000));
}

TEST(Gpt2Config, WhatIsNotSupportedIsRefusedByName) {
  EXPECT_THAT(kConfig.refusal({{"activation_function", "relu"}}), HasSubstr("activation_function"));
  EXPECT_THAT(kConfig.refusal({{"scale_attn_weights", false}}), HasSubstr("scale_attn_weights"));
  EXPECT_THAT(kConfig.refusal({{"scale_attn_by_inverse_layer_idx", true}}),
              HasSubstr("scale_attn_by_inverse_layer_idx"));
  EXPECT_THAT(kConfig.refusal({{"reorder_and_upcast_attn", true}}),
              HasSubstr("reorder_and_upcast_attn"));
  EXPECT_THAT(kConfig.refusal({{"add_cross_attention", true}}), HasSubstr("add_cross_attention"));
  EXPECT_THAT(kConfig.refusal({{"n_head", 5}}), HasSubstr("n_embd: found 32"));
  EXPECT_THAT(kConfig.refusal({{"n_ctx", 16}}), HasSubstr("n_ctx: found 16"));
}

}  // namespace
}  // namespace tessera::models::gpt2_config_test
