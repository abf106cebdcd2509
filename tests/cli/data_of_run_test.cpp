// The data of a run, and how much of it is read: sources, masks, validation, as a user gives them.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <sstream>

#include "cli/program.h"
#include "io/label_index.h"
#include "io/safetensors.h"
#include "support/test.h"
#include "train/data/data_identity.h"
#include "train/data/sampler.h"

namespace tessera::cli::data_of_run_test {
namespace {

using Words = std::vector<std::string>;

std::vector<nlohmann::json> metrics_of(const std::filesystem::path& run) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(read_file(run / "metrics/metrics.jsonl"));
  for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

/// Every step's value of that name, in order; NaN for null.
std::vector<double> values(const std::filesystem::path& run, const std::string& name) {
  std::vector<double> found;
  for (const auto& line : metrics_of(run)) {
    if (!line.contains(name)) continue;
    found.push_back(line[name].is_null() ? NAN : line[name].get<double>());
  }
  return found;
}

std::string last_line_of(const std::string& text) {
  std::istringstream lines(text);
  std::string last;
  for (std::string line; std::getline(lines, line);) last = line;
  return last;
}

class DataOfRun : public ::testing::Test {
 protected:
  Outcome train(const std::string& run, const Words& more) {
    return run_program(folder_, joined({"train", "run.toml", "--job.dump_folder", run}, more));
  }
  void trained(const std::string& run, const Words& more) { succeeded(train(run, more)); }

  /// NAME.bin of tokens i * factor % 256 and NAME.json.
  void write_tokens(const std::string& name, std::int64_t count, int factor) {
    std::vector<std::uint16_t> tokens;
    for (std::int64_t i = 0; i < count; ++i) {
      tokens.push_back(static_cast<std::uint16_t>(i * factor % 256));
    }
    folder_.write(name + ".bin", {reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size()});
    write_description(name, count);
  }
  void write_description(const std::string& name, std::int64_t count) {
    folder_.write(name + ".json", R"({"dtype":"uint16","vocab_size":260,"num_tokens":)" +
                                      std::to_string(count) + "}");
  }

  SmallRun folder_;
};

/// Bytes of a file that the system has read: its pages in memory.
std::int64_t bytes_read(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const auto size = std::filesystem::file_size(path);
  void* const mapping = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident((size + page - 1) / page);
  EXPECT_EQ(::mincore(mapping, size, resident.data()), 0);
  ::munmap(mapping, size);
  ::close(file);
  const auto pages =
      std::ranges::count_if(resident, [](unsigned char there) { return (there & 1U) != 0; });
  return pages * static_cast<std::int64_t>(page);
}

/// From here on only what is read again is in memory.
void forget_pages(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ::fsync(file);
  EXPECT_EQ(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
  ::close(file);
}

// 2 GB of tokens and 1 GB of mask that are never read, but for the rows of three steps, the index
// and the samples by which a checkpoint knows its data again. The one row with labels is in the
// first step: the others are left out.
TEST_F(DataOfRun, ABillionTokensCostNoMoreThanTheirRowsAndTheirIndex) {
  constexpr std::int64_t kTokens = 1'000'000'000;
  constexpr std::int64_t kRow = 17;
  const auto tokens = folder_.write("big.bin", "");
  std::filesystem::resize_file(tokens, 2 * kTokens);
  write_description("big", kTokens);
  const auto mask = folder_.write("big.mask.bin", "");
  std::filesystem::resize_file(mask, kTokens);
  const train::RowOrder order(42, kTokens / kRow, 4);
  const std::int64_t begin = order.data_row(1, 2) * kRow;
  {
    std::fstream file(mask, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(begin).write("\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1", kRow);
  }
  constexpr std::int64_t kBlock = LabelIndex::kBlockTokens;
  std::vector<std::uint64_t> index{kTokens};
  for (std::int64_t end = kBlock; end < kTokens + kBlock; end += kBlock) {
    index.push_back(static_cast<std::uint64_t>(std::clamp<std::int64_t>(end - begin, 0, kRow)));
  }
  folder_.write("big.labels.bin", {reinterpret_cast<const char*>(index.data()), 8 * index.size()});
  forget_pages(tokens);
  forget_pages(mask);
  ASSERT_EQ(bytes_read(tokens) + bytes_read(mask), 0);
  const auto page = ::sysconf(_SC_PAGESIZE);
  // A row is on two pages at most; of the mask besides three blocks to see that the index fits, and
  // those in which the first row with a label lies, on two pages at most, too.
  const auto rows = 12 * 2 * page;
  const auto blocks = (3 + 2) * (kBlock + page);
  ASSERT_NO_FATAL_FAILURE(
      trained("rows", {"--data.path", "big.bin", "--nproc", "2", "--checkpoint.enable", "false"}));
  EXPECT_LE(bytes_read(tokens), rows);
  EXPECT_GT(bytes_read(tokens), 0);
  EXPECT_LE(bytes_read(mask), rows + blocks);

  forget_pages(tokens);
  forget_pages(mask);
  ASSERT_EQ(bytes_read(tokens) + bytes_read(mask), 0);
  ASSERT_NO_FATAL_FAILURE(trained("run", {"--data.path", "big.bin", "--nproc", "2"}));
  // A sample is on a page, the last one on two; the system reads on behind the first.
  const auto samples = (train::kSamples + 1) * page + (std::int64_t{128} << 10);
  EXPECT_LE(bytes_read(tokens), rows + samples);
  EXPECT_LE(bytes_read(mask), rows + blocks + samples);
  const auto losses = values(folder_ / "run", "loss");
  ASSERT_EQ(losses.size(), 3U);
  EXPECT_NEAR(losses[0], std::log(260.0), 0.2);
  EXPECT_TRUE(std::isnan(losses[1]) && std::isnan(losses[2]));
  EXPECT_EQ(values(folder_ / "run", "steps_without_labels"), (std::vector<double>{1, 2}));
}

TEST_F(DataOfRun, AnIdOutsideTheVocabularyEndsTheRunWhereItIsRead) {
  write_tokens("ids", 17 * 12, 1);
  auto bytes = read_file(folder_ / "ids.bin");
  bytes[2 * 150] = '\xFF';
  bytes[2 * 150 + 1] = '\x01';  // 511
  folder_.write("ids.bin", bytes);
  const Outcome outcome = train("run", {"--data.path", "ids.bin", "--nproc", "2"});
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_THAT(last_line_of(outcome.err), Says("ids.bin: found the token id 511 at position 150"));
  // Which of the three steps has that row the seed says: those before were done.
  std::int64_t step = 1;
  const train::RowOrder order(42, 12, 4);
  for (std::int64_t i = 0; i < 12; ++i) {
    if (order.data_row(i / 4 + 1, i % 4) == 150 / 17) step = i / 4 + 1;
  }
  EXPECT_EQ(std::ssize(values(folder_ / "run", "loss")), step - 1);
}

// Rows with and without labels by turns, one a step: the steps without are left out on any number
// of ranks, and change nothing.
TEST_F(DataOfRun, StepsWithoutALabelAreLeftOutAndCounted) {
  write_tokens("half", 17 * 8, 3);
  std::string mask;
  for (int row = 0; row < 8; ++row) mask.append(17, row % 2 == 0 ? '\1' : '\0');
  folder_.write("half.mask.bin", mask);
  const Words common{"--data.path",      "half.bin", "--training.global_batch_size", "1",
                     "--training.steps", "8",        "--checkpoint.interval",        "3",
                     "--optimizer.lr",   "0.008",    "--lr_scheduler.warmup_steps",  "8"};
  ASSERT_NO_FATAL_FAILURE(trained("one", common));
  EXPECT_EQ(std::filesystem::file_size(folder_ / "half.labels.bin"), 16U) << "made once";
  const auto losses = values(folder_ / "one", "loss");
  ASSERT_EQ(losses.size(), 8U);
  EXPECT_EQ(std::ranges::count_if(losses, [](double loss) { return std::isnan(loss); }), 4);
  EXPECT_EQ(values(folder_ / "one", "steps_without_labels").back(), 4);
  // The warm-up waits for them: the k-th update has the k-th learning rate.
  const auto rates = values(folder_ / "one", "lr");
  ASSERT_EQ(rates.size(), 8U);
  int update = 1;
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_DOUBLE_EQ(rates[i], 0.008 * update / 8) << i + 1;
    if (!std::isnan(losses[i])) ++update;
  }
  for (const char* speed : {"tps", "tps_global", "tflops"}) {
    const auto speeds = values(folder_ / "one", speed);
    ASSERT_EQ(speeds.size(), 8U);
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(std::isnan(speeds[i]), std::isnan(losses[i])) << speed << i + 1;
    }
  }

  // With AdamW an update of a zero gradient would still decay and move. The count continues.
  Words parts = common;
  parts[5] = "5";
  ASSERT_NO_FATAL_FAILURE(trained("parts", parts));
  parts[5] = "8";
  ASSERT_NO_FATAL_FAILURE(trained("parts", parts));
  const auto resumed = values(folder_ / "parts", "loss");
  ASSERT_EQ(resumed.size(), 8U);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(std::isnan(resumed[i]), std::isnan(losses[i]));
    if (std::isnan(losses[i])) continue;
    EXPECT_EQ(resumed[i], losses[i]) << i + 1;
  }
  EXPECT_EQ(values(folder_ / "parts", "steps_without_labels").back(), 4);
  EXPECT_EQ(values(folder_ / "parts", "lr"), rates);
}

// Naive: the path that the config had, of data that was changed where it lies or only moved.
TEST_F(DataOfRun, ARefusedResumptionSaysWhatDiffersInTheData) {
  Words words{"--training.steps", "1"};
  ASSERT_NO_FATAL_FAILURE(trained("run", words));
  words[1] = "2";
  const auto page = read_file(folder_ / "page.txt");
  std::mt19937 random(5);
  const auto place = [&] { return 100 + random() % (page.size() - 100); };  // a row at least
  const auto refused = [&](const std::string& text, const std::string& name,
                           const std::string& says) {
    std::filesystem::remove(folder_ / "page.txt");
    folder_.write(name, text);
    Words with = words;
    with.insert(with.end(), {"--data.path", name});
    EXPECT_THAT(train("run", with), Exits(2, says, concat(name, "'"), "start a new run"));
  };
  const auto cut = place(), more = place();
  refused(page.substr(0, cut), "page.txt", concat("data.path: found ", cut, " bytes in '"));
  refused(page + std::string(more, 'x'), "other.txt",
          concat("data.path: found ", page.size() + more, " bytes in '"));
  auto changed = page;
  changed[place()] ^= 1;
  refused(changed, "page.txt",
          concat("data.path: found other content in the ", page.size(), " bytes of '"));
  folder_.write("moved.txt", page);
  words.insert(words.end(), {"--data.path", "moved.txt"});
  ASSERT_NO_FATAL_FAILURE(trained("run", words));
}

TEST_F(DataOfRun, ARunWithoutALabelIsRefused) {
  write_tokens("none", 17 * 8, 3);
  folder_.write("none.mask.bin", std::string(17 * 8, '\0'));
  EXPECT_THAT(train("run", {"--data.path", "none.bin", "--nproc", "2"}),
              Exits(2, "data.path: ", "no unmasked target in the rows"));
  folder_.write("none.labels.bin", "torn");
  EXPECT_THAT(train("run", {"--data.path", "none.bin", "--nproc", "2"}),
              Exits(2, "none.labels.bin: found 4 bytes instead of 16"));
}

// Shards of llm.c and text, mixed 3 to 1: the same rows on one rank, on two, and after a resumption
// on another number.
TEST_F(DataOfRun, SeveralSourcesAreDrawnTheSameForAnyReader) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = 17 * 9;
  for (const std::string name : {"shard_0.bin", "shard_1.bin"}) {
    std::vector<std::uint16_t> tokens(17 * 9, name == "shard_0.bin" ? 7 : 8);
    folder_.write(name, std::string(reinterpret_cast<const char*>(header.data()), 1024) +
                            std::string(reinterpret_cast<const char*>(tokens.data()), 17 * 9 * 2));
  }
  std::string text = read_file(folder_ / "run.toml");
  text.replace(text.find("path = \"page.txt\""), 17, "");
  text += R"(
[[data.source]]
path = "shard_*.bin"
weight = 3
[[data.source]]
path = ["page.txt"]
)";
  folder_.write("run.toml", text);
  const Words common{"--training.steps", "6", "--checkpoint.interval", "3"};
  ASSERT_NO_FATAL_FAILURE(trained("one", common));
  const auto losses = values(folder_ / "one", "loss");
  ASSERT_EQ(losses.size(), 6U);

  // Rows have as many labels: the loss is the mean of those of the sources by their rows.
  std::vector<double> before{0, 0};
  for (const auto& line : metrics_of(folder_ / "one")) {
    const double rows = 4 * line["step"].get<double>();
    double sum = 0;
    for (std::size_t k = 0; k < 2; ++k) {
      const std::string name = "source/" + std::to_string(k + 1);
      const double so_far = line[name + "/share"].get<double>() * rows;
      const double here = std::round(so_far - std::exchange(before[k], so_far));
      EXPECT_EQ(line[name + "/loss"].is_null(), here == 0);
      if (here > 0) sum += here * line[name + "/loss"].get<double>();
    }
    EXPECT_NEAR(sum / 4, line["loss"].get<double>(), 1e-6);
  }

  Words two = common;
  two.insert(two.end(), {"--nproc", "2"});
  ASSERT_NO_FATAL_FAILURE(trained("two", two));
  Words parts = two;
  parts[1] = "3";
  ASSERT_NO_FATAL_FAILURE(trained("parts", parts));
  ASSERT_NO_FATAL_FAILURE(trained("parts", common));
  for (const std::string name : {"loss", "source/1/loss", "source/2/loss", "source/2/share"}) {
    const auto expected = values(folder_ / "one", name);
    for (const std::string run : {"two", "parts"}) {
      const auto found = values(folder_ / run, name);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        if (std::isnan(expected[i])) {
          EXPECT_TRUE(std::isnan(found[i]));
        } else {
          EXPECT_NEAR(found[i], expected[i], 2e-6) << run << " " << name << " " << i + 1;
        }
      }
    }
  }
  // Other weights are other data.
  text.replace(text.find("weight = 3"), 10, "weight = 4");
  folder_.write("run.toml", text);
  EXPECT_THAT(train("parts", {"--training.steps", "7"}),
              Exits(2, "data.source[1].weight: found 4, expected 3"));
}

TEST_F(DataOfRun, PipelineAndTensorParallelRanksSeeTheLossesOfSources) {
  write_tokens("a", 17 * 9, 1);
  write_tokens("b", 17 * 9, 5);
  std::string text = read_file(folder_ / "run.toml");
  text.replace(text.find("path = \"page.txt\""), 17, "source = [{path='a.bin'}, {path='b.bin'}]");
  folder_.write("run.toml", text);
  std::string model = read_file(folder_ / "model.json");
  model.replace(model.find("\"num_hidden_layers\": 1"), 22, "\"num_hidden_layers\": 2");
  model.replace(model.find("\"num_key_value_heads\": 1"), 24, "\"num_key_value_heads\": 2");
  folder_.write("model.json", model);
  ASSERT_NO_FATAL_FAILURE(trained("one", {}));
  ASSERT_NO_FATAL_FAILURE(trained("tp", {"--parallelism.tensor_parallel_degree", "2"}));
  ASSERT_NO_FATAL_FAILURE(trained("pp", {"--parallelism.pipeline_parallel_degree", "2"}));
  for (const std::string name : {"loss", "source/1/loss", "source/2/loss"}) {
    const auto expected = values(folder_ / "one", name);
    ASSERT_EQ(expected.size(), 3U);
    for (const std::string run : {"tp", "pp"}) {
      const auto found = values(folder_ / run, name);
      ASSERT_EQ(found.size(), 3U);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_NEAR(found[i], expected[i], 1e-5) << run << " " << name;
      }
    }
  }
}

// With the same weights, the loss of a step that has every row of the held-out data once is what
// its validation has to find, in batches of any size.
TEST_F(DataOfRun, AValidationOfAllTakesEachRowOnce) {
  write_tokens("held", 17 * 7 + 5, 3);
  ASSERT_NO_FATAL_FAILURE(trained(
      "whole",
      {"--data.path", "held.bin", "--training.global_batch_size", "7", "--training.steps", "1"}));
  const double expected = values(folder_ / "whole", "loss").front();
  struct Case {
    std::string batch, steps, ranks;
    bool whole;
  };
  int number = 0;
  for (const Case& c :
       {Case{"4", "-1", "1", true}, Case{"2", "-1", "2", true}, Case{"8", "-1", "2", true},
        Case{"4", "100", "1", true}, Case{"4", "1", "1", false}}) {
    const std::string run = "run" + std::to_string(++number);
    const Outcome outcome =
        succeeded(train(run, {"--validation.path", "held.bin", "--validation.steps", c.steps,
                              "--training.global_batch_size", c.batch, "--training.steps", "2",
                              "--nproc", c.ranks}));
    const auto metrics = metrics_of(folder_ / run);
    ASSERT_EQ(metrics.size(), 3U);
    EXPECT_EQ(metrics[0].size(), 2U) << "step and val_loss alone: " << metrics[0];
    EXPECT_EQ(metrics[0]["step"], 0);
    if (c.whole) {
      EXPECT_NEAR(metrics[0]["val_loss"].get<double>(), expected, 1e-6) << run;
    } else {
      EXPECT_GT(std::abs(metrics[0]["val_loss"].get<double>() - expected), 1e-5);
    }
    EXPECT_FALSE(metrics[1].contains("val_loss"));
    EXPECT_TRUE(metrics[2].contains("val_loss")) << "after the last step";
    EXPECT_THAT(outcome.out, StartsWith("step:  0  val_loss: "));
    const bool said = outcome.err.find("validation.steps: found 100, but ") != std::string::npos;
    EXPECT_EQ(said, c.steps == "100") << outcome.err;
  }
}

// Batches that are ready-made have rows of their own, with any data.
TEST_F(DataOfRun, AValidationOfBatchesHasTheirRows) {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 2 * 3 * 24; ++i) ids.push_back(i * 7 % 256);
  const std::vector<std::int64_t> shape{2, 3, 24};
  SafetensorsWriter writer(folder_ / "held.safetensors",
                           {{"input_ids", DType::kInt64, shape}, {"labels", DType::kInt64, shape}});
  for (const std::string name : {"input_ids", "labels"}) {
    writer.write(name, std::as_bytes(std::span(ids)));
  }
  writer.finish();
  const std::string path = (folder_ / "held.safetensors").string();
  // The same weights, in two steps that change nothing.
  std::string text = read_file(folder_ / "run.toml");
  const std::string rows = "seq_len = 16\nglobal_batch_size = 4\n";
  text.replace(text.find(rows), rows.size(), "");
  text.replace(text.find("lr = 0.01"), 9, "lr = 0");
  folder_.write("whole.toml", text);
  const Outcome whole =
      succeeded(run_program(folder_, {"train", "whole.toml", "--job.dump_folder", "whole",
                                      "--data.path", path, "--training.steps", "2"}));
  const auto losses = values(folder_ / "whole", "loss");
  ASSERT_EQ(losses.size(), 2U);
  for (const std::string ranks : {"1", "2"}) {
    const std::string run = "held" + ranks;
    ASSERT_NO_FATAL_FAILURE(
        trained(run, {"--validation.path", path, "--validation.steps", "-1", "--nproc", ranks}));
    EXPECT_NEAR(values(folder_ / run, "val_loss").front(), (losses[0] + losses[1]) / 2, 1e-6);
  }
}

TEST_F(DataOfRun, AResumedRunIsNotValidatedBeforeItsFirstStep) {
  const Words common{"--validation.path", "page.txt", "--validation.steps", "1"};
  ASSERT_NO_FATAL_FAILURE(trained("run", common));
  Words more = common;
  more.insert(more.end(), {"--training.steps", "5"});
  ASSERT_NO_FATAL_FAILURE(trained("run", more));
  std::vector<std::int64_t> validated;
  for (const auto& line : metrics_of(folder_ / "run")) {
    if (line.contains("val_loss")) validated.push_back(line["step"]);
  }
  EXPECT_EQ(validated, (std::vector<std::int64_t>{0, 3, 5}));
}

/// Documents of 8 tokens, drawn.
void write_documents(const TemporaryFolder& folder, std::uint64_t count) {
  std::string tokens, ends;
  std::uint64_t state = 7;
  for (std::uint64_t i = 1; i <= 8 * count; ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const auto token = static_cast<std::uint16_t>((state >> 33) % 256);
    tokens.append(reinterpret_cast<const char*>(&token), 2);
    if (i % 8 == 0) ends.append(reinterpret_cast<const char*>(&i), 8);
  }
  folder.write("talks.bin", tokens);
  folder.write("talks.docs.bin", ends);
  folder.write("talks.json", R"({"dtype":"uint16","vocab_size":260,"num_tokens":)" +
                                 std::to_string(8 * count) + "}");
}

// A step is a pass in either way, so that both train on the same documents; the sums lie in other
// orders. Naive: a document that sees the one in front of it, or positions that continue.
TEST_F(DataOfRun, PackedDocumentsTrainAsTheyDoAlone) {
  write_documents(folder_, 24);
  // Weights so large that what a position sees matters from the first step on.
  std::string model = read_file(folder_ / "model.json");
  const auto small = model.find("0.02");
  ASSERT_NE(small, std::string::npos);
  model.replace(small, 4, "0.3");
  const auto layers = model.find("\"num_hidden_layers\": 1");
  ASSERT_NE(layers, std::string::npos);
  folder_.write("model.json", model.replace(layers, 22, "\"num_hidden_layers\": 2"));
  const Words common{"--data.path", "talks.bin", "--training.steps", "4"};
  const auto with = [&](Words more) {
    more.insert(more.end(), common.begin(), common.end());
    return more;
  };
  const Words packed = with({"--training.seq_len", "15", "--training.global_batch_size", "12"});
  const auto documents = [&](Words more) {
    more.insert(more.end(), packed.begin(), packed.end());
    more.insert(more.end(), {"--data.packing", "documents"});
    return more;
  };
  ASSERT_NO_FATAL_FAILURE(
      trained("alone", with({"--training.seq_len", "7", "--training.global_batch_size", "24"})));
  ASSERT_NO_FATAL_FAILURE(trained("packed", documents({})));
  ASSERT_NO_FATAL_FAILURE(trained("sharded", documents({"--nproc", "2"})));
  ASSERT_NO_FATAL_FAILURE(trained("tp", documents({"--parallelism.tensor_parallel_degree", "2",
                                                   "--parallelism.sequence_parallel", "false"})));
  ASSERT_NO_FATAL_FAILURE(
      trained("stages", documents({"--parallelism.pipeline_parallel_degree", "2"})));
  ASSERT_NO_FATAL_FAILURE(trained("stream", packed));
  const auto alone = values(folder_ / "alone", "loss");
  ASSERT_EQ(alone.size(), 4);
  for (const char* run : {"packed", "sharded", "tp", "stages"}) {
    const auto found = values(folder_ / run, "loss");
    ASSERT_EQ(found.size(), 4);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(found[i], alone[i], 2e-5) << run << " " << i;
  }
  EXPECT_GT(std::abs(values(folder_ / "stream", "loss")[3] - alone[3]), 1e-3);
}

TEST_F(DataOfRun, PackedRowsContinueAfterAResumptionOnOtherRanks) {
  write_documents(folder_, 21);  // the last row is half empty
  const Words common{"--data.path",
                     "talks.bin",
                     "--data.packing",
                     "documents",
                     "--training.seq_len",
                     "15",
                     "--training.global_batch_size",
                     "4",
                     "--checkpoint.interval",
                     "2"};
  const auto with = [&](Words more) {
    more.insert(more.end(), common.begin(), common.end());
    return more;
  };
  ASSERT_NO_FATAL_FAILURE(trained("whole", with({"--training.steps", "6"})));
  ASSERT_NO_FATAL_FAILURE(trained("parts", with({"--training.steps", "2"})));
  ASSERT_NO_FATAL_FAILURE(trained("parts", with({"--training.steps", "6", "--nproc", "2"})));
  const auto whole = values(folder_ / "whole", "loss"), parts = values(folder_ / "parts", "loss");
  ASSERT_EQ(whole.size(), 6);
  ASSERT_EQ(parts.size(), 6);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(parts[i], whole[i], 2e-5) << i;
  // Rows of another kind are other data.
  const Outcome other =
      train("parts", {"--data.path", "talks.bin", "--data.packing", "stream", "--training.seq_len",
                      "15", "--training.global_batch_size", "4", "--training.steps", "8"});
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err,
              Says("data.packing: found 'stream', expected 'documents' of the checkpoint"));
}

TEST_F(DataOfRun, AChangedWeightIsNamedWhereARunContinues) {
  write_tokens("a", 170, 1);
  write_tokens("b", 340, 3);
  const auto with = [](const std::string& weight, const std::string& steps) {
    return Words{"--data.path",      "[]",
                 "--data.source",    "[{path=\"a.bin\"}, {path=\"b.bin\", weight=" + weight + "}]",
                 "--training.steps", steps};
  };
  ASSERT_NO_FATAL_FAILURE(trained("run", with("3", "2")));
  const Outcome other = train("run", with("2", "4"));
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(last_line_of(other.err),
              Says("data.source[2].weight: found 2, expected 3 of the checkpoint"));
  ASSERT_NO_FATAL_FAILURE(trained("run", with("3", "4")));
}

TEST_F(DataOfRun, AValidationWithoutBordersIsReadAsAStreamAndThatIsSaid) {
  write_documents(folder_, 24);
  write_tokens("held", 170, 1);
  const Outcome run =
      succeeded(train("run", {"--data.path", "talks.bin", "--data.packing", "documents",
                              "--validation.path", "held.bin", "--validation.steps", "-1"}));
  EXPECT_THAT(run.err, Says("packing: 24 documents in",
                            "validation: packing: rows are cut out of one stream in ",
                            "held.docs.bin' is not there"));
  EXPECT_EQ(values(folder_ / "run", "val_loss").size(), 2U);
}

TEST_F(DataOfRun, WhatIsWrongWithItIsOneErrorThatNamesIt) {
  write_tokens("a", 170, 1);
  folder_.write("torn.bin", std::string("\x88\xd8\x34\x01", 4));  // a shard's magic alone
  folder_.write("empty.txt", "");
  folder_.write("batches.safetensors", std::string(400, 'x'));
  folder_.write("table.parquet", "PAR1" + std::string(400, 'x'));
  struct Case {
    Words words;
    std::string says;
  };
  const auto sources = [](const std::string& tables) {
    return Words{"--data.path", "[]", "--data.source", tables};
  };
  for (const Case& c :
       {Case{{"--data.path", "none_*.bin"}, "data.path: found no file that matches"},
        Case{{"--data.path", "torn.bin"}, "torn.bin: found 4 bytes of a shard"},
        Case{{"--data.path", "[\"a.bin\", \"absent.bin\"]"}, "absent.bin"},
        Case{sources("[{path=\"a.bin\", weight=0}]"), "data.source[1].weight: found 0"},
        Case{sources("[{path=\"a.bin\"}, {path=\"a.bin\", weight=-2}]"),
             "data.source[2].weight: found -2"},
        Case{sources("[{path=\"empty.txt\"}]"), "no byte of text"},
        Case{sources("[{path=[]}]"), "data.source[1].path: found nothing"},
        Case{sources("[{paths=\"a.bin\"}]"), "the nearest is \"path\""},
        Case{sources("[{path=\"none?\"}]"), "data.source[1].path: found no file that matches"},
        // Not read as text, whose bytes a model from scratch would take.
        Case{sources("[{path=\"batches*\"}]"), "batches.safetensors, batches that are ready-made"},
        Case{{"--data.source", "[{path=\"a.bin\"}]"}, "data.path and data.source: found both"},
        Case{{"--validation.path", "held/*.txt"}, "validation.path: found no file that matches"},
        Case{{"--data.path", "table.parquet"}, "table.parquet': found a parquet file"},
        Case{{"--validation.steps", "0"}, "validation.steps: found 0"}}) {
    const Outcome outcome = train("run", c.words);
    EXPECT_EQ(outcome.code, 2) << c.says << "\n" << outcome.err;
    EXPECT_THAT(last_line_of(outcome.err), Says(c.says));
  }
}

}  // namespace
}  // namespace tessera::cli::data_of_run_test
