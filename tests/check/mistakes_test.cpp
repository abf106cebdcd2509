// Seeded mistakes: how many of each kind are found, and by the right name.
//
// Kind, layout and place are drawn by seed. A mistake that never did anything is drawn again.
// Environment: TESSERA_MISTAKES_USE (known, held, all), TESSERA_MISTAKES_KIND (one alone),
// TESSERA_MISTAKES_SEED and TESSERA_MISTAKES_DRAWS; TESSERA_MISTAKES_LIST=FILE lists what was said
// of each.
#include <algorithm>
#include <fstream>
#include <iomanip>
#include <map>
#include <optional>

#include "base/environment.h"
#include "check/mistaken_run.h"
#include "proof.h"
#include "support/test.h"
#include "train/check/check_run.h"
#include "train/report/checks.h"
#include "train/trainer.h"

namespace tessera::mistakes::mistakes_test {
namespace {

using check::Finding;
using check::FindingKind;

std::string text_of(const Finding& finding) { return to_string(finding); }

/// The findings of `tessera check` on the configuration; of one that it refuses, why.
std::vector<Finding> found_by_check(const train::Config& config, const train::ModelSource& source,
                                    int ranks) {
  try {
    return train::check_run(config, source, ranks).report.findings;
  } catch (const Error& error) {
    return {{.kind = FindingKind::kRefused, .found = error.what()}};
  }
}

/// The findings of a run with debug.guard.
std::vector<Finding> found_by_guard(train::Config config, int ranks) {
  config.metrics.trace_steps.clear();
  config.training.steps = 2;
  config.debug.guard = 1;
  try {
    train::on_ranks(ranks, [&](World& world) { train::run_training(config, world); });
  } catch (const train::FoundProblems& error) {
    return {{.kind = FindingKind::kInvariance, .found = error.what()}};
  }
  return {};
}

struct Tried {
  std::uint32_t seed = 0;
  std::string layout, place;
  std::vector<Finding> findings;
  bool is_named = false;
};

/// None where the seed has no place for the kind, or where the mistake did nothing.
std::optional<Tried> tried(Kind kind, std::uint32_t seed) {
  const auto run = MistakenRun::draw(kind, seed);
  if (run == nullptr) return std::nullopt;
  const Mistake& mistake = run->mistake();
  Tried result{.seed = seed, .layout = run->layout(), .place = mistake.place, .findings = {}};
  SCOPED_TRACE(concat(of(kind).name, ", seed ", seed, ": ", result.layout));
  const Injection injection(mistake.changes);
  result.findings = finder_of(kind) == Finder::kGuard
                        ? found_by_guard(run->config(), run->ranks())
                        : found_by_check(run->config(), run->source(), run->ranks());
  if (injection.acted() == 0) return std::nullopt;
  result.is_named = std::ranges::any_of(result.findings, mistake.named_by);
  return result;
}

struct Count {
  int drawn = 0, caught = 0, named = 0;
  void add(const Tried& one) {
    ++drawn;
    caught += one.findings.empty() ? 0 : 1;
    named += one.is_named ? 1 : 0;
  }
};

std::vector<KindOfMistake> kinds_of_this_run() {
  const std::string use = base::environment_variable("TESSERA_MISTAKES_USE").value_or("all");
  const auto name = base::environment_variable("TESSERA_MISTAKES_KIND");
  std::vector<KindOfMistake> chosen;
  for (const KindOfMistake& one : kinds()) {
    const bool of_use = use == "all" || (use == "known") == (one.use == Use::kKnown);
    if (name ? one.name == *name : of_use) chosen.push_back(one);
  }
  return chosen;
}

void print(std::ostream& out, const KindOfMistake& kind, const Tried& one) {
  const auto* how = one.findings.empty() ? "not caught: " : "not named: ";
  out << (one.is_named ? "named: " : how) << kind.name << ", seed " << one.seed
      << "\n  layout: " << one.layout << "\n  place: " << one.place << '\n';
  constexpr std::size_t kShown = 6;
  for (std::size_t i = 0; i < std::min(kShown, one.findings.size()); ++i) {
    out << "  " << text_of(one.findings[i]) << '\n';
  }
  if (one.findings.size() > kShown) out << "  ... of " << one.findings.size() << '\n';
}

void print_row(std::string_view name, const Count& count) {
  std::cout << std::left << std::setw(28) << name << std::right << std::setw(6) << count.drawn
            << std::setw(7) << count.caught << std::setw(6) << count.named << '\n';
}

TEST(Mistakes, AreFoundByTheirNames) {
  const auto chosen = kinds_of_this_run();
  ASSERT_FALSE(chosen.empty());
  auto seed = static_cast<std::uint32_t>(test::environment_number("TESSERA_MISTAKES_SEED", 1));
  const auto draws = static_cast<std::size_t>(
      test::environment_number("TESSERA_MISTAKES_DRAWS", test::full_proof() ? 200 : 40));
  std::ofstream listed(base::environment_variable("TESSERA_MISTAKES_LIST").value_or("/dev/null"));
  std::map<std::string_view, Count> by_kind;
  std::map<Use, Count> by_use;
  for (std::size_t draw = 0; draw < draws; ++draw) {
    const KindOfMistake& kind = chosen[draw % chosen.size()];
    constexpr int kTries = 40;
    std::optional<Tried> one;
    for (int i = 0; i < kTries && !one; ++i) one = tried(kind.kind, seed++);
    if (!one) {
      ADD_FAILURE() << "no place was found for " << kind.name << " up to seed " << seed;
      continue;
    }
    by_kind[kind.name].add(*one);
    by_use[kind.use].add(*one);
    if (!one->is_named) print(std::cout, kind, *one);
    print(listed, kind, *one);
    listed.flush();
  }
  std::cout << std::left << std::setw(28) << "kind" << " drawn caught named\n";
  for (const KindOfMistake& kind : chosen) print_row(kind.name, by_kind[kind.name]);
  print_row("known", by_use[Use::kKnown]);
  print_row("held back", by_use[Use::kHeldBack]);
  EXPECT_GE(by_use[Use::kKnown].named, 0.95 * by_use[Use::kKnown].drawn);
  EXPECT_GE(by_use[Use::kHeldBack].named, 0.85 * by_use[Use::kHeldBack].drawn);
}

}  // namespace
}  // namespace tessera::mistakes::mistakes_test
