// `tessera generate` as a user runs it; greedy tokens against transformers' generate.

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/byte_model.h"
#include "cli/program.h"
#include "io/safetensors.h"
#include "support/test.h"

namespace tessera::cli::generate_test {
namespace {

using Words = std::vector<std::string>;

std::string joined(const std::vector<std::int64_t>& ids) {
  std::string text;
  for (const std::int64_t id : ids) text += (text.empty() ? "" : ",") + std::to_string(id);
  return text;
}

Outcome generate(const TemporaryFolder& folder, const std::string& model, const Words& more) {
  return run_program(folder, cli::joined({"generate", "--model", model}, more));
}

// tests/golden/make_greedy.py wrote what is expected; its margins are far above fp32 noise.
TEST(GenerateCommand, GreedyTokensAreThoseOfTransformers) {
  const TemporaryFolder folder;
  const std::filesystem::path data = TESSERA_TEST_DATA;
  const auto texts = nlohmann::json::parse(std::ifstream(data / "greedy.json"));
  ASSERT_EQ(texts.size(), 20U);
  for (const auto& text : texts) {
    const auto tokens = text["tokens"].get<std::vector<std::int64_t>>();
    ASSERT_GE(tokens.size(), 20U);
    const auto name = text["folder"].get<std::string>();
    // As transformers computed it: everything widened to fp32.
    const Outcome found = succeeded(
        generate(folder, (data / name).string(),
                 {"--prompt-tokens", joined(text["prompt"].get<std::vector<std::int64_t>>()),
                  "--max-new-tokens", std::to_string(tokens.size()), "--precision.storage_dtype",
                  "float32", "--precision.param_dtype", "float32"}));
    EXPECT_EQ(found.out, joined(tokens) + "\n") << name << " " << text["prompt"];
    EXPECT_EQ(found.err, "");
  }
}

TEST(GenerateCommand, DtypesAreTheFoldersUnlessAsked) {
  const TemporaryFolder folder;
  const std::string model = std::filesystem::path(TESSERA_TEST_DATA) / "qwen3-mixed";
  const Words prompt{"--prompt-tokens", "79,25,90", "--max-new-tokens", "30"};
  Words wide = prompt;
  wide.insert(wide.end(), {"--precision.param_dtype", "float32"});
  Words same = prompt;
  same.insert(same.end(), {"--precision.storage_dtype", "auto"});
  const std::string found = generate(folder, model, prompt).out;
  EXPECT_EQ(generate(folder, model, same).out, found);
  EXPECT_NE(generate(folder, model, wide).out, found) << "30 tokens of random weights: bf16 shows";
}

class GenerateBytes : public ::testing::Test {
 protected:
  GenerateBytes() { write_folder(folder_ / "bytes", byte_spec()); }
  Outcome run(const Words& more) { return generate(folder_, "bytes", more); }

  SmallRun folder_;
};

TEST_F(GenerateBytes, TextAndIdsAreTheSameTokens) {
  const Outcome text = succeeded(run({"--prompt", "Hi \xC3\xA9", "--max-new-tokens", "20"}));
  const Outcome ids =
      succeeded(run({"--prompt-tokens", "72, 105,32,195,169", "--max-new-tokens", "20"}));
  std::istringstream numbers(ids.out);
  std::string bytes;
  for (std::string number; std::getline(numbers, number, ',');) {
    if (std::stoi(number) < 256) bytes += static_cast<char>(std::stoi(number));
  }
  // The program shows some of them escaped; what is plain has to be there in its order.
  std::size_t at = 0;
  for (const char c : bytes) {
    if (c < 'A' || c > 'Z') continue;
    at = text.out.find(c, at);
    ASSERT_NE(at, std::string::npos) << text.out << " for " << ids.out;
    ++at;
  }
  EXPECT_EQ(text.out.back(), '\n');
}

TEST_F(GenerateBytes, OutputIsUtf8WithoutControlCodes) {
  const Outcome drawn = succeeded(
      run({"--prompt", "", "--max-new-tokens", "60", "--temperature", "50", "--seed", "3"}));
  EXPECT_THAT(drawn.out, Says("\\x")) << "60 nearly uniform bytes without an invalid one";
  for (const char c : drawn.out) {
    EXPECT_TRUE(static_cast<unsigned char>(c) >= 32 || c == '\n' || c == '\r' || c == '\t');
  }
  const nlohmann::json as_text = drawn.out;
  EXPECT_NO_THROW(static_cast<void>(as_text.dump())) << "not UTF-8";
}

TEST_F(GenerateBytes, ASeedRepeatsItsTextAndOthersDiffer) {
  const auto text = [&](const std::string& seed) {
    return run({"--prompt", "a", "--max-new-tokens", "30", "--temperature", "1", "--top-k", "50",
                "--seed", seed})
        .out;
  };
  const std::string first = text("7");
  EXPECT_EQ(text("7"), first);
  EXPECT_NE(text("8"), first);
  // A longer text begins with the shorter one.
  const Words shorter{"--prompt-tokens", "97", "--max-new-tokens", "10", "--temperature", "1"};
  Words longer = shorter;
  longer[3] = "20";
  const std::string start = run(shorter).out;
  EXPECT_EQ(run(longer).out.rfind(start.substr(0, start.size() - 1), 0), 0U);
}

TEST_F(GenerateBytes, TheModelsPositionsEndTheText) {
  const Outcome full = succeeded(run({"--prompt-tokens", "1,2,3,4", "--max-new-tokens", "1000"}));
  const auto count = std::count(full.out.begin(), full.out.end(), ',') + 1;
  if (count < 61) {  // the model may end its document before
    EXPECT_THAT(full.out, Says(",256\n"));
  } else {
    EXPECT_EQ(count, 61) << "64 positions, and one token that needs none";
    EXPECT_THAT(full.err, Says("max_position_embeddings, 64"));
  }
}

TEST_F(GenerateBytes, TheEndOfADocumentEndsTheText) {
  // A head of zeros: all logits are equal, and the first id is chosen unless only the end is left.
  write_folder(folder_ / "ending", byte_spec());
  const auto path = folder_ / "ending/model.safetensors";
  const TensorInfo head = SafetensorsFile(path).info("lm_head.weight");
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(head.begin) << std::string(static_cast<std::size_t>(head.size_bytes()), '\0');
  file.close();
  folder_.write("ending/generation_config.json", R"({"eos_token_id": [5, 0]})");
  const Outcome ended =
      generate(folder_, "ending", {"--prompt-tokens", "9", "--max-new-tokens", "9"});
  EXPECT_EQ(ended.out, "0\n") << ended.err;
  folder_.write("ending/generation_config.json", R"({"eos_token_id": 5})");
  EXPECT_EQ(generate(folder_, "ending", {"--prompt-tokens", "9", "--max-new-tokens", "3"}).out,
            "0,0,0\n");
  folder_.write("ending/generation_config.json", R"({"eos_token_id": "x"})");
  EXPECT_EQ(generate(folder_, "ending", {"--prompt-tokens", "9", "--max-new-tokens", "3"}).code, 2);
}

TEST_F(GenerateBytes, Byte256EndsTheTextAndIsNotShown) {
  // The head's row of 256 alone is not zero: with a prompt's last hidden state its logit is above
  // or below all others, so that one of the two signs ends at once.
  const auto path = folder_ / "bytes/model.safetensors";
  const TensorInfo head = SafetensorsFile(path).info("lm_head.weight");
  const std::int64_t row = head.shape[1];
  std::vector<std::string> out;
  for (const float value : {1.0F, -1.0F}) {
    std::vector<float> weights(static_cast<std::size_t>(head.numel()), 0.0F);
    std::fill_n(weights.begin() + 256 * row, row, value);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(head.begin).write(reinterpret_cast<const char*>(weights.data()), head.size_bytes());
    file.close();
    out.push_back(run({"--prompt", "x", "--max-new-tokens", "1"}).out);
  }
  std::ranges::sort(out);
  EXPECT_EQ(out, (std::vector<std::string>{"\n", "\\x00\n"}));
}

// Naive: it waits for ranks that a launcher has started for something else.
TEST_F(GenerateBytes, AProcessOfALauncherGeneratesByItself) {
  const Words words{"generate", "--model", "bytes", "--prompt", "Hi", "--max-new-tokens", "20"};
  const Outcome found = succeeded(run_program(folder_, words, "RANK=1 WORLD_SIZE=2"));
  EXPECT_EQ(found.out, run_program(folder_, words).out);
}

struct Refused {
  std::string model;
  Words words;
  std::string says;
};

// Only training drops anything: of a config.json that says so the rest is as of any other.
TEST_F(GenerateBytes, AModelWithDropoutIsReadAndConvertedButNotTrained) {
  auto spec = byte_spec();
  spec.attention_dropout = 0.1;
  write_folder(folder_ / "dropping", spec);
  const Words prompt{"--prompt", "Hi", "--max-new-tokens", "20"};
  const Outcome found = succeeded(generate(folder_, "dropping", prompt));
  EXPECT_EQ(found.out, run(prompt).out);
  const Outcome converted = succeeded(run_program(folder_, {"convert", "dropping", "converted"}));
  EXPECT_THAT(read_file(folder_ / "converted/config.json"), Says("\"attention_dropout\": 0.1"));
  std::string config = read_file(folder_ / "run.toml");
  config.erase(config.find("config = "), std::string_view("config = \"model.json\"").size());
  folder_.write("run.toml", config);
  for (const std::string model : {"dropping", "converted"}) {
    EXPECT_THAT(run_program(folder_, {"train", "run.toml", "--model.path", model}),
                Exits(2, "attention_dropout: found 0.1"));
  }
}

// Its no_decay names norms, which are frozen with adapters.
TEST_F(GenerateBytes, TheShippedFinetuneConfigTrainsAdaptersAsItStands) {
  folder_.write("page.txt", std::string(400, 'a'));
  const Outcome outcome = succeeded(run_program(
      folder_, {"train", std::string(TESSERA_CONFIGS) + "/finetune.toml", "--model.path", "bytes",
                "--data.path", "page.txt", "--training.steps", "2", "--training.seq_len", "32",
                "--training.global_batch_size", "2", "--job.dump_folder", "adapters", "--lora.rank",
                "2", "--lora.targets", "q_proj"}));
  // 2 layers, 2 x (32 + 32) each.
  EXPECT_THAT(outcome.err, Says(", trained 256\n"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "adapters/checkpoint/step-2"));
}

TEST_F(GenerateBytes, WhatCannotRunIsRefusedBeforeItDoes) {
  const std::string other = std::filesystem::path(TESSERA_TEST_DATA) / "qwen3-fp32";
  const std::string long_prompt(65, 'x');
  for (const Refused& refused : std::vector<Refused>{
           {other, {"--prompt", "text"}, "--prompt-tokens 1,2,3"},
           {other, {"--prompt", "text"}, "tools/tokenize.py"},
           {"bytes", {"--prompt", long_prompt}, "found 65 tokens, expected at most 64"},
           {other, {"--prompt-tokens", "128"}, "token id 128 at position 0"},
           {other, {"--prompt-tokens", "1,,2"}, "expected token ids with commas"},
           {other, {"--prompt-tokens", ""}, "expected token ids with commas"},
           {other, {"--prompt-tokens", "1 2"}, "expected token ids with commas"},
           {other, {"--prompt-tokens", "1", "--temperature", "nan"}, "--temperature: found 'nan'"},
           {other, {"--prompt-tokens", "1", "--temperature", "inf"}, "--temperature: found 'inf'"},
           {other, {"--prompt-tokens", "1", "--temperature", "-1"}, "--temperature: found '-1'"},
           {other, {"--prompt-tokens", "1", "--seed", "18446744073709551616"}, "--seed: found '18"},
           {other, {"--prompt-tokens", "1", "--training.steps", "2"}, "--training.steps"},
           {"absent", {"--prompt", "x"}, "absent"}}) {
    Words words = refused.words;
    words.insert(words.end(), {"--max-new-tokens", "1"});
    const Outcome outcome = generate(folder_, refused.model, words);
    EXPECT_THAT(outcome, Exits(2, refused.says));
    EXPECT_EQ(outcome.out, "");
  }
}

TEST_F(GenerateBytes, WeightsThatAreNotNumbersAreAFailure) {
  const auto file = folder_ / "bytes/model.safetensors";
  const TensorInfo norm = SafetensorsFile(file).info("model.norm.weight");
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  stream.seekp(norm.begin).write(reinterpret_cast<const char*>(&nan), sizeof nan);
  stream.close();
  EXPECT_THAT(run({"--prompt", "x", "--max-new-tokens", "1"}), Exits(1, "expected finite numbers"));
}

}  // namespace
}  // namespace tessera::cli::generate_test
