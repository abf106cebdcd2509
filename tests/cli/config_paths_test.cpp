// Relative paths that do not exist: the message names the working folder, and the file next to the
// config where that one was meant.

#include <random>

#include "cli/byte_model.h"
#include "cli/program.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::config_paths_test {
namespace {

namespace fs = std::filesystem;

std::string last_line(const std::string& text) {
  return text.substr(text.rfind('\n', text.size() - 2) + 1);
}

/// The working folder has `model`, the config is sub/run.toml.
struct RunBelow : SmallRun {
  RunBelow() {
    write_folder(*this / "model", byte_spec());
    std::string config = read_file(*this / "run.toml");
    config.erase(config.find("config = \"model.json\""), 21);
    write("sub/run.toml", config + "[compile]\nmode = \"plan\"\n");
  }
};

struct PathKey {
  std::string key;
  std::string ending;  ///< of a name
  Words more = {};     ///< more words, without which it has no effect
  bool is_folder = false;
  bool of_training = false;  ///< other verbs do not read it
};

const std::vector<PathKey>& path_keys() {
  static const std::vector<PathKey> kKeys{
      {.key = "model.path", .ending = "", .is_folder = true},
      {.key = "model.config", .ending = ".json"},
      {.key = "data.path", .ending = ".txt", .of_training = true},
      {.key = "data.path", .ending = ".bin", .of_training = true},
      {.key = "data.path", .ending = "*.txt", .of_training = true},
      {.key = "validation.path", .ending = ".safetensors", .of_training = true},
      {.key = "compile.plan", .ending = ".json"},
      {.key = "contract.lock", .ending = ".txt", .of_training = true},
      {.key = "pipeline.schedule_file",
       .ending = ".csv",
       .more = {"--parallelism.pipeline_parallel_degree", "2", "--nproc", "2", "--compile.mode",
                "off"},
       .of_training = true}};
  return kKeys;
}

Words words_of(const PathKey& key, const std::string& path, std::mt19937& draw) {
  Words words{"train", "sub/run.toml"};
  if (!key.of_training && draw() % 2 == 0) {
    words = draw() % 2 == 0 ? Words{"plan", "sub/run.toml"}
                            : Words{"inspect", "--contract", "sub/run.toml"};
  } else if (key.more.empty() && draw() % 3 == 0) {
    words.insert(words.end(), {"--nproc", "2"});
  }
  if (!key.key.starts_with("model.")) words.insert(words.end(), {"--model.path", "model"});
  words.insert(words.end(), {"--" + key.key, path});
  words.insert(words.end(), key.more.begin(), key.more.end());
  return words;
}

// Naive: "cannot open 'tiny/config.json'", where the file is next to the config.
TEST(ConfigPaths, OneThatIsNotThereSaysWhatItIsRelativeToAndNamesTheOneNextToTheConfig) {
  const RunBelow folder;
  std::mt19937 draw(20261128);
  int number = 0;
  for (const PathKey& key : path_keys()) {
    const bool is_near = ++number % 3 != 0;
    const std::string stem = "p" + std::to_string(draw() % 1000);
    const std::string name = (draw() % 2 == 0 ? "" : "deep/") + stem + key.ending;
    if (is_near) {
      auto planted = "sub/" + name;
      if (const auto star = planted.find('*'); star != planted.npos) planted.erase(star, 1);
      fs::create_directories((folder / planted).parent_path());
      if (key.is_folder) {
        fs::create_directory(folder / planted);
      } else {
        folder.write(planted, "x");
      }
    }
    const Words words = words_of(key, name, draw);
    SCOPED_TRACE(words[0] + " " + key.key + " " + name);
    const auto outcome = run_program(folder, words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    const std::string said = last_line(outcome.err);
    EXPECT_THAT(said, Says(key.key + ": ", "'" + name + "'", "found no ",
                           "in the working folder '" + folder.path().string() + "'"));
    const auto names_it = Says("next to the config there is 'sub/" + name + "': name that");
    EXPECT_EQ(::testing::Value(said, names_it), is_near) << said;
  }
}

TEST(ConfigPaths, EachOfSeveralSourcesIsNamedByItsTable) {
  const RunBelow folder;
  std::string config = read_file(folder / "sub/run.toml");
  const std::string one = "path = \"page.txt\"\n";
  config.replace(config.find(one), one.size(),
                 "[[data.source]]\npath = \"page.txt\"\n[[data.source]]\npath = [\"page.txt\", "
                 "\"lost.txt\"]\n");
  folder.write("sub/run.toml", config);
  folder.write("sub/lost.txt", "x");
  const auto outcome = run_program(folder, {"train", "sub/run.toml", "--model.path", "model"});
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_THAT(last_line(outcome.err),
              Says("data.source[2].path: cannot open 'lost.txt': found no such file",
                   "next to the config there is 'sub/lost.txt'"));
}

// As configs/ of an installed copy, whose paths begin above it.
TEST(ConfigPaths, TheFolderAboveTheConfigIsLookedIntoToo) {
  const RunBelow folder;
  folder.write("share/configs/run.toml", read_file(folder / "sub/run.toml"));
  folder.write("share/configs/lost.txt", "x");
  const auto outcome = run_program(folder, {"train", "share/configs/run.toml", "--model.path",
                                            "model", "--data.path", "configs/lost.txt"});
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_THAT(last_line(outcome.err),
              Says("next to the config there is 'share/configs/lost.txt': name that"));
}

// Keys may be set for another run: a path that is not read is not checked.
TEST(ConfigPaths, OneWithoutEffectNeedNotBeThere) {
  const RunBelow folder;
  succeeded(run_program(folder,
                        {"train", "sub/run.toml", "--model.path", "model", "--compile.mode", "off",
                         "--compile.plan", "lost.json", "--pipeline.schedule_file", "lost.csv"}));
  succeeded(run_program(folder, {"inspect", "--contract", "sub/run.toml", "--model.path", "model",
                                 "--data.path", "lost.txt", "--validation.path", "lost.txt"}));
}

TEST(ConfigPaths, ArgumentsSayWhereTheyWereLookedFor) {
  const RunBelow folder;
  const std::string here = "in the working folder '" + folder.path().string() + "'";
  for (const Words& words :
       {Words{"train", "lost.toml"}, Words{"plan", "lost.toml"}, Words{"inspect", "lost"},
        Words{"inspect", "--contract", "lost.toml"}, Words{"convert", "lost", "out"},
        Words{"plan", "sub/run.toml", "--model.path", "model", "--check", "lost.json"},
        Words{"generate", "--model", "lost", "--prompt", "x", "--max-new-tokens", "1"},
        Words{"gradients", "--model", "model", "--batch", "lost.safetensors", "--out", "o"}}) {
    EXPECT_THAT(run_program(folder, words), Exits(2, here)) << words[0];
  }
  const auto absolute = run_program(folder, {"train", "/lost/run.toml"});
  EXPECT_THAT(absolute.err, AllOf(StartsWith("tessera: io: CONFIG.toml: cannot open"),
                                  Not(Says("working folder"))));
}

}  // namespace
}  // namespace tessera::cli::config_paths_test
