// Settings that are no part of the sums change no bit, in layouts of tensor and expert parallelism:
// when memory is resharded, and over which wire addends travel.
//
// Other layouts do not have the same bits: a product's result for one row depends on how many rows
// it has (1e-6 in the logits between experts whole and spread over ranks).
//
// In ./test --all a third of the layouts for each family, all of them under `scripts/full golden`.

#include "golden/degrees.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::golden::same_order_test {
namespace {

class SameOrder : public ::testing::TestWithParam<std::string> {
 protected:
  Gradients run(const Degrees& degrees, Layout layout = {}) const {
    layout.ranks = degrees.ranks();
    layout.replicas = degrees.replicate;
    auto config = config_for(GetParam(), degrees);
    config.parallelism.reshard_after_forward = layout.reshard_after_forward;
    return run_gradients(config, layout, Reference::of(GetParam()).batches());
  }
  /// Nothing changed; each layout of a family once.
  const Gradients& plain(const Degrees& degrees) const {
    static std::map<std::pair<std::string, std::string>, Gradients> kept;
    const std::pair key{GetParam(), to_string(degrees)};
    auto found = kept.find(key);
    if (found == kept.end()) found = kept.emplace(key, run(degrees)).first;
    return found->second;
  }
};

const std::vector<std::string> kFamilies{"qwen3-moe-fp32", "gpt-oss-fp32", "deepseek-v2-fp32",
                                         "gemma4-fp32"};

std::vector<Degrees> layouts_of(const std::string& family) {
  const std::vector<Degrees> all{{.tp = 2},
                                 {.tp = 2, .sequence = false},
                                 {.tp = 2, .etp = 2},
                                 {.shard = 2, .ep = 2},
                                 {.tp = 2, .ep = 2},
                                 {.tp = 2, .ep = 2, .router = RouterTokens::kAll},
                                 {.shard = 2, .tp = 2, .ep = 2},
                                 {.shard = 2, .tp = 2, .ep = 2, .etp = 2},
                                 {.shard = 2, .tp = 2, .ep = 4}};
  return test::in_turn(all, 3, kFamilies, family);
}

TEST_P(SameOrder, ReshardingAfterForwardChangesNoBit) {
  for (const Degrees& degrees : layouts_of(GetParam())) {
    SCOPED_TRACE(to_string(degrees));
    expect_same_bits(run(degrees, {.reshard_after_forward = false}), plain(degrees));
  }
}

TEST_P(SameOrder, TheWireIsNotPartOfTheSum) {
  for (const Degrees& degrees : layouts_of(GetParam())) {
    SCOPED_TRACE(to_string(degrees));
    expect_same_bits(run(degrees, {.backend = ThreadBackend::kGloo}), plain(degrees));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, SameOrder, ::testing::ValuesIn(kFamilies), folder_name);

}  // namespace
}  // namespace tessera::golden::same_order_test
