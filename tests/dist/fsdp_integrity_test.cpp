// Data that is replaced after sharding is found where the parameters become readable next. A shard
// with other memory would be stepped and never gathered, an unsharded tensor would show old values
// for ever.

#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"

namespace tessera::test::fsdp_integrity_test {
namespace {

constexpr std::int64_t kWidth = 5;

class IntegrityOnRanks : public ::testing::TestWithParam<int> {
 protected:
  /// Returns what every rank says when `harm` is done before a forward (kForward) or between a
  /// forward and its backward (kBackward).
  enum class When { kForward, kBackward };
  static void expect_found(When when, const std::function<void(Sharded<Affine>&)>& harm,
                           const std::string& found) {
    const auto errors = errors_of(GetParam(), [&](World& world) {
      auto handle = fully_shard(std::make_shared<Affine>(1, kWidth, 3), data_mesh(world));
      const auto x = input_of(world.rank(), 0, kWidth);
      if (when == When::kForward) {
        backward(squares(handle.forward(x)));
        harm(handle);
        handle.forward(x);
      } else {
        const auto loss = squares(handle.forward(x));
        harm(handle);
        backward(loss);
      }
    });
    // The other ranks may hear of the first one's failure before they see their own.
    EXPECT_THAT(errors, Contains(Says("parameter weight", found, "expected float32", "copy_")));
    EXPECT_THAT(errors, Each(Not("")));
  }
};
INSTANTIATE_TEST_SUITE_P(Counts, IntegrityOnRanks, ::testing::Values(1, 2, 3));

using Handle = Sharded<Affine>;

TEST_P(IntegrityOnRanks, AModuleThatWasConvertedWhileItIsUnshardedIsFound) {
  const auto convert = [](Handle& handle) {
    handle.unshard();
    handle.module()->to(at::kDouble);
  };
  expect_found(When::kForward, convert, "the module's tensor in the dtype Double");
  expect_found(When::kBackward, convert, "the module's tensor in the dtype Double");
}

TEST_P(IntegrityOnRanks, AnUnshardedTensorWithOtherDataIsFound) {
  const auto replace = [](Handle& handle) {
    const at::NoGradGuard no_grad;
    handle.unshard();
    handle.module()->weight.set_data(handle.module()->weight.clone());
  };
  expect_found(When::kForward, replace, "the module's tensor in other memory");
  expect_found(When::kBackward, replace, "the module's tensor in other memory");
}

TEST_P(IntegrityOnRanks, AShardWithOtherDataIsFound) {
  const auto narrowed = [](Handle& handle) {
    auto shard = handle.named_parameters()["weight"];
    shard.set_data(shard.detach().to(at::kBFloat16));
  };
  const auto replaced = [](Handle& handle) {
    auto shard = handle.named_parameters()["weight"];
    shard.set_data(shard.detach().clone());
  };
  for (const auto when : {When::kForward, When::kBackward}) {
    expect_found(when, narrowed, "its shard in the dtype BFloat16");
    expect_found(when, replaced, "its shard in other memory");
  }
}

// Correct uses stay allowed: values are copied in, a present dtype is asked for.
TEST_P_ON_RANKS(IntegrityOnRanks, ValuesThatAreCopiedInAreNotRefused, GetParam()) {
  auto handle = fully_shard(std::make_shared<Affine>(1, kWidth, 3), data_mesh(world));
  handle.unshard();
  handle.module()->to(at::kFloat);
  {
    const at::NoGradGuard no_grad;
    for (const auto& view : handle.shards()) view.shard.detach().fill_(1.0);
  }
  const auto y = handle.forward(here(at::ones({1, kWidth})));
  EXPECT_TRUE(same_bits(y.detach(), here(at::full({1, 3}, 1.0F + kWidth))));
  backward(squares(y));
}

}  // namespace
}  // namespace tessera::test::fsdp_integrity_test
