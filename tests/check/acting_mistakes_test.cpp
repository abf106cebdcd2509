// Each kind of mistake acts and changes what it is about: a run with it is another one.
#include <algorithm>
#include <map>
#include <mutex>

#include "check/mistaken_run.h"
#include "proof.h"
#include "support/test.h"
#include "train/dry/dry_step.h"
#include "train/trainer.h"

namespace tessera::mistakes::acting_mistakes_test {
namespace {

using train::SeenRun;

/// The first thing in which a run is another one; empty where none is.
std::string difference(const SeenRun& right, const SeenRun& wrong) {
  if (!wrong.refused.empty()) return "refused: " + wrong.refused;
  for (std::size_t i = 0; i < right.steps.size(); ++i) {
    const train::SeenStep &a = right.steps[i], &b = wrong.steps[i];
    if (a.kept != b.kept) return "labels";
    for (std::size_t rank = 0; rank < a.ranks.size(); ++rank) {
      const auto &seen = a.ranks[rank].transitions, &other = b.ranks[rank].transitions;
      for (std::size_t t = 0; t < std::min(seen.size(), other.size()); ++t) {
        if (seen[t].made == other[t].made) continue;
        return concat("the ", seen[t].kind, " of ", seen[t].where,
                      seen[t].is_forward ? ", forward" : ", backward");
      }
      if (a.ranks[rank].biases != b.ranks[rank].biases) return "biases of experts";
    }
    if (a.loss != b.loss) return "loss";
    if (a.auxiliary != b.auxiliary) return "auxiliary loss";
    for (const auto& [name, gradient] : a.gradients) {
      if (!(b.gradients.at(name) == gradient)) return "gradient of " + name;
    }
    if (a.norm != b.norm) return "norm";
  }
  return "";
}

/// The first rank whose dry step is another one.
std::string difference_of_dry_steps(const MistakenRun& run, int& acted) {
  for (int rank = 0; rank < run.ranks(); ++rank) {
    const auto step = [&] {
      return train::dry_step(run.config(), run.source(), rank, run.ranks(),
                             {.dtypes = train::WatchDtypes::kYes});
    };
    const train::DryStep right = step();
    const Injection injection(run.mistake().changes);
    try {
      const train::DryStep wrong = step();
      acted += injection.acted();
      if (!(wrong.contract == right.contract)) return concat("contract on rank ", rank);
      if (wrong.peak != right.peak) return concat("bytes on rank ", rank);
      if (wrong.dtypes.size() != right.dtypes.size()) return concat("dtypes on rank ", rank);
    } catch (const std::exception& error) {
      acted += injection.acted();
      return concat("refused: ", error.what());
    }
  }
  return "";
}

/// The tensors of each rank after two steps, by their names and the rank's.
std::map<std::string, at::Tensor> after_training(const MistakenRun& run) {
  std::map<std::string, at::Tensor> held;
  std::mutex mutex;
  train::Config config = run.config();
  config.metrics.trace_steps.clear();
  train::on_ranks(run.ranks(), [&](World& world) {
    train::TrainingHooks hooks;
    hooks.after_step = [&](const train::StepMetrics& metrics, const ShardedBase& model) {
      if (metrics.step != config.training.steps) return;
      const std::lock_guard lock(mutex);
      for (const ShardView& view : model.shards()) {
        held[concat(view.contract->name, " on rank ", world.rank())] = view.shard.clone();
      }
    };
    train::run_training(config, world, hooks);
  });
  return held;
}

std::string difference_of_training(const MistakenRun& run, int& acted) {
  const auto right = after_training(run);
  const Injection injection(run.mistake().changes);
  const auto wrong = after_training(run);
  acted = injection.acted();
  for (const auto& [name, values] : right) {
    if (!at::equal(values, wrong.at(name))) return name;
  }
  return "";
}

std::string difference_by(const MistakenRun& run, int& acted) {
  const Kind kind = run.mistake().kind;
  if (finder_of(kind) == Finder::kGuard) return difference_of_training(run, acted);
  const bool is_of_dtypes = kind == Kind::kReduceNarrower || kind == Kind::kAccumulateNarrower ||
                            kind == Kind::kMissingCast || kind == Kind::kStateNarrower;
  if (is_of_dtypes) return difference_of_dry_steps(run, acted);
  const SeenRun right = train::run_small(run.ground().run);
  const Injection injection(run.mistake().changes);
  const SeenRun wrong = train::run_small(run.ground().run);
  acted = injection.acted();
  return difference(right, wrong);
}

TEST(Mistakes, OfEachKindActAndMakeAnotherRun) {
  const std::uint32_t draws = test::full_proof() ? 10 : 1;
  const bool shows = base::environment_switch("TESSERA_MISTAKES_SHOW");
  std::uint32_t seed = 1;
  for (const KindOfMistake& kind : kinds()) {
    for (std::uint32_t draw = 0; draw < draws; ++draw) {
      constexpr int kTries = 40;
      int acted = 0;
      for (int i = 0; i < kTries && acted == 0; ++i, ++seed) {
        const auto run = MistakenRun::draw(kind.kind, seed);
        if (run == nullptr) continue;
        SCOPED_TRACE(concat(kind.name, ", seed ", seed, ": ", run->mistake().place));
        const std::string found = difference_by(*run, acted);
        if (acted == 0) continue;
        EXPECT_NE(found, "") << "a run with it is the right one; " << run->layout();
        if (shows) {
          std::cout << kind.name << " (" << seed << "), " << run->mistake().place << ": "
                    << found.substr(0, 200) << std::endl;
        }
      }
      EXPECT_GT(acted, 0) << kind.name << ": no place was found up to seed " << seed;
    }
  }
}

}  // namespace
}  // namespace tessera::mistakes::acting_mistakes_test
