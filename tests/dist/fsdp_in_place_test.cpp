// [Note: in-place changes]: across a unit's border, in a module and by its caller.
#include <c10/core/InferenceMode.h>

#include "dist/body.h"
#include "dist/data_layout.h"
#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::fsdp_in_place_test {
namespace {

constexpr std::int64_t kWidth = Body::kWidth;

/// A module, and a caller that makes a loss of it; x is no leaf.
struct InPlace {
  std::string what;
  Body::Run run;
  std::function<at::Tensor(const std::function<Several(const Several&)>& unit, const Body& body,
                           const at::Tensor& x)>
      loss;
};

Several product(Body& body, const Several& inputs) { return {inputs[0] * body.weight}; }

class InPlaceChanges : public ::testing::TestWithParam<DataLayout> {
 protected:
  /// Returns what the ranks are told. The next step after it is the plain module's.
  static std::vector<std::string> refusals_of(const InPlace& one) {
    const auto layout = GetParam();
    std::vector<std::string> told(static_cast<std::size_t>(layout.ranks));
    RankBarrier meeting(layout.ranks);
    ranks(layout).run([&](World& world) {
      RankBarrier::Seat seat(meeting);
      ShardOptions options;
      options.name = "block";
      auto body = std::make_shared<Body>(one.run);
      auto handle = fully_shard(body, data_mesh(world, layout.replicas), {}, options);
      seat.wait();  // the first refusal ends what others are still at
      const auto unit = [&](const Several& inputs) { return handle.forward(inputs); };
      const auto input = [](int rank) { return input_of(rank, 0, kWidth).requires_grad_(); };
      told[static_cast<std::size_t>(world.rank())] =
          thrown_by([&] { backward(one.loss(unit, *body, input(world.rank()) * 1.0)); });
      seat.wait();
      if (world.size() > 1) world.recover();
      body->become(product);
      backward(squares(handle.forward({input(world.rank())})[0]));
      Body plain(product);
      const auto expected = plain_gradients(plain, world.size(), world.size(), [&](int rank) {
        backward(squares(plain.forward({input(rank)})[0]));
      });
      EXPECT_TRUE(
          at::allclose(whole_gradients(handle).at("block.weight"), expected.at("weight"), 1e-6))
          << one.what;
    });
    return told;
  }
  static void expect_refusal(const InPlace& one, const std::string& tensor) {
    EXPECT_THAT(refusals_of(one), all_and_one(Says("unit block", tensor))) << one.what;
  }
};
INSTANTIATE_TEST_SUITE_P(Layouts, InPlaceChanges, every_data_layout(), name_of);

// Naive: `x + block(x)` has the right loss, and of x a gradient as if the block had not changed it.
TEST_P(InPlaceChanges, OfAnArgumentAreRefusedByItsNumber) {
  const auto add = [](const auto& unit, const Body&, const at::Tensor& x) {
    return squares(x + unit({x})[0]);
  };
  const std::vector<InPlace> cases = {
      {"itself", [](Body& b, const Several& in) -> Several { return {in[0].relu_() * b.weight}; },
       add},
      {"a view of it",
       [](Body& b, const Several& in) -> Several {
         in[0].narrow(1, 0, 2).mul_(2.0);
         return {in[0] * b.weight};
       },
       add},
      {"without grad mode",
       [](Body& b, const Several& in) -> Several {
         {
           const at::NoGradGuard no_grad;
           in[0].mul_(2.0);
         }
         return {in[0] + b.weight};
       },
       add},
      {"in the recomputation",
       [](Body& b, const Several& in) -> Several { return {in[0].relu_() + b.weight}; },
       [](const auto& unit, const Body&, const at::Tensor& x) {
         const auto y = checkpoint(
             [&unit](const auto& inputs) {
               const auto inside = inputs[0] * 2.0;
               return inside + unit({inside})[0];
             },
             {x});
         return squares(y);
       }},
  };
  for (const auto& one : cases) expect_refusal(one, "argument 0");
  const InPlace second = {
      "the second",
      [](Body& b, const Several& in) -> Several { return {in[1].relu_() * b.weight}; },
      [](const auto& unit, const Body&, const at::Tensor& x) {
        return squares(x + unit({here(at::ones({kWidth})), x})[0]);
      }};
  expect_refusal(second, "argument 1");
}

// Naive: what the caller changes has the new history, and what shares its memory the old one.
TEST_P(InPlaceChanges, OfAResultThatOthersHoldAreRefusedByItsNumber) {
  const auto change = [](std::size_t which) {
    return [which](const auto& unit, const Body& body, const at::Tensor& x) {
      const auto results = unit({x});
      results[which].mul_(2.0);
      at::Tensor loss = squares(x);
      for (const auto& result : results) loss = loss + squares(result);
      return body.kept.defined() ? loss + squares(body.kept) : loss;
    };
  };
  const std::vector<std::pair<std::size_t, InPlace>> cases = {
      {0,
       {"kept by the module",
        [](Body& b, const Several& in) -> Several {
          b.kept = in[0] * b.weight;
          return {b.kept};
        },
        change(0)}},
      {0,
       {"a view of what the module keeps",
        [](Body& b, const Several& in) -> Several {
          b.kept = in[0] * b.weight;
          return {b.kept.view({-1})};
        },
        change(0)}},
      {0,
       {"of which the module keeps a view",
        [](Body& b, const Several& in) -> Several {
          const auto y = in[0] * b.weight;
          b.kept = y.narrow(0, 0, 1);
          return {y};
        },
        change(0)}},
      {1,
       {"returned twice",
        [](Body& b, const Several& in) -> Several {
          const auto y = in[0] + b.weight;
          return {in[0] * b.weight, y, y};
        },
        change(1)}},
      {0,
       {"returned with a part of it",
        [](Body& b, const Several& in) -> Several {
          const auto y = in[0] + b.weight;
          return {y, y.narrow(0, 0, 1)};
        },
        change(0)}},
      {1,
       {"an argument",
        [](Body& b, const Several& in) -> Several { return {in[0] + b.weight, in[0]}; },
        change(1)}},
      {1,
       {"a view of an argument",
        [](Body& b, const Several& in) -> Several { return {in[0] + b.weight, in[0].t()}; },
        change(1)}},
  };
  for (const auto& [number, one] : cases) expect_refusal(one, concat("result ", number, " was"));
}

std::vector<InPlace> allowed_changes() {
  return {
      {"a residual added to the result", product,
       [](const auto& unit, const Body&, const at::Tensor& x) {
         auto y = unit({x})[0];
         y += x;
         return squares(y.mul_(3.0)) + squares(x);
       }},
      {"a result that is a view of what nothing else holds",
       [](Body& b, const Several& in) -> Several {
         return {at::linear(in[0].unsqueeze(0), at::diag(b.weight), b.weight)};
       },
       [](const auto& unit, const Body&, const at::Tensor& x) {
         return squares(unit({x})[0].add_(x));
       }},
      {"two parts of one tensor that share no element",
       [](Body& b, const Several& in) -> Several {
         const auto y = in[0] * b.weight;
         return {y.narrow(0, 0, 1), y.narrow(0, 1, 2)};
       },
       [](const auto& unit, const Body&, const at::Tensor& x) {
         const auto parts = unit({x});
         parts[0].mul_(2.0);
         parts[1].add_(parts[0]);
         return squares(parts[0]) + squares(parts[1]);
       }},
      {"a kept result that is not changed",
       [](Body& b, const Several& in) -> Several {
         b.kept = in[0] * b.weight;
         return {b.kept, b.kept};
       },
       [](const auto& unit, const Body& body, const at::Tensor& x) {
         const auto results = unit({x});
         return squares(results[0]) + squares(results[1] * 3.0) + squares(body.kept);
       }},
      {"a clone of an argument, and an argument without gradient",
       [](Body& b, const Several& in) -> Several {
         return {in[1].add_(1.0) + in[0].clone().relu_() * b.weight};
       },
       [](const auto& unit, const Body&, const at::Tensor& x) {
         return squares(x + unit({x, here(at::ones({kWidth}))})[0]);
       }},
      {"with an inference tensor, which has no version",
       [](Body& b, const Several& in) -> Several { return {in[0] + in[1] * b.weight, in[0]}; },
       [](const auto& unit, const Body&, const at::Tensor& x) {
         at::Tensor constant;
         {
           const c10::InferenceMode inference;
           constant = here(at::ones({3, kWidth}));
         }
         return squares(unit({constant, x})[0].mul_(2.0));
       }},
  };
}

TEST_P_ON_RANKS(InPlaceChanges, ThatNoOneElseSeesGiveTheGradientsOfThePlainModule, GetParam()) {
  for (const auto& one : allowed_changes()) {
    Body plain(one.run);
    auto body = std::make_shared<Body>(one.run);
    auto handle = fully_shard(body, data_mesh(world, GetParam().replicas));
    const auto loss_of = [&](auto& model, const Body& of, const at::Tensor& leaf) {
      return one.loss([&](const Several& inputs) { return model.forward(inputs); }, of, leaf * 1.0);
    };
    const auto input = [](int rank) { return input_of(rank, 0, kWidth).requires_grad_(); };
    const auto x = input(world.rank());
    backward(loss_of(handle, *body, x));
    const auto found = whole_gradients(handle).at("weight");
    const auto z = input(world.rank());
    backward(loss_of(plain, plain, z));
    EXPECT_TRUE(at::allclose(x.grad(), z.grad(), 1e-6)) << one.what;
    const auto expected = plain_gradients(plain, world.size(), world.size(), [&](int rank) {
      backward(loss_of(plain, plain, input(rank)));
    });
    EXPECT_TRUE(at::allclose(found, expected.at("weight"), 1e-6)) << one.what;
  }
}

// Naive: the change goes with the unsharded memory; on one rank it stays.
TEST_P(InPlaceChanges, OfAParameterAreRefusedByNameOnAnyNumberOfRanks) {
  const auto [count, replicas, backend] = GetParam();
  const auto sum = [](Body& b, const Several& in) -> Several { return {in[0] + b.weight}; };
  const auto change = [](const at::Tensor& weight) {
    const at::NoGradGuard no_grad;
    weight.clamp_(-0.1, 0.1);
  };
  const auto plain = [](const auto& unit, const Body&, const at::Tensor& x) {
    return squares(unit({x})[0]);
  };
  const auto in_forward = [change](Body& b, const Several& in) -> Several {
    change(b.weight);
    return {in[0] * b.weight};
  };
  const std::vector<std::pair<bool, InPlace>> cases = {
      {true, {"in the forward", in_forward, plain}},
      {false, {"in the forward, released by the backward", in_forward, plain}},
      {true,
       {"in the forward without grad mode", in_forward,
        [](const auto& unit, const Body&, const at::Tensor& x) {
          const at::NoGradGuard no_grad;
          unit({x});
          return x * 2.0;
        }}},
      {false,
       {"between forward and backward", sum,
        [change](const auto& unit, const Body& body, const at::Tensor& x) {
          const auto y = unit({x})[0];
          change(body.weight);
          return squares(y);
        }}},
      {true,
       {"a part of it in a recomputation", sum,
        [](const auto& unit, const Body& body, const at::Tensor& x) {
          return squares(checkpoint(
              [&unit, &body, calls = std::make_shared<int>(0)](const auto& inputs) {
                const auto y = unit({inputs[0]})[0];
                if ((*calls)++ > 0) {
                  const at::NoGradGuard no_grad;
                  body.weight.detach().narrow(0, 0, 1).mul_(2.0);
                }
                return y + 1.0;
              },
              {x}));
        }}},
  };
  for (const auto& [reshards, one] : cases) {
    const auto run = [&, over = replicas](World& world) {
      ShardOptions options;
      options.name = "block";
      options.reshard_after_forward = reshards;
      auto body = std::make_shared<Body>(one.run);
      auto handle = fully_shard(body, data_mesh(world, over), {}, options);
      const auto unit = [&](const Several& inputs) { return handle.forward(inputs); };
      const auto leaf = input_of(world.rank(), 0, kWidth).requires_grad_();
      backward(one.loss(unit, *body, leaf * 1.0));
    };
    EXPECT_THAT(errors_of(count, run, backend),
                all_and_one(Says("unit block", "parameter block.weight was changed in place")))
        << one.what;
  }
}

// The cast has made a copy of the argument, which only the call holds.
TEST_ON_RANKS(InPlaceCasts, OfAnArgumentThatWasCastAndCameBackAreTheCallers, 1) {
  auto body = std::make_shared<Body>(
      [](Body& b, const Several& in) -> Several { return {in[0] + b.weight, in[0]}; });
  auto handle = fully_shard(body, data_mesh(world), in_bfloat16());
  const auto x = input_of(0, 0, kWidth).requires_grad_();
  const auto results = handle.forward({x * 1.0});
  backward(results[1].mul_(2.0).sum() + results[0].sum());
  EXPECT_TRUE(same_bits(x.grad(), here(at::full({3, kWidth}, 3.0F))));
}

}  // namespace
}  // namespace tessera::test::fsdp_in_place_test
