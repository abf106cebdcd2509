// Refusals of the program: exit code 2, one line on stderr that names the key, nothing on stdout.

#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "support/test.h"

namespace tessera::cli::refusal_test {
namespace {

using Words = std::vector<std::string>;

/// The config.json of a folder of tests/golden/data with another value of one key.
std::string config_with(const std::string& of, const char* key, const nlohmann::json& value) {
  auto config =
      nlohmann::json::parse(read_file(std::string(TESSERA_TEST_DATA) + "/" + of + "/config.json"));
  config[key] = value;
  return config.dump();
}

struct Refused {
  Words words;
  std::string says;
  std::string environment = "";
};

class Refusals : public ::testing::TestWithParam<Refused> {};

TEST_P(Refusals, AreExitCodeTwoAndOneLine) {
  const SmallRun folder;
  folder.write("broken.toml", "[training]\nsteps = = 3\n");
  folder.write("torn.safetensors", "{");
  folder.write("empty.txt", "");
  folder.write("short.txt", "too short");
  folder.write("ids.json", R"({"dtype": "uint16", "num_tokens": 40, "vocab_size": 300})");
  folder.write("ids.bin", std::string(80, '\1'));  // id 257
  folder.write("small_vocabulary.json", [&] {
    std::string text = read_file(folder / "model.json");
    return text.replace(text.find("260"), 3, "200");
  }());
  folder.write("unknown_layer.json",
               config_with("qwen3-next-fp32", "layer_types",
                           {"linear_attention", "mamba", "linear_attention"}));
  folder.write("short_layers.json", config_with("qwen3-5-text-fp32", "layer_types",
                                                {"linear_attention", "full_attention"}));
  folder.write("long_pattern.json",
               config_with("nemotron-h-fp32", "hybrid_override_pattern", "ME*-MM"));
  folder.write("unknown_part.json", config_with("nemotron-h-fp32", "layers_block_type",
                                                {"mamba", "moe", "sliding", "mlp", "mamba"}));
  const Outcome outcome = run_program(folder, GetParam().words, GetParam().environment);
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, Says(GetParam().says));
  const std::string last = outcome.err.substr(outcome.err.rfind('\n', outcome.err.size() - 2) + 1);
  EXPECT_THAT(last, StartsWith("tessera: ")) << "the error stands last";
  EXPECT_THAT(last, Says(GetParam().says)) << "on one line";
  EXPECT_THAT(outcome.err, Not(Says("run folder"))) << "none is left to be said";
}

Words train(const Words& more) { return joined({"train", "run.toml"}, more); }

INSTANTIATE_TEST_SUITE_P(
    Commands, Refusals,
    ::testing::Values(
        Refused{{"generate", "--model", "m", "--prompt", "x", "--max-new-tokens", "1"}, "'m'"},
        Refused{{"convert", "absent", "b"}, "absent"},
        Refused{{"convert", "absent", ""}, "OUT: found an empty name"},
        Refused{{"train", "absent.toml"}, "absent.toml"},
        Refused{{"train", "broken.toml"}, "broken.toml:2:9"},
        Refused{train({"--training.stpes", "3"}), "the nearest is --training.steps"},
        Refused{train({"--device", "cuda"}), "world: found device cuda, but ",
                "CUDA_VISIBLE_DEVICES="},
        Refused{train({"--device", "cpu", "--comm.backend", "nccl"}),
                "comm.backend: found nccl with device cpu"},
        Refused{train({"--comm.backend", "nccl"}), "found backend nccl with device cpu",
                "CUDA_VISIBLE_DEVICES="},
        Refused{train({"--precision.accumulate_dtype", "bfloat16"}),
                "precision.accumulate_dtype: found bfloat16"},
        Refused{train({"--optimizer.no_decay", "nomr"}), "optimizer.no_decay: found the pattern"},
        Refused{train({"--optimizer.rule", "[{match = \"nomr\", lr_scale = 2}]"}),
                "optimizer.rule[1].match: found the pattern"},
        Refused{train({"--optimizer.rule", "[{match = \"*norm\"}]"}), "found a pattern alone"},
        Refused{train({"--lr_scheduler.decay", "wsd"}),
                "lr_scheduler.decay_steps: found nothing with decay \"wsd\""},
        Refused{train({"--lr_scheduler.decay_steps", "2"}),
                "lr_scheduler.decay_steps: found 2 with another decay"},
        Refused{train({"--lora.rank", "8"}), "lora.targets: found nothing"},
        Refused{train({"--training.steps", "many"}), "training.steps: found \"many\""},
        Refused{train({"--checkpoint.enable", "false", "--checkpoint.load_step", "5"}),
                "checkpoint.load_step: found 5 without checkpoints"},
        Refused{train({"--checkpoint.folder", "../checkpoint"}),
                "checkpoint.folder: found '../checkpoint', which leads out of RUN"},
        Refused{train({"--metrics.folder", "metrics/../.."}),
                "metrics.folder: found 'metrics/../..', which leads out of RUN"},
        Refused{train({"--pipeline.micro_batches", "3"}),
                "pipeline.micro_batches: found 3, expected -1 or 4"},
        Refused{train({"--pipeline.schedule", "LoopedBFS"}),
                "pipeline.schedule: found 'LoopedBFS', expected one of GPipe, 1F1B"},
        Refused{train({"--pipeline.reshard", "never"}), "pipeline.reshard: found \"never\""},
        Refused{train({"--parallelism.expert_parallel_degree", "2"}),
                "parallelism.expert_parallel_degree: found 2, expected a divisor of 1"},
        Refused{train({"--nproc", "3", "--parallelism.data_parallel_shard_degree", "2"}),
                "data_parallel_shard_degree: found 2, expected -1 or 3"},
        Refused{train({"--nproc", "2"}), "--nproc: found 2, expected 3",
                "RANK=0 WORLD_SIZE=3 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29999"},
        Refused{train({}),
                "on several hosts and says no address; set MASTER_ADDR or comm.master_addr",
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 "
                "OMPI_COMM_WORLD_LOCAL_SIZE=1"},
        Refused{train({}), "Slurm started 2 ranks on several hosts and says no address",
                "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 "
                "SLURM_LOCALID=0"},
        Refused{train({}), "PMI started 4 ranks on several hosts and says no address",
                "PMI_RANK=0 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2"},
        Refused{train({}), "PMI started 2 ranks and says neither where nor an address",
                "PMI_RANK=1 PMI_SIZE=2"},
        Refused{train({}), "torchrun started 2 ranks and says neither where nor an address",
                "RANK=0 WORLD_SIZE=2"},
        Refused{train({"--nproc", "3"}), "--nproc: found 3, expected 2, the ranks that PMI started",
                "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 MASTER_PORT=29997"},
        Refused{train({"--nproc", "3"}),
                "--nproc: found 3, expected 2, the ranks that Slurm started",
                "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 "
                "SLURM_LOCALID=0 MASTER_PORT=29998"},
        Refused{train({"--training.global_batch_size", "5", "--training.local_batch_size", "2"}),
                "training.global_batch_size: found 5"},
        Refused{train({"--model.config", "absent.json"}), "absent.json"},
        Refused{train({"--checkpoint.load_step", "7"}),
                "there is none; name another run by job.dump_"},
        Refused{train({"--data.path", "absent.txt"}), "absent.txt"},
        Refused{train({"--data.path", "empty.txt"}), "empty.txt"},
        Refused{train({"--data.path", "short.txt"}), "at least one row of 17"},
        Refused{train({"--validation.path", "short.txt"}), "validation.path"},
        Refused{train({"--model.config", "small_vocabulary.json"}), "vocabulary of at least 257"},
        Refused{train({"--model.config", "unknown_layer.json"}), "layer_types: found \"mamba\""},
        Refused{train({"--model.config", "short_layers.json"}), "layer_types: found ["},
        Refused{train({"--model.config", "long_pattern.json"}),
                "the layers of hybrid_override_pattern"},
        Refused{train({"--model.config", "unknown_part.json"}), "layers_block_type: found ["},
        Refused{train({"--job.dump_folder", "/dev/null/run"}), "/dev/null/run"},
        Refused{{"gradients", "--model", ".", "--batch", "absent.safetensors", "--out", "o"},
                "config.json"},
        Refused{{"inspect", "run.toml"}, "'run.toml': found a file, expected a model folder"},
        Refused{{"inspect", "torn.safetensors"}, "torn.safetensors: found 1 bytes"},
        Refused{{"inspect", "absent"}, "absent"}));

}  // namespace
}  // namespace tessera::cli::refusal_test
