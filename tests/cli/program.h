// Runs the program as a user does: a command in a folder, its exit code and what it printed.
#pragma once

#include <sys/wait.h>

#include <cstdlib>

#include "support/temporary_folder.h"

namespace tessera::cli {

struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
};

inline void PrintTo(const Outcome& outcome, std::ostream* out) {
  *out << "exit code " << outcome.code << "\n" << outcome.out << outcome.err;
}

/// Matches an Outcome with this code that says all of the texts on standard error.
template <class... Texts>
auto Exits(int code, const Texts&... texts) {
  return AllOf(::testing::Field("code", &Outcome::code, code),
               ::testing::Field("err", &Outcome::err, Says(texts...)));
}

inline Outcome succeeded(Outcome outcome,
                         std::source_location caller = std::source_location::current()) {
  const ::testing::ScopedTrace trace(caller.file_name(), static_cast<int>(caller.line()), "");
  EXPECT_THAT(outcome, Exits(0));
  return outcome;
}

/// `environment` stands in front of the command ("RANK=0 WORLD_SIZE=2"). One thread a rank: tests
/// share the machine. The launcher's own variables are cleared. `standard_output` is the shell's
/// redirection; any other leaves `out` empty.
inline Outcome run_program(const TemporaryFolder& folder, const std::vector<std::string>& words,
                           const std::string& environment = "",
                           const std::string& standard_output = "> stdout.txt") {
  std::string command =
      "cd '" + folder.path().string() +
      "' && env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u MASTER_ADDR -u MASTER_PORT "
      "OMP_NUM_THREADS=1 " +
      environment + " timeout 60 '" TESSERA_PROGRAM "'";
  for (const std::string& word : words) command += " '" + word + "'";
  command += " " + standard_output + " 2> stderr.txt < /dev/null";
  const int status = std::system(command.c_str());
  Outcome outcome;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  outcome.out = read_so_far(folder / "stdout.txt");
  outcome.err = read_so_far(folder / "stderr.txt");
  return outcome;
}

/// A folder with a model of one layer, a page of text, and run.toml that trains three steps on it.
class SmallRun : public TemporaryFolder {
 public:
  SmallRun() {
    write("model.json", R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 32, "hidden_act": "silu", "vocab_size": 260,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-06,
    "attention_bias": false, "tie_word_embeddings": false, "initializer_range": 0.02})");
    std::string text;
    for (int line = 0; line < 60; ++line) text += "line " + std::to_string(line) + " of a page.\n";
    write("page.txt", text);
    write("run.toml", R"([model]
config = "model.json"
[data]
path = "page.txt"
[training]
steps = 3
seq_len = 16
global_batch_size = 4
[precision]
param_dtype = "float32"
[optimizer]
lr = 0.01
)");
  }
};

/// Returns `words` and then `more`.
inline std::vector<std::string> joined(std::vector<std::string> words,
                                       const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

}  // namespace tessera::cli
