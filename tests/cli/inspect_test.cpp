// What `inspect --contract` says about a run before it starts.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "io/safetensors.h"

namespace tessera::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

TEST(InspectCommand, ShowsTheContractOfEveryParameterWithoutWeights) {
  const testing::TemporaryFolder folder;
  write_small_run(folder);
  const Outcome outcome = run_program(folder, {"inspect", "--contract", "run.toml", "--world", "4",
                                               "--precision.param_dtype", "bfloat16"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("model.layers.0.self_attn.q_proj.weight"));
  EXPECT_THAT(outcome.out, HasSubstr("bfloat16"));
  EXPECT_THAT(outcome.out, HasSubstr("14 parameters, 0 buffers on"));
  EXPECT_THAT(outcome.out, HasSubstr("\nunit                input"));
  EXPECT_THAT(outcome.out, HasSubstr("\n(root)              as it comes ("));
  EXPECT_THAT(outcome.out, HasSubstr("dp_shard 4"));
  EXPECT_THAT(outcome.out,
              HasSubstr("4 units over 4 rank(s), parameters begin at multiples of 64"));
  EXPECT_THAT(outcome.out, HasSubstr("unit model.layers.0\n")) << "all of it merged into the root";
  EXPECT_THAT(outcome.out, HasSubstr(" .. 4160  model.embed_tokens.weight\n"));
}

TEST(InspectCommand, JsonHasTheReasonOfEachValueAndTheBytesOfEachBucket) {
  const testing::TemporaryFolder folder;
  write_small_run(folder);
  const Outcome outcome = run_program(folder, {"inspect", "--contract", "run.toml", "--world", "2",
                                               "--json", "--model.freeze", R"(["lm_head"])"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json found = json::parse(outcome.out);
  EXPECT_EQ(found["world_size"], 2);
  ASSERT_EQ(found["parameters"].size(), 14U);
  for (const json& parameter : found["parameters"]) {
    for (const char* field : {"trainable", "storage", "compute"}) {
      EXPECT_NE(parameter[field]["reason"], "") << parameter["name"] << field;
    }
    const bool trainable = parameter["trainable"]["value"];
    EXPECT_EQ(trainable, parameter["name"] != "lm_head.weight");
    for (const char* field : {"accumulate", "reduce", "final", "master", "state", "decay"}) {
      EXPECT_EQ(parameter[field].is_null(), !trainable);
      if (!trainable) continue;
      EXPECT_NE(parameter[field]["reason"], "") << parameter["name"] << field;
    }
  }
  std::int64_t placed = 0;
  std::int64_t kept = 0;
  EXPECT_EQ(found["buffers"], json::array());
  for (const json& unit : found["units"]) {
    for (const char* field : {"input", "activation", "output"}) {
      EXPECT_NE(unit[field]["reason"], "") << unit["name"] << field;
    }
    EXPECT_EQ(unit["nested"], unit["name"] != "");
    EXPECT_TRUE(unit["input"]["value"].is_null()) << "our layers cast by themselves";
    EXPECT_EQ(unit["activation"]["value"].is_null(), unit["name"] == "");
    for (const json& bucket : unit["buckets"]) {
      const std::int64_t numel = bucket["numel"];
      EXPECT_EQ(numel % (2 * 64), 0);
      EXPECT_EQ(bucket["gathered_bytes"], numel * 4) << "fp32 compute";
      EXPECT_EQ(bucket["gather_sent_bytes"], numel * 2) << "half of it goes to the other rank";
      EXPECT_EQ(bucket["reduced_bytes"], bucket["trainable"] ? numel * 4 : 0);
      std::int64_t used = 0;
      for (const json& parameter : bucket["parameters"]) {
        used += parameter["numel"].get<std::int64_t>();
        EXPECT_EQ(parameter["offset"].get<std::int64_t>() % 16, 0);
        ++placed;
      }
      EXPECT_EQ(bucket["padding_numel"], numel - used);
      kept += bucket["shard_bytes"].get<std::int64_t>();
    }
  }
  EXPECT_EQ(placed, 14);
  EXPECT_EQ(found["shard_bytes"], kept);
}

TEST(InspectCommand, ContractAndPlanHaveTheHashesOfTheRun) {
  const testing::TemporaryFolder folder;
  const std::string model = std::string(TESSERA_TEST_DATA) + "/qwen3-mixed";
  for (const std::string ranks : {"1", "2", "3"}) {
    const Outcome gradients = run_program(
        folder, {"gradients", "--model", model, "--batch", model + "/reference.safetensors",
                 "--out", "g.safetensors", "--no-logits", "--nproc", ranks});
    ASSERT_EQ(gradients.code, 0) << gradients.err;
    folder.write("run.toml", "[model]\npath = \"" + model + "\"\n");
    const Outcome inspect =
        run_program(folder, {"inspect", "--contract", "run.toml", "--world", ranks, "--json"});
    ASSERT_EQ(inspect.code, 0) << inspect.err;
    const json found = json::parse(inspect.out);
    const SafetensorsFile file(folder / "g.safetensors");
    for (const char* key : {"layout", "contract_hash", "plan_hash"}) {
      EXPECT_EQ(found[key], file.header().metadata.at(key)) << key << " on " << ranks;
    }
  }
}

TEST(InspectCommand, ALargeModelOn64RanksIsPlannedWithoutItsWeights) {
  const testing::TemporaryFolder folder;
  folder.write("model.json", R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672, "hidden_act": "silu",
    "vocab_size": 151936, "max_position_embeddings": 4096, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06, "attention_bias": false, "tie_word_embeddings": false})");
  folder.write("run.toml", "[model]\nconfig = \"model.json\"\n");
  // 70e9 parameters: 4 GiB of address space hold the program, not the model.
  const Outcome outcome =
      run_program(folder, {"inspect", "--contract", "run.toml", "--world", "64", "--json"},
                  "prlimit --as=4294967296");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json found = json::parse(outcome.out);
  EXPECT_EQ(found["units"].size(), 83U);
  EXPECT_GT(found["shard_bytes"].get<std::int64_t>(), std::int64_t{4} << 30);
  EXPECT_THAT(found["layout"], HasSubstr("dp_shard 64"));
}

}  // namespace
}  // namespace tessera::cli
