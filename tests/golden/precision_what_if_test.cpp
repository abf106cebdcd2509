// `gradients --precision-what-if` against gradients that are written to files one run at a time:
// every error that it states is the difference of two such files.
#include "train/precision/precision_what_if.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "models/description.h"
#include "proof.h"
#include "support/quiet_output.h"
#include "support/ranks.h"
#include "support/test.h"
#include "train/contract_of_run.h"

namespace tessera::golden::precision_what_if_test {
namespace {

using train::WhatIfReport;

train::Config config_of(const std::string& folder) {
  train::Config config;
  config.model.path = data_folder(folder);
  return config;
}

/// The report of rank 0, after a check that the others have the same.
WhatIfReport what_if(const train::Config& config, const std::string& folder, double bound,
                     int ranks = 1, Routing routing = Routing::kOwn) {
  const train::WhatIfRequest request{.config = config,
                                     .batch = Reference::of(folder).batches(),
                                     .bound = bound,
                                     .impose_routing = routing == Routing::kImposed};
  std::vector<std::optional<WhatIfReport>> reports(static_cast<std::size_t>(ranks));
  const test::QuietOutput quiet;
  test::ranks(ranks, ThreadBackend::kInProcess).run([&](World& world) {
    at::set_num_threads(1);
    reports[static_cast<std::size_t>(world.rank())] = train::precision_what_if(request, world);
  });
  for (const auto& report : reports) EXPECT_EQ(to_json(*report), to_json(*reports.front()));
  return *reports.front();
}

/// Loss and gradients under these dtypes, out of a file.
Gradients run(const std::string& folder, const std::vector<PrecisionRule>& rules, int ranks = 1,
              Routing routing = Routing::kOwn) {
  const Layout layout{.ranks = ranks};
  auto config = config_of(folder);
  config.precision.rule = rules;
  return run_gradients(config, layout, Reference::of(folder).batches(), routing);
}

PrecisionRule rule(std::vector<std::string> match, DType dtype) {
  PrecisionRule made;
  made.match = std::move(match);
  made.param_dtype = dtype;
  return made;
}

/// Returns errors by the names of the model: a tensor that several of the files are stacked to has
/// one over all of them.
std::map<std::string, double> errors_of(const std::string& folder, const Gradients& found,
                                        const Gradients& expected) {
  std::map<std::string, double> errors;
  const auto spec = train::open_model(config_of(folder).model).spec;
  for (const auto& row : models::describe(spec).parameters) {
    if (!row.tied_to.empty()) continue;
    double difference = 0, reference = 0;
    for (const auto& name : row.stacked.empty() ? std::vector{row.name} : row.stacked) {
      const auto wide = expected.by_name.at(name).to(at::kDouble);
      difference += (found.by_name.at(name).to(at::kDouble) - wide).square().sum().item<double>();
      reference += wide.square().sum().item<double>();
    }
    errors[row.name] = difference == 0 ? 0 : std::sqrt(difference / reference);
  }
  return errors;
}

/// fp64 sums over other parts: equal but for their last digits.
void expect_errors(const WhatIfReport& report, const train::ParameterErrors& stated,
                   const std::map<std::string, double>& direct) {
  ASSERT_EQ(stated.size(), report.names.size());
  for (std::size_t p = 0; p < stated.size(); ++p) {
    ASSERT_TRUE(direct.contains(report.names[p])) << report.names[p];
    const double expected = direct.at(report.names[p]);
    EXPECT_NEAR(stated[p], expected, 1e-9 * (1 + expected)) << report.names[p];
  }
  EXPECT_EQ(stated.size(), direct.size());
}

std::size_t group_named(const WhatIfReport& report, const std::string& name) {
  const auto found = std::ranges::find(report.groups, name, &train::PrecisionGroup::name);
  EXPECT_NE(found, report.groups.end()) << name;
  return static_cast<std::size_t>(found - report.groups.begin());
}

class GoldenWhatIf : public ::testing::TestWithParam<std::string> {};

// Property: what is stated of all bfloat16, of one group in bfloat16 and of one in float32 is what
// files of gradients differ by, and so is the loss; for several ways to share the batch.
TEST_P(GoldenWhatIf, StatedErrorsAreThoseOfFilesOfGradients) {
  const std::string folder = GetParam();
  for (const int ranks : {1, 3}) {
    SCOPED_TRACE(concat(ranks, " ranks"));
    const auto report = what_if(config_of(folder), folder, 1.0, ranks);
    const auto wide = run(folder, {rule({"*"}, DType::kFloat32)}, ranks);
    const auto narrow = run(folder, {rule({"*"}, DType::kBFloat16)}, ranks);
    expect_errors(report, report.narrow.errors, errors_of(folder, narrow, wide));
    // Files hold the loss in fp32.
    EXPECT_NEAR(report.narrow.loss_error, std::abs(narrow.loss - wide.loss) / wide.loss, 3e-7);
    const std::size_t norms = group_named(report, "norms");
    const auto& match = report.groups[norms].match;
    const auto alone =
        run(folder, {rule({"*"}, DType::kFloat32), rule(match, DType::kBFloat16)}, ranks);
    expect_errors(report, report.narrowed[norms].errors, errors_of(folder, alone, wide));
    const auto others =
        run(folder, {rule({"*"}, DType::kBFloat16), rule(match, DType::kFloat32)}, ranks);
    expect_errors(report, report.widened[norms].errors, errors_of(folder, others, wide));
  }
}

// Property: groups share out what can be narrowed, and the patterns of each match its parameters
// and nothing of another group.
TEST_P(GoldenWhatIf, PatternsMatchTheirGroupAlone) {
  const std::string folder = GetParam();
  const auto source = train::open_model(config_of(folder).model);
  const auto dims = train::resolve_parallelism({}, 1);
  const auto contract_of = [&](const std::vector<PrecisionRule>& rules) {
    auto config = config_of(folder);
    config.precision.rule = rules;
    return train::resolve_model(source, config, dims).parameters;
  };
  const auto wide = contract_of({rule({"*"}, DType::kFloat32)});
  const auto narrow = contract_of({rule({"*"}, DType::kBFloat16)});
  const auto groups = train::precision_groups(source.description.parameters, wide, narrow);
  EXPECT_GE(groups.size(), 4U);
  std::set<std::size_t> grouped;
  for (const auto& group : groups) {
    const auto one =
        contract_of({rule({"*"}, DType::kFloat32), rule(group.match, DType::kBFloat16)});
    std::vector<std::size_t> changed;
    for (std::size_t p = 0; p < one.size(); ++p) {
      if (one[p].compute != wide[p].compute) changed.push_back(p);
    }
    EXPECT_EQ(changed, group.parameters) << group.name;
    grouped.insert(changed.begin(), changed.end());
  }
  for (std::size_t p = 0; p < wide.size(); ++p) {
    EXPECT_EQ(grouped.contains(p), wide[p].compute != narrow[p].compute) << wide[p].name;
  }
}

// Property: the printed lines, used as a configuration, have the stated errors, and these are
// within the bound; the same on 1 and 2 ranks except for the wire, which one rank does not have.
// Activations count in a policy's cost, and a rank of two has half: the bound is one that policies
// of nearly the same cost do not meet.
TEST_P(GoldenWhatIf, PrintedPolicyHasTheErrorsThatAreStated) {
  const std::string folder = GetParam();
  constexpr double kBound = 0.0235;
  std::optional<WhatIfReport> on_one;
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(concat(ranks, " ranks"));
    const auto report = what_if(config_of(folder), folder, kBound, ranks, Routing::kImposed);
    auto config = config_of(folder);
    const std::string lines = policy_lines(report.precision);
    config.precision = train::parse_config(lines, "printed").precision;
    EXPECT_EQ(config.precision, report.precision) << lines;
    EXPECT_NE(to_text(report).find(lines), std::string::npos);
    const auto& batches = Reference::of(folder).batches();
    const auto found = run_gradients(config, {.ranks = ranks}, batches, Routing::kImposed);
    const auto wide = run(folder, {rule({"*"}, DType::kFloat32)}, ranks, Routing::kImposed);
    const auto errors = errors_of(folder, found, wide);
    expect_errors(report, report.verified.errors, errors);
    for (const auto& [name, error] : errors) EXPECT_LE(error, kBound) << name;
    EXPECT_TRUE(report.is_within_bound());
    EXPECT_EQ(report.wire.has_value(), ranks > 1);
    if (!on_one) on_one = report;
    EXPECT_EQ(report.found.wide, on_one->found.wide);
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenWhatIf,
                         ::testing::Values("llama-fp32", "qwen3-mixed", "gpt2-fp32",
                                           "qwen3-moe-fp32", "deepseek-v3-mixed"),
                         folder_name);

// Stages have different parameters, a tied embedding at both ends.
TEST(GoldenWhatIfLayouts, PipelinesAndTensorParallelRanksFindThePolicyOfOneRank) {
  const std::string folder = "llama-fp32";
  auto config = config_of(folder);
  config.training.local_batch_size = 1;
  const auto on_one = what_if(config, folder, 0.02);
  EXPECT_GT(std::ranges::count(on_one.found.wide, true), 0);
  auto pipeline = config;
  pipeline.parallelism.pipeline_parallel_degree = 2;
  auto tensor = config;
  tensor.parallelism.tensor_parallel_degree = 2;
  for (const auto& layout : {pipeline, tensor}) {
    const auto report = what_if(layout, folder, 0.02, 2);
    EXPECT_EQ(report.found.wide, on_one.found.wide);
    ASSERT_EQ(report.names, on_one.names);
    for (std::size_t p = 0; p < report.names.size(); ++p) {
      // Roundings differ where sums over tp are formed in another way.
      EXPECT_NEAR(report.narrow.errors[p], on_one.narrow.errors[p], 0.5 * on_one.narrow.errors[p])
          << report.names[p];
    }
  }
}

TEST(GoldenWhatIfBounds, OnlyFloat32IsWithinABoundThatNothingElseMeets) {
  const auto report = what_if(config_of("llama-fp32"), "llama-fp32", 1e-5);
  EXPECT_TRUE(report.found.is_all_wide());
  EXPECT_EQ(policy_lines(report.precision),
            "[precision]\nparam_dtype = \"float32\"\nreduce_dtype = \"float32\"\n");
  EXPECT_EQ(std::ranges::max(report.verified.errors), 0);
  EXPECT_NE(to_text(report).find("no policy of these groups is within 1e-05 but float32"),
            std::string::npos);
}

// A gradient that float32 knows no better than the bound is not held to it.
TEST(GoldenWhatIfBounds, GradientsThatAreNoiseInFloat32AreNamedAndNotHeld) {
  const auto report = what_if(config_of("llama-fp32"), "llama-fp32", 1e-8);
  const auto held = train::held_parameters(report.table, 1e-8);
  const auto lost = std::ranges::find(held, false) - held.begin();
  ASSERT_LT(lost, std::ssize(held));
  const auto& name = report.names[static_cast<std::size_t>(lost)];
  EXPECT_NE(to_text(report).find(name + " is not held to the bound"), std::string::npos);
}

// Both ways of adding give the same gradient, rounded apart: neither nothing nor more than fp32's
// noise.
TEST(GoldenWhatIfNoise, SumsInAnotherOrderMoveGradientsByRoundingsOfFloat32) {
  for (const auto& folder : {"llama-fp32", "qwen3-moe-fp32", "gemma4-fp32"}) {
    SCOPED_TRACE(folder);
    const auto report = what_if(config_of(folder), folder, 1.0);
    EXPECT_GT(std::ranges::max(report.table.wide_noise), 0);
    EXPECT_LT(std::ranges::max(report.table.wide_noise), 1e-5);
  }
}

// Naive: choices that change look like roundings of the experts.
TEST(GoldenWhatIfExperts, ChoicesThatDifferAreCountedUnlessTheyAreImposed) {
  const std::string folder = "qwen3-moe-fp32";
  const auto own = what_if(config_of(folder), folder, 1.0);
  EXPECT_EQ(own.choices, 4 * 48 * 3);  // layers, tokens, experts a token
  EXPECT_GT(own.narrow.moved_choices, 0);
  const auto imposed = what_if(config_of(folder), folder, 1.0, 1, Routing::kImposed);
  EXPECT_EQ(imposed.narrow.moved_choices, 0);
  EXPECT_LT(std::ranges::max(imposed.narrow.errors), std::ranges::max(own.narrow.errors));
}

TEST(GoldenWhatIfCost, BytesAreThoseOfTheContracts) {
  const auto report = what_if(config_of("llama-fp32"), "llama-fp32", 0.02);
  std::int64_t wide_numel = 0, numel = 0;
  for (std::size_t g = 0; g < report.groups.size(); ++g) {
    numel += report.groups[g].numel;
    if (report.found.wide[g]) wide_numel += report.groups[g].numel;
  }
  EXPECT_EQ(numel, 47392);
  EXPECT_EQ(report.wide_cost.unsharded_bytes, 4 * numel);
  EXPECT_EQ(report.narrow_cost.unsharded_bytes, 2 * numel);
  EXPECT_EQ(report.found_cost.unsharded_bytes, 2 * numel + 2 * wide_numel);
  EXPECT_LT(report.narrow_cost.activation_bytes, report.wide_cost.activation_bytes);
}

TEST(GoldenWhatIfErrors, WhatDrawsOrReplaysIsRefused) {
  auto replay = config_of("llama-fp32");
  replay.compile.mode = train::CompileChoice::kReplay;
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { what_if(replay, "llama-fp32", 1.0); }),
              ::testing::HasSubstr("compile.mode: found replay"));
  auto drops = config_of("llama-fp32");
  drops.lora = {.rank = 2, .targets = {"q_proj"}, .dropout = 0.5};
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { what_if(drops, "llama-fp32", 1.0); }),
              ::testing::HasSubstr("lora.dropout: found 0.5"));
}

}  // namespace
}  // namespace tessera::golden::precision_what_if_test
