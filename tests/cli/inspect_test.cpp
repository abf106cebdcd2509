// The reports of `inspect` on a run before it starts, and on what a run leaves.

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/text/printable.h"
#include "cli/program.h"
#include "io/checkpoint_folder.h"
#include "io/safetensors.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::inspect_test {
namespace {

using nlohmann::json;
using ::testing::ContainsRegex;

TEST(InspectCommand, ShowsTheContractOfEveryParameterWithoutWeights) {
  const SmallRun folder;
  const Outcome outcome =
      succeeded(run_program(folder, {"inspect", "--contract", "run.toml", "--world", "4",
                                     "--precision.param_dtype", "bfloat16"}));
  EXPECT_THAT(outcome.out, Says("model.layers.0.self_attn.q_proj.weight", "bfloat16",
                                "14 parameters, 0 buffers on", "\nunit                input",
                                "\n(root)              as it comes (", "dp_shard 4",
                                "4 units over 4 ranks, parameters begin at multiples of 64"));
  EXPECT_THAT(outcome.out, Says("unit model.layers.0\n")) << "all of it merged into the root";
  EXPECT_THAT(outcome.out, Says(" .. 4160  model.embed_tokens.weight\n"));
}

TEST(InspectCommand, JsonHasTheReasonOfEachValueAndTheBytesOfEachBucket) {
  const SmallRun folder;
  const json found = json::parse(
      succeeded(run_program(folder, {"inspect", "--contract", "run.toml", "--world", "2", "--json",
                                     "--model.freeze", R"(["lm_head"])"}))
          .out);
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

TEST(InspectCommand, ALockIsThatOfTheRunAndRefusesAnother) {
  const SmallRun folder;
  succeeded(run_program(folder, {"inspect", "--contract", "run.toml", "--world", "2", "--lock",
                                 "agreed.txt", "--json"}));
  EXPECT_THAT(read_file(folder / "agreed.txt"),
              Says("\nparameter lm_head.weight reduce float32\n"));
  const Words train{"train",   "run.toml", "--contract.lock",          "agreed.txt",
                    "--nproc", "2",        "--checkpoint.enable=false"};
  succeeded(run_program(folder, train));
  EXPECT_THAT(run_program(folder, joined(train, {"--precision.reduce_dtype", "bfloat16"})),
              Exits(2, "- parameter lm_head.weight reduce float32\n",
                    "+ parameter lm_head.weight reduce bfloat16\n",
                    "contract.lock: found 28 lines other than those of ", "agreed.txt",
                    "tessera inspect --contract CONFIG --lock "));
  folder.write("agreed.txt", read_file(folder / "agreed.txt") + "parameter a\n");
  EXPECT_THAT(run_program(folder, train), Exits(2, "contract.lock: ", "agreed.txt', line "));
}

TEST(InspectCommand, SaysHowRanksOfCpShareRows) {
  const SmallRun folder;
  const Words words{
      "inspect", "--contract",         "run.toml", "--world",
      "2",       "--training.seq_len", "64",       "--parallelism.context_parallel_degree",
      "2"};
  EXPECT_THAT(
      succeeded(run_program(folder, words)).out,
      Says("cp 2", "rows over cp 2: form gather, 4 parts, 32 of 64 positions on a rank\n",
           "  k, v of attention: S(cut) -> R, gradient P -> S(cut) in float32, in the order "
           "of 4 parts\n",
           "  forward bits: as one rank with context_parallel_parts = 4, one thread a rank; bounds "
           "without parts, which have 16 positions",
           "  context: cp 2, form gather"));
  const json found = json::parse(succeeded(run_program(folder, joined(words, {"--json"}))).out);
  EXPECT_EQ(found["context"]["degree"], 2);
  EXPECT_EQ(found["context"]["form"], "gather");
  EXPECT_EQ(found["context"]["parts"], 4);
  // A head reached by one other rank, and a tail by it where it lies before that one's.
  EXPECT_EQ(found["context"]["bytes"]["forward_sent_bytes"], 2 * 16 * 16 * 4);
  EXPECT_TRUE(found["context"]["other_form_bytes"].is_null()) << "one head of keys";
  const json whole = json::parse(
      succeeded(run_program(folder, {"inspect", "--contract", "run.toml", "--json"})).out);
  EXPECT_TRUE(whole["context"].is_null());
}

TEST(InspectCommand, ContractAndPlanHaveTheHashesOfTheRun) {
  const TemporaryFolder folder;
  const std::string model = std::string(TESSERA_TEST_DATA) + "/qwen3-mixed";
  for (const std::string ranks : {"1", "2", "3"}) {
    succeeded(run_program(
        folder, {"gradients", "--model", model, "--batch", model + "/reference.safetensors",
                 "--out", "g.safetensors", "--no-logits", "--nproc", ranks}));
    folder.write("run.toml", "[model]\npath = \"" + model + "\"\n");
    const json found =
        json::parse(succeeded(run_program(folder, {"inspect", "--contract", "run.toml", "--world",
                                                   ranks, "--json"}))
                        .out);
    const SafetensorsFile file(folder / "g.safetensors");
    for (const char* key : {"layout", "contract_hash", "plan_hash"}) {
      EXPECT_EQ(found[key], file.header().metadata.at(key)) << key << " on " << ranks;
    }
  }
}

// A tied head at the other end is a copy, on a V it is not; small buckets of all stages of a rank
// lie in its root.
TEST(InspectCommand, ContractAndPlanOfAPipelineHaveTheHashesOfTheRun) {
  const TemporaryFolder folder;
  struct {
    std::string folder, schedule, micro_batches;
  } const cases[] = {{"qwen3-mixed", "1F1B", "2"},
                     {"llama-mixed", "1F1B", "2"},
                     {"llama-mixed", "ZBV", "2"},
                     {"gemma4-mixed", "GPipe", "2"}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.folder + ", " + c.schedule);
    const std::string model = std::string(TESSERA_TEST_DATA) + "/" + c.folder;
    succeeded(run_program(
        folder,
        {"gradients", "--model", model, "--batch", model + "/reference.safetensors", "--out",
         "g.safetensors", "--no-logits", "--parallelism.pipeline_parallel_degree", "2",
         "--pipeline.schedule", c.schedule, "--pipeline.micro_batches", c.micro_batches}));
    folder.write("run.toml", "[model]\npath = \"" + model +
                                 "\"\n[training]\nglobal_batch_size = 2\nseq_len = 24\n"
                                 "[parallelism]\npipeline_parallel_degree = 2\n"
                                 "[pipeline]\nschedule = \"" +
                                 c.schedule + "\"\n");
    const json found =
        json::parse(succeeded(run_program(folder, {"inspect", "--contract", "run.toml", "--world",
                                                   "2", "--json"}))
                        .out);
    const SafetensorsFile file(folder / "g.safetensors");
    for (const char* key : {"layout", "contract_hash", "plan_hash"}) {
      EXPECT_EQ(found[key], file.header().metadata.at(key)) << key;
    }
  }
}

// Each rank has its stages of 70e9 parameters; every number of the table is one of a rank.
TEST(InspectCommand, APipelineIsPlannedRankByRank) {
  const TemporaryFolder folder;
  folder.write("model.json", R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 3072, "hidden_act": "silu",
    "vocab_size": 32000, "max_position_embeddings": 4096, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06, "attention_bias": false, "tie_word_embeddings": true})");
  folder.write("run.toml", R"([model]
config = "model.json"
[training]
seq_len = 512
global_batch_size = 16
[parallelism]
pipeline_parallel_degree = 2
[pipeline]
schedule = "ZBV"
split = [0, 3, 6, 9]
)");
  const std::vector<std::string> words{"inspect", "--contract", "run.toml", "--world", "4"};
  const Outcome text = succeeded(run_program(folder, words));
  EXPECT_THAT(text.out,
              Says("\npipeline 'ZBV': 2 ranks, 4 stages, 8 micro-batches, stages "
                   "gathered once a step\n"
                   "  stage 0 on rank 0: embedding, layers 0-2; forward ",
                   "  stage 3 on rank 0: layers 9-11, head; forward ", "pp 0        pp 1\n"));
  auto as_json = words;
  as_json.push_back("--json");
  const json found = json::parse(succeeded(run_program(folder, as_json)).out);
  ASSERT_EQ(found["pipeline"]["ranks"].size(), 2U);
  EXPECT_EQ(found["pipeline"]["stages"][3]["rank"], 0);
  EXPECT_EQ(found["pipeline"]["stages"][3]["first_layer"], 9);
  EXPECT_THAT(found["layout"], Says("pp 2"));
  std::set<std::string> names;
  std::size_t placed = 0;
  for (const json& rank : found["pipeline"]["ranks"]) {
    EXPECT_EQ(rank["rank_memory_bytes"]["parameters"], rank["shard_bytes"]);
    EXPECT_GT(rank["rank_memory_bytes"]["activations"]["none"], 0);
    for (const json& unit : rank["units"]) {
      for (const json& bucket : unit["buckets"]) {
        for (const json& parameter : bucket["parameters"]) {
          names.insert(parameter["name"]);
          ++placed;
        }
      }
    }
  }
  EXPECT_EQ(names.size(), found["parameters"].size());
  EXPECT_EQ(placed, names.size()) << "the tied one is on one rank of a V";
}

// Naive: gathers and reductions alone, for a model that sends mostly other bytes.
TEST(InspectCommand, EveryKindThatAStepSendsHasItsLineAndTheTotalIsTheirSum) {
  const SmallRun folder;
  const std::vector<std::string> words{"inspect",  "--contract",
                                       "run.toml", "--world",
                                       "8",        "--parallelism.data_parallel_replicate_degree",
                                       "2",        "--parallelism.tensor_parallel_degree",
                                       "2",        "--training.global_batch_size",
                                       "-1"};
  const auto with = [&](const std::vector<std::string>& more) {
    auto all = words;
    all.insert(all.end(), more.begin(), more.end());
    return succeeded(run_program(folder, all)).out;
  };
  const std::string text = with({});
  for (const char* line : {"gathers", "reductions", "sums over replicas", "matrices",
                           "activations over tp", "tokens over ep", "messages over pp", "total"}) {
    EXPECT_THAT(text, ContainsRegex(std::string("\n  ") + line + " +[0-9.]+ ([KMG]i)?B"));
  }
  EXPECT_THAT(text, Says("what a rank sends in a step of 1 micro-batch ("));
  const json found = json::parse(with({"--json"}));
  std::int64_t sum = 0;
  for (const char* kind :
       {"gather", "reduce", "replica", "matrix", "activation", "token", "message"}) {
    sum += found[std::string("step_") + kind + "_sent_bytes"].get<std::int64_t>();
  }
  EXPECT_EQ(found["step_sent_bytes"], sum);
  EXPECT_GT(found["step_replica_sent_bytes"], 0);
  EXPECT_GT(found["step_activation_sent_bytes"], 0);
  // The output says whose kernels memory is that of, and whether it is enough.
  EXPECT_THAT(text, Says("\n  forecast for CPU kernels\n"));
  EXPECT_THAT(with({"--device", "cuda"}), Says("\n  forecast for kernels of cuda; "));
  EXPECT_EQ(found["rank_memory_bytes"]["kernels"], "cpu");
  EXPECT_EQ(json::parse(with({"--json", "--device", "cuda"}))["rank_memory_bytes"]["kernels"],
            "cuda");
  // A machine that is shipped is a GPU, and a share is one of its memory.
  EXPECT_THAT(
      with({"--machine", "h100", "--compile.mode", "plan", "--compile.memory_budget", "90%"}),
      Says("\n  forecast for kernels of cuda; ", "memory of h100"));
  EXPECT_THAT(with({"--device-memory", "80GiB"}), Says("--device-memory 80.0 GiB: fits, "));
  EXPECT_THAT(with({"--device-memory", "1KiB"}), Says("1.00 KiB: does not fit, "));
}

/// The line of `text` that begins so; "" where there is none.
std::string line_with(const std::string& text, const std::string& begin) {
  const auto at = text.find("\n" + begin);
  return at == std::string::npos ? "" : text.substr(at + 1, text.find('\n', at + 1) - at - 1);
}

TEST(InspectCommand, HasTheTimeThatPlanHasOfTheSameStep) {
  using Words = std::vector<std::string>;
  const SmallRun folder;
  const auto run = [&](Words verb, const Words& more) {
    verb.insert(verb.end(), more.begin(), more.end());
    return run_program(folder, verb);
  };
  const Words inspect{"inspect", "--contract", "run.toml", "--world", "2"};
  const Words plan{"plan", "run.toml", "--world", "2"};
  const std::string begin = "  a step by --flops and --bandwidth: ";
  for (const char* flops : {"1e9", "1e7"}) {
    const Words rates{"--flops", flops, "--bandwidth", "1MB", "--compile.mode", "plan"};
    const Outcome outcome = succeeded(run(inspect, rates));
    EXPECT_NE(line_with(outcome.out, begin), "");
    EXPECT_EQ(line_with(outcome.out, begin), line_with(run(plan, rates).out, begin));
  }
  EXPECT_EQ(line_with(run(inspect, {}).out, begin), "") << "the speed of a rank is not given";
  for (const Words& alone : {Words{"--flops", "1e9"}, Words{"--bandwidth", "1MB"}}) {
    EXPECT_EQ(run(inspect, alone).code, 2);
  }
  const Outcome stages = run(inspect, {"--flops", "1e9", "--bandwidth", "1MB",
                                       "--parallelism.pipeline_parallel_degree", "2"});
  EXPECT_EQ(stages.code, 2);
  EXPECT_THAT(stages.err,
              Says("--flops: found 2 stages, expected parallelism.pipeline_parallel_degree = 1"));
}

// Ranks step other matrices: the line has those of the first rank, and the most that one sends.
TEST(InspectCommand, MatricesOfMuonHaveALineAndArePartOfTheTotal) {
  const SmallRun folder;
  const auto inspected = [&](const std::vector<std::string>& more) {
    return succeeded(
               run_program(folder,
                           joined({"inspect", "--contract", "run.toml", "--world", "4"}, more)))
        .out;
  };
  const std::string muon = "Muon", by_element = "AdamW";
  const auto numbers = [&](const std::string& name) {
    return json::parse(inspected({"--optimizer.name", name, "--json"}));
  };
  const json with = numbers(muon), without = numbers(by_element);
  const std::int64_t sent = with["step_matrix_sent_bytes"];
  EXPECT_GT(sent, 0);
  EXPECT_GE(with["step_most_matrix_sent_bytes"], sent);
  EXPECT_EQ(without["step_matrix_sent_bytes"], 0);
  EXPECT_EQ(with["step_sent_bytes"].get<std::int64_t>(),
            without["step_sent_bytes"].get<std::int64_t>() + sent);
  EXPECT_THAT(inspected({"--optimizer.name", by_element}), ContainsRegex("\n  matrices +0 B\n"));
  EXPECT_THAT(inspected({"--optimizer.name", muon}),
              ContainsRegex("\n  matrices +[1-9][0-9.]* ([KMG]i)?B  Muon's, to the ranks that step "
                            "them and back"));
  const Outcome planned =
      run_program(folder, {"plan", "run.toml", "--world", "4", "--optimizer.name", muon});
  EXPECT_THAT(planned.out, Says("sent by a rank: " + size_text(with["step_sent_bytes"])));
}

// The choices of routers are unknown before the run: the line names the choice by which it counts
// bytes.
TEST(InspectCommand, TokensOverEpAreSaidToBeOfExpertsChosenEquallyOften) {
  const SmallRun folder;
  json model =
      json::parse(read_file(std::string(TESSERA_TEST_DATA) + "/qwen3-moe-fp32/config.json"));
  model["vocab_size"] = 260;
  folder.write("model.json", model.dump());
  const auto line_with_ep = [&](const std::string& degree) {
    const Outcome outcome =
        succeeded(run_program(folder, {"inspect", "--contract", "run.toml", "--world", "2",
                                       "--parallelism.expert_parallel_degree", degree}));
    std::istringstream lines(outcome.out);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("  tokens over ep ")) return line;
    }
    return std::string("no such line");
  };
  const std::string words = "as if every expert were chosen equally often";
  EXPECT_THAT(line_with_ep("2"),
              ContainsRegex("^  tokens over ep +[1-9][0-9.]* ([KMG]i)?B  " + words));
  EXPECT_THAT(line_with_ep("1"), ContainsRegex("^  tokens over ep +0 B$"));
}

TEST(InspectCommand, LoadsOfExpertsAreThoseOfTheFileInEveryVerbThatStepsDry) {
  const SmallRun folder;
  json model =
      json::parse(read_file(std::string(TESSERA_TEST_DATA) + "/qwen3-moe-fp32/config.json"));
  model["vocab_size"] = 260;
  folder.write("model.json", model.dump());
  using Words = std::vector<std::string>;
  const Words inspect{"inspect", "--contract", "run.toml"}, plan{"plan", "run.toml"},
      check{"check", "run.toml"};
  const auto run = [&](const Words& verb, const Words& more) {
    const Words of_all{"--world", "4", "--parallelism.expert_parallel_degree", "4"};
    return run_program(folder, joined(verb, joined(of_all, more)));
  };
  folder.write("loads.json", "[8, 4, 1, 1, 1, 1, 1, 1]");
  const Words with{"--expert-loads", "loads.json"};
  const std::string uneven = succeeded(run(inspect, with)).out, even = run(inspect, {}).out;
  EXPECT_THAT(uneven, ContainsRegex("\n  tokens over ep .* by the given loads of experts\n"));
  EXPECT_NE(line_with(uneven, "  tokens over ep"), line_with(even, "  tokens over ep"));
  EXPECT_NE(line_with(uneven, "    none"), line_with(even, "    none")) << "activations";
  EXPECT_NE(line_with(succeeded(run(plan, with)).out, "  memory of a rank"),
            line_with(run(plan, {}).out, "  memory of a rank"));
  EXPECT_THAT(succeeded(run(check, with)).out, Says("note: experts are chosen by the given loads"));
  for (const Words& verb : {inspect, plan, check}) {
    EXPECT_THAT(run(verb, {"--expert-loads", "none.json"}),
                Exits(2, "--expert-loads: cannot open"));
    folder.write("short.json", "[[1, 2]]");
    EXPECT_THAT(run(verb, {"--expert-loads", "short.json"}),
                Exits(2, "--expert-loads: 'short.json': found 2 numbers, expected 8"));
  }
}

// Naive: bytes beyond 64 bits, shown as negative ones.
TEST(InspectCommand, RowsThatNoMemoryHoldsAreRefused) {
  const SmallRun folder;
  for (const auto& [tokens, rows] : {std::pair("1000000000", "1"), {"1000000", "100"}}) {
    EXPECT_THAT(run_program(folder, {"inspect", "--contract", "run.toml", "--world", "2",
                                     "--training.seq_len", tokens, "--training.local_batch_size",
                                     rows, "--training.global_batch_size", "-1"}),
                Exits(2, std::string("rows of ") + tokens + " tokens"));
  }
}

TEST(InspectCommand, APipelineThatCannotBeIsRefusedWithBothNumbers) {
  const SmallRun folder;
  const auto refused = [&](const std::vector<std::string>& more) {
    const Outcome outcome =
        run_program(folder, joined({"inspect", "--contract", "run.toml", "--world", "2",
                                    "--parallelism.pipeline_parallel_degree", "2"},
                                   more));
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    return outcome.err;
  };
  EXPECT_THAT(refused({"--training.global_batch_size", "1"}),
              Says("found 1 micro-batches, expected at least 2"));
  EXPECT_THAT(refused({"--training.global_batch_size", "4", "--pipeline.micro_batches", "3"}),
              Says("pipeline.micro_batches: found 3, expected -1 or 4"));
  EXPECT_THAT(refused({"--training.global_batch_size", "4", "--pipeline.split", "[0, 1, 2]"}),
              Says("found the first layers of 3 stages, expected those of 2"));
}

TEST(InspectCommand, ALargeModelOn64RanksIsPlannedWithoutItsWeights) {
  const TemporaryFolder folder;
  folder.write("model.json", R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672, "hidden_act": "silu",
    "vocab_size": 151936, "max_position_embeddings": 4096, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06, "attention_bias": false, "tie_word_embeddings": false})");
  folder.write("run.toml", "[model]\nconfig = \"model.json\"\n");
  // 70e9 parameters: 4 GiB of address space hold the program, not the model.
  const json found = json::parse(
      succeeded(run_program(folder,
                            {"inspect", "--contract", "run.toml", "--world", "64", "--json"},
                            "prlimit --as=4294967296"))
          .out);
  EXPECT_EQ(found["units"].size(), 83U);
  EXPECT_GT(found["shard_bytes"].get<std::int64_t>(), std::int64_t{4} << 30);
  EXPECT_THAT(found["layout"], Says("dp_shard 64"));
  EXPECT_EQ(found["rank_memory_bytes"]["parameters"], found["shard_bytes"]);
  EXPECT_TRUE(found["rank_memory_bytes"]["activations"].is_null()) << "no seq_len";

  // A line for all of the 80 layers; what a step takes by mode. With --all a line for each.
  const std::vector<std::string> words{"inspect", "--contract",         "run.toml", "--world",
                                       "64",      "--training.seq_len", "4096"};
  const Outcome text = succeeded(run_program(folder, words, "prlimit --as=4294967296"));
  EXPECT_THAT(text.out, Says("\nmodel.layers.{0-79}.self_attn.q_proj.weight x 80 ",
                             "\nunit model.layers.{0-79} x 80\n"));
  EXPECT_THAT(text.out, Not(Says("model.layers.7.")));
  EXPECT_THAT(text.out, ContainsRegex("\n  parameters +4\\.[0-9]+ GiB  stored shards\n"));
  EXPECT_THAT(text.out, ContainsRegex("\n    none +[0-9.]+ GiB +[0-9.]+ GiB +[0-9.]+ GiB  <- "));
  EXPECT_THAT(text.out, ContainsRegex("\n    full +[0-9.]+ GiB +[0-9.]+ GiB +[0-9.]+ GiB\n"));
  auto all = words;
  all.push_back("--all");
  const Outcome unfolded = run_program(folder, all);
  EXPECT_THAT(unfolded.out,
              Says("\nmodel.layers.7.self_attn.q_proj.weight ", "\nunit model.layers.79\n"));
  EXPECT_THAT(unfolded.out, Not(Says("{0-79}")));
}

TEST(InspectCommand, ACheckpointHasTheKeysOfAFolderWithStepFilesAndPieces) {
  const SmallRun folder;
  ASSERT_EQ(
      run_program(folder, {"train", "run.toml", "--nproc", "2", "--job.dump_folder", "run"}).code,
      0);
  const Outcome outcome =
      succeeded(run_program(folder, {"inspect", "run/checkpoint/step-3", "--json"}));
  EXPECT_EQ(run_program(folder, {"inspect", "run/checkpoint", "--json"}).out, outcome.out);
  const json found = json::parse(outcome.out);
  const json manifest = json::parse(read_file(folder / "run/checkpoint/step-3/manifest.json"));
  EXPECT_EQ(found["step"], 3);
  EXPECT_EQ(found["files"], manifest["files"]);
  json listed = json::object();
  for (std::istringstream lines(read_file(folder / "run/checkpoint/step-3/tensors.jsonl"));
       lines.peek() != EOF;) {
    std::string line;
    std::getline(lines, line);
    listed.update(json::parse(line));
  }
  ASSERT_EQ(found["tensors"].size(), listed.size());
  ASSERT_EQ(found["tensors"].size(), 14U * 4U) << "each with three of the optimizer";
  const std::map<std::string, std::int64_t> sizes{{"float32", 4}, {"int64", 8}};
  std::int64_t elements = 0;
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : found["tensors"].items()) {
    const json& expected = listed[name];
    EXPECT_EQ(tensor["dtype"], expected["dtype"]) << name;
    EXPECT_EQ(tensor["shape"], expected["shape"]) << name;
    ASSERT_EQ(tensor["pieces"].size(), expected["pieces"].size()) << name;
    std::int64_t held = 0;
    std::set<std::string> files;
    for (std::size_t i = 0; i < expected["pieces"].size(); ++i) {
      const json& piece = tensor["pieces"][i];
      const json& short_piece = expected["pieces"][i];  // of the whole tensor, on this layout
      EXPECT_EQ(piece["file"], "rank_" + short_piece[0].dump() + ".safetensors") << name;
      EXPECT_EQ(piece["key"], name);
      EXPECT_EQ(piece["box"]["size"], tensor["shape"]) << name;
      EXPECT_EQ(piece["begin"], short_piece[1]) << name;
      EXPECT_EQ(piece["end"], short_piece[2]) << name;
      held += piece["end"].get<std::int64_t>() - piece["begin"].get<std::int64_t>();
      files.insert(piece["file"]);
    }
    EXPECT_EQ(tensor["bytes"], held * sizes.at(tensor["dtype"])) << name;
    EXPECT_EQ(tensor["file"], files.size() == 1 ? json(*files.begin()) : json()) << name;
    elements += held;
    bytes += held * sizes.at(tensor["dtype"]);
  }
  EXPECT_EQ(found["total"]["tensors"], 14 * 4);
  EXPECT_EQ(found["total"]["elements"], elements);
  EXPECT_EQ(found["total"]["bytes"], bytes);
  EXPECT_EQ(found["total"]["files"], 2);

  const Outcome text = succeeded(run_program(folder, {"inspect", "run/checkpoint"}));
  EXPECT_THAT(text.out, ContainsRegex("model/lm_head\\.weight +float32 +\\[260, 16\\] +16640 bytes "
                                      "in [12] pieces?\n"));
  EXPECT_THAT(text.out, StartsWith("step 3: 56 tensors, " + std::to_string(elements) +
                                   " elements, " + std::to_string(bytes) + " bytes in 2 files\n"));
}

TEST(InspectCommand, VersionOneIsListedAndConvertedAsVersionTwo) {
  const SmallRun folder;
  ASSERT_EQ(
      run_program(folder, {"train", "run.toml", "--nproc", "2", "--job.dump_folder", "run"}).code,
      0);
  const auto step = folder / "run/checkpoint/step-3";
  const Outcome before = run_program(folder, {"inspect", "run/checkpoint/step-3"});
  ASSERT_EQ(run_program(folder, {"convert", "run/checkpoint/step-3", "two"}).code, 0);
  {
    const auto checkpoint = CheckpointFolder::open(step);
    auto manifest = checkpoint.manifest();
    manifest.format = 1;
    manifest.tensors = checkpoint.tensors();
    manifest.blocks.clear();
    manifest.files.erase(std::string(kTensorsFile));
    folder.write("run/checkpoint/step-3/manifest.json", to_json(manifest));
  }
  std::filesystem::remove(step / kTensorsFile);
  const Outcome after = succeeded(run_program(folder, {"inspect", "run/checkpoint/step-3"}));
  EXPECT_EQ(after.out, before.out);
  succeeded(run_program(folder, {"convert", "run/checkpoint/step-3", "one"}));
  EXPECT_EQ(read_file(folder / "one/model.safetensors"),
            read_file(folder / "two/model.safetensors"));
}

TEST(InspectCommand, ADamagedCheckpointIsRefused) {
  const SmallRun folder;
  ASSERT_EQ(run_program(folder, {"train", "run.toml", "--job.dump_folder", "run"}).code, 0);
  const auto file = folder / "run/checkpoint/step-3/rank_0.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  const Outcome outcome = run_program(folder, {"inspect", "run/checkpoint/step-3"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, Says("rank_0.safetensors': found "));
}

// DeepSpeed and others write such a file, and folders of steps, next to the model.
TEST(InspectCommand, AFolderOfAModelWithAFileLatestIsAFolder) {
  const TemporaryFolder folder;
  const std::filesystem::path model = std::filesystem::path(TESSERA_TEST_DATA) / "qwen3-mixed";
  std::filesystem::copy(model, folder / "model", std::filesystem::copy_options::recursive);
  const Outcome before = succeeded(run_program(folder, {"inspect", "model", "--json"}));
  std::filesystem::create_directories(folder / "model/step-500");
  folder.write("model/latest", "global_step500");
  const Outcome outcome = succeeded(run_program(folder, {"inspect", "model", "--json"}));
  EXPECT_EQ(outcome.out, before.out);
  succeeded(run_program(
      folder, {"generate", "--model", "model", "--prompt-tokens", "1,2", "--max-new-tokens", "1"}));
}

}  // namespace
}  // namespace tessera::cli::inspect_test
