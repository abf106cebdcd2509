// `tessera gradients --diff` of a golden folder: right layouts differ by rounding, mistakes are named.
#include <ATen/ops/randint.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "check/mistakes.h"
#include "golden/model_folder.h"
#include "io/safetensors.h"
#include "proof.h"
#include "support/temporary_folder.h"
#include "support/test.h"
#include "train/config/config_resolve.h"
#include "train/gradients.h"
#include "train/small/diff_runs.h"

namespace tessera::mistakes::diff_test {
namespace {

/// A drawn layout of a golden folder, and a batch of two rows a data rank.
class Sides {
 public:
  explicit Sides(const Drawn& layout)
      : layout_(layout),
        config_(config_of(folder_, layout)),
        batch_(folder_ / "batch.safetensors") {
    config_.model.config.clear();
    config_.model.path = golden::data_folder(layout.family + "-fp32");
    config_.lora = {};
    config_.activation_checkpoint = {};
    write_batch();
  }

  const train::Config& config() const { return config_; }
  const std::string& batch() const { return batch_; }
  train::DiffSide layout() const { return {"layout", config_}; }
  train::DiffSide one_rank() const {
    train::DiffSide side{"one rank", config_};
    auto& parallelism = side.config.parallelism;
    const bool sequence = parallelism.sequence_parallel;
    parallelism = {};
    parallelism.data_parallel_shard_degree = 1;
    parallelism.sequence_parallel = sequence;
    side.config.pipeline = {};
    return side;
  }

 private:
  void write_batch() const {
    const std::int64_t rows = 2 * layout_.replicate * layout_.shard;
    const std::vector<std::int64_t> shape{rows, layout_.positions};
    SafetensorsWriter writer(
        batch_, {{"input_ids", DType::kInt64, shape}, {"labels", DType::kInt64, shape}});
    for (const char* name : {"input_ids", "labels"}) {
      std::string bytes;
      for (std::int64_t i = 0; i < rows * layout_.positions; ++i) {
        const std::int64_t id = 3 + (i * 37 + i / 5) % 61;
        bytes.append(reinterpret_cast<const char*>(&id), sizeof id);
      }
      writer.write(name, std::as_bytes(std::span(bytes)));
    }
    writer.finish();
  }

  const TemporaryFolder folder_;
  const Drawn layout_;
  train::Config config_;
  const std::string batch_;
};

std::string as_text(const check::GradientDiff& diff) { return to_string(diff); }

/// Layouts as they are drawn, but what a golden folder has no room for.
Drawn drawn_layout(std::uint32_t seed) {
  Drawn layout = train::drawn(seed);
  layout.adapters = Drawn::Adapters::kNone;
  layout.frozen = false;
  layout.muon = layout.as_one = false;
  layout.form = 0;
  return layout;
}

TEST(GradientsDiff, RightLayoutsDifferByRounding) {
  const auto draws = test::environment_number("TESSERA_DIFF_DRAWS", test::full_proof() ? 100 : 8);
  for (std::uint32_t seed = 1; seed <= draws; ++seed) {
    Drawn layout = train::over_cp(drawn_layout(seed), seed);
    layout.dtype = "float32";
    layout.bf16_wire = false;
    std::ostringstream words;
    words << "seed " << seed << ": " << layout;
    SCOPED_TRACE(words.str());
    const Sides sides(layout);
    const auto diff = train::diff_runs(sides.layout(), sides.one_rank(), sides.batch());
    EXPECT_TRUE(diff.is_right()) << as_text(diff);
    EXPECT_FALSE(diff.parameters.empty());
  }
}

/// Kinds that change gradients in float32.
std::vector<Kind> kinds_of_gradients() {
  using enum Kind;
  return {kDroppedSumForward, kDroppedSumBackward, kDoubledSumBackward,    kWrongAxis,
          kBiasOnEveryRank,   kDetachedGather,     kPartialMetWithReduced, kGatheredNotPadded,
          kPartOfNextRank,    kWrongDivideFactor,  kGradientOverwrites,    kGradientPastItsReduce};
}

TEST(GradientsDiff, NamesMistakes) {
  const auto wanted =
      test::environment_number("TESSERA_DIFF_MISTAKES", test::full_proof() ? 40 : 8);
  const auto kinds = kinds_of_gradients();
  std::uint64_t tried = 0, named = 0;
  for (std::uint32_t seed = 1; tried < wanted && seed < 40 * wanted; ++seed) {
    const Kind kind = kinds[seed % kinds.size()];
    Drawn layout = drawn_layout(seed);
    if (!suit(kind, layout)) continue;
    layout.dtype = "float32";
    layout.bf16_wire = false;
    const Sides sides(layout);
    const auto source = train::open_model(sides.config().model, {});
    const auto dims = train::resolve_parallelism(sides.config().parallelism, layout.ranks());
    const auto run = train::run_of_batch(
        sides.config(), source, dims,
        train::open_gradients_batch(sides.batch(), train::vocabulary_of(source.spec, false),
                                    std::nullopt),
        dims.data_ranks());
    std::optional<train::SeenRun> seen;
    const Ground ground{layout, sides.config(), source, run, [&]() -> const train::SeenRun& {
                          if (!seen) seen = train::run_small(run);
                          return *seen;
                        }};
    Draws draws(seed);
    const auto mistake = draw_mistake(kind, draws, ground);
    if (!mistake) continue;
    const Injection injection(mistake->changes);
    const auto diff = train::diff_runs(sides.one_rank(), sides.layout(), sides.batch());
    if (injection.acted() == 0) continue;
    ++tried;
    const bool is_named = std::ranges::any_of(diff.findings, mistake->named_by);
    named += is_named ? 1 : 0;
    if (!is_named) {
      std::cout << of(kind).name << ", seed " << seed << ": " << layout << "\n  " << mistake->place
                << '\n'
                << as_text(diff) << '\n';
    }
    EXPECT_FALSE(diff.is_right()) << of(kind).name << ", seed " << seed << ": " << mistake->place;
  }
  EXPECT_EQ(tried, wanted);
  EXPECT_GE(named * 40, tried * 38);
}

}  // namespace
}  // namespace tessera::mistakes::diff_test
