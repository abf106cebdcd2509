// Values at a unit's border: which may cross it, and which are refused by name.

#include "dist/body.h"
#include "dist/data_layout.h"
#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::fsdp_border_test {
namespace {

constexpr std::int64_t kWidth = Body::kWidth;

std::shared_ptr<Body> with_first(const Body::Run& run) {
  return std::make_shared<Body>(run, seeded(2, {kWidth, kWidth}), seeded(1, {kWidth}));
}

ShardOptions named_block(bool reshard_after_forward) {
  ShardOptions options;
  options.name = "block";
  options.reshard_after_forward = reshard_after_forward;
  return options;
}

class UnitBorder : public ::testing::TestWithParam<DataLayout> {
 protected:
  using Act = std::function<void(Sharded<Body>& unit)>;
  /// Returns what each rank is told when it acts.
  static std::vector<std::string> told(const Body::Run& run, const ShardOptions& options,
                                       const Act& act) {
    const auto layout = GetParam();
    std::vector<std::string> all(static_cast<std::size_t>(layout.ranks));
    RankBarrier meeting(layout.ranks);
    ranks(layout).run([&](World& world) {
      RankBarrier::Seat seat(meeting);
      auto unit = fully_shard(with_first(run), data_mesh(world, layout.replicas), {}, options);
      all[static_cast<std::size_t>(world.rank())] = thrown_by([&] { act(unit); });
      seat.wait();
      if (world.size() > 1) world.recover();
    });
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Layouts, UnitBorder,
                         ::testing::Values(DataLayout{1, 1}, DataLayout{2, 1}, DataLayout{2, 2}),
                         name_of);

at::Tensor elsewhere() {
  return at::ones({kWidth}, at::TensorOptions().device(at::kMeta)).requires_grad_();
}

// Autograd would run the markers of one unit in two threads at a time.
TEST_P(UnitBorder, RefusesAnArgumentOfAnotherDeviceByItsNumber) {
  const auto first = [](Body& b, const Several& in) -> Several { return {in[0] * b.first}; };
  const auto all = told(first, named_block(true), [](auto& unit) {
    unit.forward({here(at::ones({kWidth})).requires_grad_(), elsewhere()});
  });
  EXPECT_THAT(all, all_and_one(Says("unit block: found argument 1", "on meta",
                                    "expected " + place().device)));
}

TEST_P(UnitBorder, RefusesAResultOfAnotherDeviceByItsNumber) {
  const auto both = [](Body& b, const Several& in) -> Several {
    return {in[0] * b.first, elsewhere() * 2.0};
  };
  const auto all = told(both, named_block(true), [](auto& unit) {
    unit.forward({here(at::ones({kWidth})).requires_grad_()});
  });
  EXPECT_THAT(all, all_and_one(Says("unit block: found result 1", "on meta",
                                    "expected " + place().device)));
}

// Naive: libtorch names two devices, and not whose tensor is on which.
TEST_P(UnitBorder, RefusesWhatAModelIsGivenOnTheHostWhereItIsElsewhere) {
  const auto first = [](Body& b, const Several& in) -> Several { return {in[0] * b.first}; };
  for (const bool grad : {true, false}) {
    const auto told_of = [&](const at::Tensor& given) {
      return told(first, named_block(true), [&](auto& unit) {
        const at::AutoGradMode mode(grad);
        unit.forward({here(at::ones({kWidth})), given});
      });
    };
    EXPECT_THAT(told_of(at::ones({})), Each(std::string())) << "a number is an argument of kernels";
    if (place().device == "cpu") {
      EXPECT_THAT(told_of(at::ones({kWidth})), Each(std::string()));
      continue;
    }
    EXPECT_THAT(told_of(at::ones({kWidth})), all_and_one(Says("unit block: found argument 1 on cpu",
                                                              "expected " + place().device)));
  }
}

// An input without a gradient has no node of autograd.
TEST_P(UnitBorder, TakesWhatNeedsNoGradientFromAnyDevice) {
  const auto both = [](Body& b, const Several& in) -> Several {
    return {in[0] * b.first, in[1] * 2.0};
  };
  const auto all = told(both, named_block(true), [](auto& unit) {
    const auto x = here(at::ones({kWidth})).requires_grad_();
    const auto results = unit.forward({x, elsewhere().detach()});
    EXPECT_EQ(results[1].device(), at::Device(at::kMeta));
    backward(results[0].sum());
    const at::NoGradGuard no_grad;
    unit.forward({x, elsewhere()});
  });
  EXPECT_THAT(all, Each(std::string()));
}

// Naive: the caller reads memory that was freed, and is told to call the module by its handle.
TEST_P(UnitBorder, RefusesAParameterAsAResultByItsName) {
  const std::vector<std::pair<std::string, Body::Run>> cases = {
      {"itself", [](Body& b, const Several& in) -> Several { return {in[0] * 2.0, b.weight}; }},
      {"detached",
       [](Body& b, const Several& in) -> Several { return {in[0] * 2.0, b.weight.detach()}; }},
      {"a view", [](Body& b, const Several& in) -> Several { return {in[0] * 2.0, b.weight.t()}; }},
      {"a part",
       [](Body& b, const Several& in) -> Several { return {in[0] * 2.0, b.weight[kWidth - 1]}; }},
  };
  const std::vector<Act> acts = {
      [](auto& unit) { unit.forward({here(at::ones({kWidth})).requires_grad_()}); },
      [](auto& unit) {
        const at::NoGradGuard no_grad;
        unit.forward({here(at::ones({kWidth}))});
      }};
  for (const auto& [what, run] : cases) {
    for (const auto& act : acts) {
      EXPECT_THAT(told(run, named_block(true), act),
                  all_and_one(Says("unit block: found its parameter block.weight itself",
                                   "as result 1", "return a clone()")))
          << what;
    }
  }
  // A unit that stays unsharded in training is resharded after evaluation.
  EXPECT_THAT(told(cases[0].second, named_block(false), acts[1]),
              all_and_one(Says("unit block: found its parameter block.weight")));
}

TEST_P(UnitBorder, AParameterIsAResultOfAUnitThatKeepsItsMemory) {
  const auto whole = [](Body& b, const Several&) -> Several { return {b.first}; };
  const auto all = told(whole, named_block(false), [](auto& unit) {
    const auto result = unit.forward({here(at::ones({kWidth}))})[0];
    EXPECT_TRUE(same_bits(result, seeded(1, {kWidth})));
    backward(squares(result));
    unit.visit_full_gradients([](const std::string& name, const at::Tensor& gradient) {
      if (name != "block.first") return;
      EXPECT_TRUE(same_bits(gradient, seeded(1, {kWidth}) * 2.0));
    });
  });
  EXPECT_THAT(all, Each(std::string()));
}

}  // namespace
}  // namespace tessera::test::fsdp_border_test
