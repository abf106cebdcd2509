// `tessera gradients` under tensor, expert and data parallelism against transformers: every
// parameter's gradient by name, in every layout that the family's sizes divide; the others are
// refused with their rule.
//
// Thread ranks; processes are tests/cli's. The class of bug: a gradient that is summed twice over an
// axis, or not at all, is off by a factor of the axis' size or by what the other ranks had, and the
// bounds are 5e-5.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "unit/io/temporary_folder.h"

namespace tessera::golden {
namespace {

struct Degrees {
  int replicate = 1;
  int shard = 1;
  int tp = 1;
  int ep = 1;
  int etp = 1;
  bool sequence = true;
  models::RouterTokens router = models::RouterTokens::kShards;
  int ranks() const { return replicate * shard * tp; }
};

std::string to_string(const Degrees& d) {
  return concat("dp_replicate ", d.replicate, ", dp_shard ", d.shard, ", tp ", d.tp, ", ep ", d.ep,
                ", etp ", d.etp, d.sequence ? ", sequence shards" : ", whole sequence",
                d.router == models::RouterTokens::kAll ? ", router on all tokens" : "");
}

/// All of 1, 2 and 4 ranks that can be: forms of one layout (sequence, router) only where they
/// differ.
std::vector<Degrees> degrees_of(bool has_experts) {
  std::vector<Degrees> all;
  for (const int ranks : {1, 2, 4}) {
    for (int tp = 1; tp <= ranks; tp *= 2) {
      for (int replicate = 1; replicate * tp <= ranks; replicate *= 2) {
        const int shard = ranks / tp / replicate;
        for (int ep = 1; ep <= shard * tp; ep *= 2) {
          for (const int etp : {1, tp}) {
            if (etp == tp && tp > 1 && ep > shard) continue;
            if (!has_experts && (ep > 1 || etp > 1)) continue;
            if (etp == tp && tp == 1 && etp != 1) continue;
            for (const bool sequence : {true, false}) {
              for (const auto router :
                   {models::RouterTokens::kShards, models::RouterTokens::kAll}) {
                if (tp == 1 && (!sequence || router == models::RouterTokens::kAll)) continue;
                if ((etp > 1 || !has_experts) && router == models::RouterTokens::kAll) continue;
                all.push_back({replicate, shard, tp, ep, etp, sequence, router});
              }
            }
            if (tp == 1) break;  // etp 1 is tp
          }
        }
      }
    }
  }
  return all;
}

train::Config config_of(const std::string& folder, const Degrees& d) {
  auto config = config_for({.ranks = d.ranks(), .replicas = d.replicate});
  auto& parallelism = config.parallelism;
  parallelism.data_parallel_shard_degree = d.shard;
  parallelism.tensor_parallel_degree = d.tp;
  parallelism.expert_parallel_degree = d.ep;
  parallelism.expert_tensor_parallel_degree = d.etp;
  parallelism.sequence_parallel = d.sequence;
  parallelism.moe_router = d.router;
  config.model.path = data_folder(folder);
  return config;
}

class GoldenParallel : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  bool has_experts() const {
    for (const auto& [name, gradient] : reference().gradients()) {
      if (name.find(".experts.") != std::string::npos) return true;
    }
    return false;
  }
  void expect_within_bounds(const Gradients& found) const {
    EXPECT_NEAR(found.loss, reference().result("loss").item<double>(), kLossBound);
    const auto logits = reference().result("logits");
    ASSERT_EQ(found.logits.sizes(), logits.sizes());
    EXPECT_LT((found.logits - logits).abs().max().item<double>(),
              reference().logits_bound());
    ASSERT_EQ(found.by_name.size(), reference().gradients().size());
    for (const auto& [name, expected] : reference().gradients()) {
      ASSERT_TRUE(found.by_name.contains(name)) << name;
      EXPECT_LT(relative_error(found.by_name.at(name), expected), kGradientBound) << name;
    }
  }
};

TEST_P(GoldenParallel, EveryGradientIsTransformersInEveryLayout) {
  for (const Degrees& d : degrees_of(has_experts())) {
    SCOPED_TRACE(to_string(d));
    const Layout layout{.ranks = d.ranks(), .replicas = d.replicate};
    expect_within_bounds(run_gradients(config_of(GetParam(), d), layout, reference().batches()));
  }
}

std::vector<std::string> folders() {
  std::vector<std::string> all(kFolders);
  all.insert(all.end(), kMoeFolders.begin(), kMoeFolders.end());
  all.insert(all.end(), kDeepseekFolders.begin(), kDeepseekFolders.end());
  all.insert(all.end(), kGemmaFolders.begin(), kGemmaFolders.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenParallel, ::testing::ValuesIn(folders()),
                         [](const auto& each) { return test_name(each.param); });

}  // namespace
}  // namespace tessera::golden
