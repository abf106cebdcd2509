// Rows that do not divide over the ranks of tensor parallelism: with sequence shards every rank
// says the same one thing, before the first step; without them they run.

#include <cstring>
#include <sstream>

#include "cli/program.h"
#include "io/safetensors.h"
#include "support/test.h"

namespace tessera::cli::sequence_shards_test {
namespace {

using Words = std::vector<std::string>;

constexpr const char* kFolder = TESSERA_TEST_DATA "/qwen3-moe-fp32";
constexpr std::int64_t kPositions = 23;
const Words kTwoRanks{"--nproc", "2", "--parallelism.tensor_parallel_degree", "2"};
const Words kWholeSequence{"--parallelism.sequence_parallel", "false"};

/// The reference's batch as odd.safetensors, a position shorter.
void write_odd_batch(const TemporaryFolder& folder) {
  const SafetensorsFile whole(std::filesystem::path(kFolder) / "reference.safetensors");
  const std::vector<TensorSpec> specs{{"input_ids", DType::kInt64, {2, kPositions}},
                                      {"labels", DType::kInt64, {2, kPositions}}};
  SafetensorsWriter writer(folder / "odd.safetensors", specs);
  for (const TensorSpec& spec : specs) {
    const auto bytes = whole.bytes(spec.name);
    const std::size_t row = bytes.size() / 2;
    const std::size_t kept = sizeof(std::int64_t) * kPositions;
    std::vector<std::byte> shorter(2 * kept);
    std::memcpy(shorter.data(), bytes.data(), kept);
    std::memcpy(shorter.data() + kept, bytes.data() + row, kept);
    writer.write(spec.name, shorter);
  }
  writer.finish();
}

void expect_one_refusal(const Outcome& outcome, const std::string& positions) {
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  const std::string error =
      "training.seq_len: found rows of " + positions +
      " tokens, expected a multiple of tensor_parallel_degree = 2, whose ranks share them out; "
      "change either, or set parallelism.sequence_parallel = false";
  std::istringstream lines(outcome.err);
  std::string last;
  for (std::string line; std::getline(lines, line); last = line) {
    if (line.find(" info ") != std::string::npos) continue;
    EXPECT_TRUE(line == "rank 0: " + error || line == "rank 1: " + error) << line;
  }
  EXPECT_THAT(last, Says(error)) << "it stands last";
}

TEST(SequenceShards, GradientsOfRowsThatTheyCannotShareAreRefused) {
  const TemporaryFolder folder;
  write_odd_batch(folder);
  const auto words = joined(
      {"gradients", "--model", kFolder, "--batch", "odd.safetensors", "--out", "o.safetensors"},
      kTwoRanks);
  expect_one_refusal(run_program(folder, words), std::to_string(kPositions));
  EXPECT_FALSE(std::filesystem::exists(folder / "o.safetensors"));
  succeeded(run_program(folder, joined(words, kWholeSequence)));
}

TEST(SequenceShards, TrainingOnRowsThatTheyCannotShareIsRefusedBeforeTheFirstStep) {
  const SmallRun folder;
  const auto words = joined(
      {"train", "run.toml", "--training.seq_len", "17", "--job.dump_folder", "run"}, kTwoRanks);
  expect_one_refusal(run_program(folder, words), "17");
  EXPECT_FALSE(std::filesystem::exists(folder / "run/metrics/metrics.jsonl"));
  succeeded(run_program(folder, joined(words, kWholeSequence)));
}

}  // namespace
}  // namespace tessera::cli::sequence_shards_test
