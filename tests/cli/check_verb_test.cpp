// `tessera check` as a user runs it: exit codes, its JSON compared with its text, and its refusals.
//
// TESSERA_CHECK_FROM and TESSERA_CHECK_DRAWS choose drawn layouts and edits.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "cli/draws.h"
#include "cli/program.h"

namespace tessera::cli::check_verb_test {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

Words check(const Words& more) { return joined({"check", "run.toml"}, more); }

std::size_t below(std::mt19937& random, std::size_t count) { return random() % count; }

std::int64_t most_of(const json& report) {
  std::int64_t most = 0;
  for (const json& place : report.at("places")) {
    most = std::max(most, place.at("peak_bytes").get<std::int64_t>());
  }
  return most;
}

const Words kOfTwoStages{"--world",
                         "8",
                         "--parallelism.tensor_parallel_degree",
                         "2",
                         "--parallelism.pipeline_parallel_degree",
                         "2",
                         "--training.global_batch_size",
                         "16",
                         "--training.local_batch_size",
                         "1"};

/// A model of two layers, for two stages of some megabytes.
class TwoLayers : public SmallRun {
 public:
  TwoLayers() {
    auto model = json::parse(read_file(*this / "model.json"));
    model.update({{"num_hidden_layers", 2},
                  {"num_key_value_heads", 2},
                  {"hidden_size", 64},
                  {"intermediate_size", 2048}});
    write("model.json", model.dump());
  }
};

// Property: the program says the same in both forms, and its exit code follows from the findings.
TEST(CheckVerb, JsonSaysWhatTheTextSays) {
  const TwoLayers folder;
  for (const Words& memory : {Words{}, Words{"--device-memory", "2MB", "--machine", "h100"}}) {
    const Words words = joined(check(kOfTwoStages), memory);
    const Outcome text = run_program(folder, words);
    const Outcome as_json = run_program(folder, joined(words, {"--json"}));
    EXPECT_THAT(text, Exits(memory.empty() ? 0 : 3));
    EXPECT_EQ(as_json.code, text.code);
    const json report = json::parse(as_json.out);
    const auto& findings = report.at("findings");
    EXPECT_EQ(std::ssize(findings),
              std::ranges::count_if(report.at("places"), [&](const json& place) {
                return !memory.empty() && place.at("peak_bytes") > report.at("memory_bytes");
              }));
    EXPECT_EQ(report.at("world_size"), 8);
    EXPECT_THAT(
        text.out,
        Says(concat("'model.json' on 8 ranks: ", count_text(std::ssize(findings), "finding"),
                    "\n  ", report.at("layout").get<std::string>(), "\n")));
    for (const json& finding : findings) {
      EXPECT_EQ(finding.at("kind"), "memory");
      EXPECT_THAT(text.out, Says("\n" + finding.at("text").get<std::string>() + "\n"));
    }
    for (const json& line : report.at("compared")) {
      EXPECT_THAT(text.out, Says("\n  " + line.get<std::string>() + "\n"));
    }
    for (const json& place : report.at("places")) {
      for (const auto& [what, bytes] : place.at("held_bytes").items()) {
        if (bytes == 0) continue;
        EXPECT_THAT(text.out, Says("\n  " + what, size_text(bytes.get<std::int64_t>())));
      }
      for (const json& sent : place.at("sent_bytes")) {
        if (sent.at("bytes") == 0) continue;
        EXPECT_THAT(text.out, Says(concat(sent.at("axis").get<std::string>(), "  ",
                                          sent.at("what").get<std::string>()),
                                   size_text(sent.at("bytes").get<std::int64_t>())));
      }
    }
    EXPECT_EQ(report.at("step_time").is_null(), memory.empty());
    EXPECT_EQ(report.at("memory_bytes").is_null(), memory.empty());
  }
}

// The border is the byte at which a rank fits.
TEST(CheckVerb, ARankFitsToTheByte) {
  const TwoLayers folder;
  const auto report =
      json::parse(succeeded(run_program(folder, joined(check(kOfTwoStages), {"--json"}))).out);
  const std::int64_t most = most_of(report);
  const auto with = [&](std::int64_t bytes) {
    folder.write("mine.toml", concat("name = \"mine\"\nsource = \"measured\"\nmemory = ", bytes));
    return run_program(folder, joined(check(kOfTwoStages), {"--machine", "mine.toml"}));
  };
  EXPECT_THAT(succeeded(with(most)).out, Says("0 findings", "\nfits: "));
  const Outcome lacks = with(most - 1);
  EXPECT_EQ(lacks.code, 3);
  EXPECT_THAT(lacks.out, Says("1 finding", "\nmemory: a step of rank ", "\ndoes not fit: "));
}

TEST(CheckVerb, BadInputIsRefusedByItsName) {
  const SmallRun folder;
  const auto refuses = [&](const Words& words, const auto&... texts) {
    EXPECT_THAT(run_program(folder, check(words)), Exits(2, texts...))
        << ::testing::PrintToString(words);
  };
  for (const char* world : {"0", "-1", "two", "1.5", "", "1048577", "1e3"}) {
    refuses({"--world", world}, "--world");
  }
  for (const char* memory : {"lots", "-80GiB", "80XB", "", "nan", "inf", "80 GiB GiB", "0"}) {
    refuses({"--device-memory", memory}, "--device-memory");
  }
  refuses({"--world", "3", "--parallelism.tensor_parallel_degree", "2"}, "3", "2");
  refuses({"--world", "3", "--parallelism.tensor_parallel_degree", "3"}, "tensor_parallel_degree");
  refuses({"--world", "4", "--parallelism.pipeline_parallel_degree", "4"}, "pipeline.split");
  refuses({"--world", "2", "--parallelism.expert_parallel_degree", "2"}, "expert_parallel_degree");
  refuses({"--world", "3"}, "global_batch_size");
  refuses({"--parallelism.tensor_paralel_degree", "2"}, "tensor_paralel_degree", "nearest");
  refuses({"--training.seq_len", "long"}, "training.seq_len");
  refuses({"--ranks", "4"}, "--ranks");
  refuses({"--nproc", "4"}, "--nproc");
  refuses({"--flops", "1e12"}, "--flops", "--bandwidth");
  refuses({"--machine", "h1000"}, "--machine", "h1000");
  refuses({"--machine", "page.txt"}, "page.txt");
  folder.write("machine.toml", "name = \"mine\"\nsource = \"measured\"\nmemory = \"much\"\n");
  refuses({"--machine", "machine.toml"}, "machine.toml:3:", "memory", "much");
  refuses({"--contract.lock", "/tmp"}, "contract.lock: ", "'/tmp'", "folder");
  refuses({"--contract.lock", "absent.lock"}, "contract.lock: ", "absent.lock");
  refuses({"--training.seq_len", "15", "--parallelism.tensor_parallel_degree", "2", "--world", "2"},
          "training.seq_len: found rows of 15 tokens", "tensor_parallel_degree = 2");
  refuses({"--model.config", TESSERA_TEST_DATA "/llama4-text-fp32/config.json",
           "--training.seq_len", "1000000"},
          "training.seq_len: found rows of 1000000 tokens", "125000 chunks", "at most 65536");
  // Refuses by the configuration alone, as train does.
  refuses({"--data.path", ""}, "data.path");
  refuses({"--data.path", "[]"}, "data.path: found nothing");
  refuses({"--lr_scheduler.decay", "wsd"}, "lr_scheduler.decay_steps");
  refuses({"--checkpoint.folder", "../elsewhere"}, "checkpoint.folder");
  EXPECT_THAT(run_program(folder, {"check"}), Exits(2, "CONFIG.toml"));
  EXPECT_THAT(run_program(folder, {"check", "absent.toml"}), Exits(2, "absent.toml"));
  EXPECT_THAT(run_program(folder, {"check", "page.txt"}), Exits(2, "page.txt:1:"));
  folder.write("typo.toml", read_file(folder / "run.toml") + "[metrics]\nlog_frequency = 2\n");
  EXPECT_THAT(run_program(folder, {"check", "typo.toml"}),
              Exits(2, "typo.toml:14:", "log_frequency"));
}

// Property: a file that cannot be written is refused before anything is read, and where the work
// fails the file is as it was, and nothing is next to it.
TEST(CheckVerb, OutputsAreTriedFirst) {
  const TemporaryFolder folder;
  folder.write("old", "as it was\n");
  const std::vector<std::pair<Words, std::string>> verbs{
      {{"check", "absent.toml"}, "--html"},
      {{"inspect", "--contract", "absent.toml"}, "--lock"},
      {{"schedule", "absent.csv"}, "--csv"},
      {{"schedule", "absent.csv"}, "--svg"},
      {{"schedule", "absent.csv"}, "--trace"},
      {{"measure", "--nproc", "1", "--device", "cpu"}, "--out"}};
  for (const auto& [words, option] : verbs) {
    for (const char* file : {"missing/x", ".", "old/x", ""}) {
      EXPECT_THAT(run_program(folder, joined(words, {option, file})), Exits(2, option))
          << words.front() << " " << file;
    }
    if (words.front() == "measure") continue;  // its work does not fail
    EXPECT_THAT(run_program(folder, joined(words, {option, "old"})), Exits(2, "absent."));
    EXPECT_EQ(read_file(folder / "old"), "as it was\n");
  }
  folder.write("run.toml", "[model]\n");
  EXPECT_THAT(run_program(folder, {"check", "run.toml", "--html", "run.toml"}),
              Exits(2, "--html", "'run.toml'"));
  EXPECT_THAT(run_program(folder, {"inspect", "--contract", "run.toml", "--lock", "run.toml"}),
              Exits(2, "--lock", "'run.toml'"));
  EXPECT_EQ(read_file(folder / "run.toml"), "[model]\n");
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    left.push_back(entry.path().filename());
  }
  EXPECT_THAT(left, ::testing::UnorderedElementsAre("old", "run.toml", "stdout.txt", "stderr.txt"));
}

// Property: a layout is refused exactly where its degrees do not divide the ranks, the heads or the
// rows, or are more than there are layers or micro-batches; any other has no finding.
TEST(CheckVerb, DrawnDegreesAreRefusedWhereTheyDoNotDivide) {
  const TwoLayers folder;
  constexpr std::array kDegrees{1, 1, 2, 2, 3, 4};
  each_draw(16, [&](std::mt19937& random) {
    const auto degree = [&] { return kDegrees.at(below(random, kDegrees.size())); };
    const int tp = degree(), pp = degree(), replicas = degree();
    const int ranks = below(random, 3) == 0 ? 1 + static_cast<int>(below(random, 24))
                                            : tp * pp * replicas * degree();
    const int data = std::max(1, ranks / (tp * pp));
    const int rows = below(random, 4) == 0 ? 6 : 12 * data;
    const bool divides = ranks % (tp * pp * replicas) == 0 && rows % data == 0;
    // Embedding and head may have stages of their own; 1F1B has a micro-batch a stage at least.
    const bool fits = divides && tp <= 2 && pp <= 4 && rows / data >= pp;
    const Words words = check(
        {"--world", std::to_string(ranks), "--parallelism.tensor_parallel_degree",
         std::to_string(tp), "--parallelism.pipeline_parallel_degree", std::to_string(pp),
         "--parallelism.data_parallel_replicate_degree", std::to_string(replicas),
         "--training.local_batch_size", "1", "--training.global_batch_size", std::to_string(rows)});
    SCOPED_TRACE(::testing::PrintToString(words));
    const Outcome outcome = run_program(folder, words);
    EXPECT_EQ(outcome.code, fits ? 0 : 2) << outcome.out << outcome.err;
    EXPECT_THAT(fits ? outcome.out : outcome.err, Says(fits ? ": 0 findings\n" : ": found "));
  });
}

// Property: a file of which a character was changed always has an answer: a report, or
// the file's line, the key or the section that is wrong.
TEST(CheckVerb, EditedFilesAreReadOrRefused) {
  const SmallRun folder;
  succeeded(run_program(
      folder, {"inspect", "--contract", "run.toml", "--world", "2", "--lock", "run.lock"}));
  const std::string toml = read_file(folder / "run.toml") + "[contract]\nlock = \"edited.lock\"\n";
  const std::string lock = read_file(folder / "run.lock");
  folder.write("edited.toml", toml);
  folder.write("edited.lock", lock);
  succeeded(run_program(folder, {"check", "edited.toml", "--world", "2"}));
  each_draw(12, [&](std::mt19937& random) {
    constexpr std::string_view kCharacters = "[]\"=.-_#01e \n\t\\x\xff";
    const bool is_lock = below(random, 2) == 0;
    std::string text = is_lock ? lock : toml;
    const std::size_t at = below(random, text.size());
    const char character = kCharacters.at(below(random, kCharacters.size()));
    if (below(random, 2) == 0) {
      text[at] = character;
    } else {
      text.erase(at, 1 + below(random, 8));
    }
    folder.write("edited.lock", is_lock ? text : lock);
    folder.write("edited.toml", is_lock ? toml : text);
    const Outcome outcome = run_program(folder, {"check", "edited.toml", "--world", "2"});
    SCOPED_TRACE(text);
    const bool is_same = is_lock && text == lock;
    if (is_lock) EXPECT_EQ(outcome.code, is_same ? 0 : 2) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.code, ::testing::AnyOf(0, 2)) << outcome.out << outcome.err;
    if (outcome.code == 2) EXPECT_THAT(outcome.err, Says("tessera: "));
    if (outcome.code == 2 && is_lock) EXPECT_THAT(outcome.err, Says("edited.lock", "found"));
  });
}

}  // namespace
}  // namespace tessera::cli::check_verb_test
