// The paths that a user gives: a RUN folder stands for its latest checkpoint, a wrong one is named
// with what asked for it, and a run that is refused leaves nothing behind.

#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "cli/byte_model.h"
#include "cli/program.h"
#include "io/safetensors.h"
#include "support/process.h"
#include "support/test.h"
#include "train/config/config.h"

namespace tessera::cli::paths_test {
namespace {

namespace fs = std::filesystem;

/// Every path below the folder but the outputs that run_program keeps there.
std::set<std::string> everything_in(const TemporaryFolder& folder) {
  std::set<std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder.path())) {
    const std::string path = entry.path().lexically_relative(folder.path()).string();
    if (path != "stdout.txt" && path != "stderr.txt") found.insert(path);
  }
  return found;
}

std::string last_line(const std::string& text) {
  return text.substr(text.rfind('\n', text.size() - 2) + 1);
}

class RunAsModel : public ::testing::Test {
 protected:
  void SetUp() override {
    succeeded(run_program(
        folder_, {"train", "run.toml", "--job.dump_folder", "run", "--checkpoint.interval", "2"}));
  }
  /// Says which checkpoint it took, and does with it what it does with that.
  Outcome expect_taken(const std::string& run, const std::string& key, Words words) {
    const auto outcome = succeeded(run_program(folder_, words));
    EXPECT_THAT(outcome.err,
                Says(key + ": of '" + run + "' the latest checkpoint", "/checkpoint/step-3'"));
    return outcome;
  }

  const SmallRun folder_;
};

/// Two rows of 16 tokens for `tessera gradients`.
void write_batch(const fs::path& path) {
  std::vector<std::int64_t> ids(2 * 16);
  std::iota(ids.begin(), ids.end(), std::int64_t{'a'});
  SafetensorsWriter writer(
      path, {{"input_ids", DType::kInt64, {2, 16}}, {"labels", DType::kInt64, {2, 16}}});
  writer.write("input_ids", std::as_bytes(std::span(ids)));
  writer.write("labels", std::as_bytes(std::span(ids)));
  writer.finish();
}

// Naive: "found no config.json", since a RUN folder is neither a model nor a checkpoint.
TEST_F(RunAsModel, IsItsLatestCheckpointForEveryVerb) {
  const Words prompt{"--prompt", "line ", "--max-new-tokens", "8"};
  const auto generate = [&](const std::string& model) {
    return joined({"generate", "--model", model}, prompt);
  };
  const auto text = expect_taken("run", "--model", generate("run")).out;
  EXPECT_EQ(text, run_program(folder_, generate("run/checkpoint/step-3")).out);
  EXPECT_EQ(text, expect_taken("run/checkpoint", "--model", generate("run/checkpoint")).out);
  EXPECT_EQ(expect_taken("run", "DIR", {"inspect", "run"}).out,
            run_program(folder_, {"inspect", "run/checkpoint/step-3"}).out);
  expect_taken("run", "CHECKPOINT", {"convert", "run", "converted"});
  EXPECT_EQ(text, run_program(folder_, generate("converted")).out);

  write_batch(folder_ / "batch.safetensors");
  const auto gradients = [&](const std::string& model, const std::string& out) {
    return Words{"gradients", "--model", model, "--batch", "batch.safetensors", "--out", out};
  };
  expect_taken("run", "--model", gradients("run", "of_run.safetensors"));
  const auto named = gradients("run/checkpoint/step-3", "named.safetensors");
  ASSERT_EQ(run_program(folder_, named).code, 0);
  const SafetensorsFile of_run(folder_ / "of_run.safetensors");
  const SafetensorsFile of_checkpoint(folder_ / "named.safetensors");
  ASSERT_FALSE(of_run.header().tensors.empty());
  for (const TensorInfo& tensor : of_run.header().tensors) {
    EXPECT_TRUE(std::ranges::equal(of_run.bytes(tensor.name), of_checkpoint.bytes(tensor.name)))
        << tensor.name;
  }
}

TEST_F(RunAsModel, BeginsARunWhichKeepsTheCheckpointThatItTook) {
  std::string config = read_file(folder_ / "run.toml");
  config.replace(config.find("config = \"model.json\""), 21, "path = \"run\"");
  folder_.write("further.toml", config);
  expect_taken((folder_ / "run").string(), "model.path",
               {"train", "further.toml", "--job.dump_folder", "further", "--nproc", "2"});
  const auto kept = train::load_config((folder_ / "further/config.toml").string());
  EXPECT_EQ(kept.model.path, (folder_ / "run/checkpoint/step-3").string());
  expect_taken("further", "model.path",
               {"inspect", "--contract", "further.toml", "--model.path", "further"});
}

// Adapters belong to the model that they were trained with, however far its own run has come
// since. Naive: RUN is looked up again, and the run is refused with "set it back".
TEST_F(RunAsModel, OfARunThatContinuesIsTheCheckpointThatItBeganWith) {
  std::string config = read_file(folder_ / "run.toml");
  config.replace(config.find("config = \"model.json\""), 21, "path = \"run\"");
  folder_.write("adapters.toml", config);
  const auto adapters = [&](const std::string& steps) {
    return Words{
        "train",          "adapters.toml", "--job.dump_folder", "adapters", "--lora.rank", "2",
        "--lora.targets", "q_proj",        "--training.steps",  steps};
  };
  const auto kept = [&] {
    return train::load_config((folder_ / "adapters/config.toml").string()).model.path;
  };
  const std::string first = (folder_ / "run/checkpoint/step-3").string();
  expect_taken((folder_ / "run").string(), "model.path", adapters("2"));
  EXPECT_EQ(kept(), first);
  succeeded(run_program(
      folder_, {"train", "run.toml", "--job.dump_folder", "run", "--training.steps", "5"}));

  const auto resumed = succeeded(run_program(folder_, adapters("4")));
  EXPECT_THAT(
      resumed.err,
      Says("the checkpoint is taken with which this run began, '" + first + "'", "resumed from"));
  EXPECT_EQ(kept(), first);
  // The checkpoint that it began with is gone: the run says so, and takes no other one.
  fs::remove_all(first);
  const auto without = run_program(folder_, adapters("6"));
  EXPECT_EQ(without.code, 2) << without.err;
  EXPECT_THAT(last_line(without.err), Says("model.path: found tensors with the hash"));
  // A new run takes the newest.
  fs::remove_all(folder_ / "adapters/checkpoint");
  succeeded(run_program(folder_, adapters("2")));
  EXPECT_EQ(kept(), (folder_ / "run/checkpoint/step-5").string());
}

// Its config.toml has the absolute path of where it was.
TEST_F(RunAsModel, MayHaveBeenMovedAndKeepItsCheckpointsElsewhere) {
  fs::rename(folder_ / "run", folder_ / "moved");
  expect_taken("moved", "DIR", {"inspect", "moved"});
  const std::string elsewhere = (folder_ / "elsewhere/checkpoint").string();
  ASSERT_EQ(run_program(folder_, {"train", "run.toml", "--job.dump_folder", "other",
                                  "--checkpoint.folder", elsewhere})
                .code,
            0);
  expect_taken("other", "DIR", {"inspect", "other"});
}

TEST_F(RunAsModel, WithoutAWholeCheckpointIsRefusedWithTheWayOn) {
  fs::remove(folder_ / "run/checkpoint/step-3/manifest.json");
  EXPECT_THAT(run_program(folder_, {"inspect", "run"}),
              Exits(2, "DIR: 'run/checkpoint/step-3': found no manifest.json",
                    "the newest whole checkpoint before it is "
                    "'run/checkpoint/step-2': name that one"));
  ASSERT_EQ(run_program(folder_, {"train", "run.toml", "--job.dump_folder", "none",
                                  "--checkpoint.enable", "false"})
                .code,
            0);
  const auto none = run_program(folder_, {"inspect", "none"});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err,
              Says("DIR: found 'none', the folder of a run", "checkpoint.enable = false"));
}

// Naive: "cannot open 'lora/config.json'", of a folder that `convert` has just written.
TEST_F(RunAsModel, OfAdaptersConvertedIsRefusedWithWhatToGiveInstead) {
  std::string config = read_file(folder_ / "run.toml");
  config.replace(config.find("config = \"model.json\""), 21, "path = \"run\"");
  folder_.write("adapters.toml", config);
  const auto trained =
      succeeded(run_program(folder_, {"train", "adapters.toml", "--job.dump_folder", "adapters",
                                      "--lora.rank", "2", "--lora.targets", "q_proj"}));
  ASSERT_EQ(run_program(folder_, {"convert", "adapters", "lora"}).code, 0);
  const auto before = everything_in(folder_);
  const auto expect_refused = [&](const std::string& key, const Words& words) {
    const auto outcome = run_program(folder_, words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_THAT(last_line(outcome.err),
                AllOf(StartsWith("tessera: io: " + key + ": cannot open '"),
                      Says("lora': found a LoRA adapter (adapter_config.json), expected a "
                           "model folder"),
                      Says("give the folder of the model that it adapts, or, for both "
                           "together, the folder of the run that trained it")));
    EXPECT_EQ(everything_in(folder_), before);
  };
  expect_refused("DIR", {"inspect", "lora"});
  expect_refused("--model",
                 {"generate", "--model", "lora", "--prompt", "x", "--max-new-tokens", "1"});
  expect_refused("--model", {"gradients", "--model", "lora", "--batch", "b", "--out", "o"});
  expect_refused("CHECKPOINT", {"convert", "lora", "out"});
  expect_refused("model.path", {"train", "adapters.toml", "--model.path", "lora"});
  // The folders that it says to give.
  for (const std::string model : {"run", "adapters"}) {
    EXPECT_EQ(run_program(folder_,
                          {"generate", "--model", model, "--prompt", "x", "--max-new-tokens", "1"})
                  .code,
              0);
  }
}

struct WrongPath {
  Words words;
  std::string key;
  std::string says = "absent";
  std::string kind = "io";
};

class WrongPaths : public ::testing::TestWithParam<WrongPath> {};

// One place for all of them: a path without its key sends a newcomer through the whole file.
TEST_P(WrongPaths, AreNamedWithWhatAskedForThem) {
  const SmallRun folder;
  write_folder(folder / "model", byte_spec());
  auto with_tokenizer = byte_spec();
  with_tokenizer.tessera_tokenizer.clear();
  write_folder(folder / "tokenized", with_tokenizer);
  folder.write("empty/notes.md", "no text");
  folder.write("ids.bin", std::string(80, '\1'));
  folder.write("ids.json", R"({"dtype": "uint16", "vocab_size": 260})");
  folder.write("torn.safetensors", "{");
  std::string config = read_file(folder / "run.toml");
  config.erase(config.find("config = \"model.json\""), 21);
  folder.write("bare.toml", config);
  const auto before = everything_in(folder);
  const auto outcome = run_program(folder, GetParam().words);
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  const auto& [words, key, says, kind] = GetParam();
  EXPECT_THAT(last_line(outcome.err), StartsWith("tessera: " + kind + ": " + key + ": "));
  EXPECT_THAT(last_line(outcome.err), Says(says));
  EXPECT_EQ(everything_in(folder), before) << "a refused command leaves nothing";
}

INSTANTIATE_TEST_SUITE_P(
    Keys, WrongPaths,
    ::testing::Values(
        WrongPath{{"train", "bare.toml", "--model.path", "absent"}, "model.path"},
        WrongPath{{"train", "bare.toml", "--model.config", "absent.json"}, "model.config"},
        WrongPath{{"train", "run.toml", "--data.path", "absent.txt"}, "data.path"},
        WrongPath{{"train", "run.toml", "--data.path", "[\"page.txt\", \"absent.txt\"]"},
                  "data.path"},
        WrongPath{{"train", "run.toml", "--data.path", "absent.bin"}, "data.path"},
        WrongPath{{"train", "run.toml", "--data.path", "absent.safetensors"}, "data.path"},
        WrongPath{{"train", "run.toml", "--validation.path", "absent.txt"}, "validation.path"},
        WrongPath{{"train", "absent.toml"}, "CONFIG.toml"},
        WrongPath{{"train", "bare.toml", "--model.path", "tokenized", "--data.path", "absent"},
                  "data.path",
                  "absent': found no such file or folder"},
        WrongPath{{"train", "bare.toml", "--model.path", "tokenized"},
                  "data.path",
                  "found text",
                  "config"},
        WrongPath{{"train", "run.toml", "--data.path", "empty"},
                  "data.path",
                  "empty: found no text file",
                  "format"},
        WrongPath{{"train", "run.toml", "--validation.path", "empty"},
                  "validation.path",
                  "empty: found no text file",
                  "format"},
        WrongPath{{"train", "run.toml", "--data.path", "ids.bin"},
                  "data.path",
                  "ids.json: lacks the key num_tokens, expected a positive integer",
                  "format"},
        WrongPath{{"train", "run.toml", "--data.path", "torn.safetensors"},
                  "data.path",
                  "torn.safetensors: found 1 bytes",
                  "format"},
        WrongPath{{"train", "run.toml", "--model.config", "torn.safetensors"},
                  "model.config",
                  "malformed JSON",
                  "format"},
        WrongPath{{"train", "bare.toml", "--model.path", "empty"},
                  "model.path",
                  "empty/config.json': found no such file, expected a model folder"},
        WrongPath{{"train", "run.toml", "--job.dump_folder", "/dev/null/absent"},
                  "job.dump_folder"},
        WrongPath{{"train", "run.toml", "--checkpoint.folder", "/dev/null/absent"},
                  "checkpoint.folder"},
        WrongPath{{"train", "run.toml", "--metrics.folder", "/dev/null/absent"}, "metrics.folder"},
        WrongPath{{"inspect", "--contract", "absent.toml"}, "--contract"},
        WrongPath{{"inspect", "--contract", "bare.toml", "--model.path", "absent"}, "model.path"},
        WrongPath{{"inspect", "absent"}, "DIR"},
        WrongPath{{"generate", "--model", "absent", "--prompt", "x", "--max-new-tokens", "1"},
                  "--model"},
        WrongPath{{"convert", "absent", "out"}, "CHECKPOINT"},
        WrongPath{{"convert", "model", "/dev/null/absent"}, "OUT"},
        WrongPath{{"convert", "model", "model"}, "OUT", "model': found something there", "usage"},
        WrongPath{{"convert", "model", "page.txt"}, "OUT", "found something there", "usage"},
        WrongPath{{"schedule", "1F1B", "--ranks", "2", "--micro-batches", "2", "--costs-from",
                   "page.txt"},
                  "--costs-from",
                  "malformed JSON",
                  "format"},
        WrongPath{{"gradients", "--model", "absent", "--batch", "b.safetensors", "--out", "o"},
                  "--model"},
        WrongPath{{"gradients", "--model", "model", "--batch", "absent.safetensors", "--out", "o"},
                  "--batch"}));

class RefusedRun : public ::testing::TestWithParam<Words> {};

// Refused at every depth: by a key alone, by what a file holds, by the model's contract, with
// folders already made and logs open.
TEST_P(RefusedRun, LeavesNoFolder) {
  for (const std::string ranks : {"1", "2"}) {
    const SmallRun folder;
    folder.write("short.txt", "too short");
    const auto before = everything_in(folder);
    Words words{"train", "run.toml", "--nproc", ranks};
    words.insert(words.end(), GetParam().begin(), GetParam().end());
    const auto outcome = run_program(folder, words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_EQ(everything_in(folder), before) << ranks << " rank(s)\n" << outcome.err;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Runs, RefusedRun,
    ::testing::Values(Words{"--training.stpes", "3"}, Words{"--data.path", "short.txt"},
                      Words{"--data.path", "short.txt", "--job.dump_folder", "a/b/run"},
                      Words{"--optimizer.no_decay", "nomr"}, Words{"--checkpoint.load_step", "7"}));

TEST(RunRefused, LeavesWhatWasThereBefore) {
  const SmallRun folder;
  ASSERT_EQ(run_program(folder, {"train", "run.toml", "--job.dump_folder", "runs/first"}).code, 0);
  const auto before = everything_in(folder);
  const auto refused = [&](const std::string& run) {
    EXPECT_THAT(run_program(folder, {"train", "run.toml", "--job.dump_folder", run,
                                     "--optimizer.no_decay", "nomr"}),
                Exits(2));
    return everything_in(folder);
  };
  EXPECT_EQ(refused("runs/second"), before);
  EXPECT_EQ(refused("runs/first"), before) << "of a run that is there its files stay";
}

// A folder that somebody has filled already, but that is no run: the refused ranks take back what
// they put between its files, and nothing else.
TEST(RunRefused, LeavesTheFilesOfAFolderThatIsNoRunYet) {
  for (const std::string ranks : {"1", "2"}) {
    const SmallRun folder;
    folder.write("run/notes.txt", "mine");
    folder.write("run/checkpoint/step-500/x", "mine");
    folder.write("run/logs/rank_1.log", "of an earlier run\n");
    const auto before = everything_in(folder);
    const auto outcome =
        run_program(folder, {"train", "run.toml", "--nproc", ranks, "--job.dump_folder", "run",
                             "--optimizer.no_decay", "nomr"});
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_EQ(everything_in(folder), before) << ranks << " rank(s)\n" << outcome.err;
  }
}

}  // namespace
}  // namespace tessera::cli::paths_test
