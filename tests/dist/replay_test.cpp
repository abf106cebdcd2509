// Replayed regions are the eager ones bit for bit: results, gradients of arguments and what reaches
// the shards, with any calls between forward and backward.
#include <ATen/ATen.h>

#include "counted_calls.h"
#include "dist/replayed.h"
#include "dist/trainable_changes.h"
#include "nn/embedding.h"
#include "tessera/recompute.h"

namespace tessera::test::replay_test {
namespace {

constexpr int kRecordings = 3;  ///< and two of them compared

/// The seed of a rank's step and micro-batch.
std::uint64_t seed_of(World& world, int step, int micro_batch = 0) {
  return 1000 + static_cast<std::uint64_t>(100 * step + 10 * micro_batch + world.rank());
}

std::vector<Several> micro_batches(World& world, int step, int count) {
  std::vector<Several> all;
  for (int i = 0; i < count; ++i) all.push_back({rows(seed_of(world, step, i))});
  return all;
}

enum class Own { kUnset, kNone, kBFloat16, kFloat32 };  ///< a leaf's grad_dtype

struct Case {
  int ranks = 1;
  at::ScalarType stored = at::kFloat;
  std::optional<DType> compute = {};
  Own own = Own::kUnset;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.ranks << "ranks" << c.stored << (c.compute ? to_string(*c.compute) : "")
       << static_cast<int>(c.own);
}

Several two_regions(Model& model, const Several& inputs) {
  at::Tensor x = inputs[0] * model.before + model.before;
  for (const auto& part : model.parts) {
    x = part->region({x}, [&part = *part](const Several& in) {
      return Several{part.layer(part.layer(in[0]))};
    })[0];
  }
  return {x * model.after};
}

class ReplaysOf : public ::testing::TestWithParam<Case> {
 protected:
  static TwinOptions options() {
    TwinOptions options;
    options.dtype = GetParam().stored;
    options.policy = without_master();
    options.policy.param_dtype = GetParam().compute;
    options.prepare = [own = GetParam().own](Model& model) {
      for (auto& parameter : model.parameters()) {
        if (own == Own::kNone) parameter.set_grad_dtype(std::nullopt);
        if (own == Own::kBFloat16) parameter.set_grad_dtype(at::kBFloat16);
        if (own == Own::kFloat32) parameter.set_grad_dtype(at::kFloat);
      }
    };
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Dtypes, ReplaysOf,
                         ::testing::Values(Case{1}, Case{2}, Case{2, at::kFloat, {}, Own::kNone},
                                           Case{2, at::kFloat, {}, Own::kBFloat16},
                                           Case{2, at::kFloat, {}, Own::kFloat32},
                                           Case{1, at::kBFloat16}, Case{2, at::kBFloat16},
                                           Case{2, at::kBFloat16, {}, Own::kNone},
                                           Case{2, at::kBFloat16, {}, Own::kBFloat16},
                                           Case{2, at::kBFloat16, {}, Own::kFloat32},
                                           Case{2, at::kFloat, DType::kBFloat16},
                                           Case{2, at::kFloat, DType::kBFloat16, Own::kNone},
                                           Case{2, at::kFloat, DType::kBFloat16, Own::kBFloat16}),
                         ::testing::PrintToStringParamName());

// Two regions with what is around them, and a weight that is used four times in each: autograd adds
// those up before they leave. Naive: a gradient that is rounded on its way, or one slot's before
// another's.
TEST_P_ON_RANKS(ReplaysOf, GradientsOfStepsOfSeveralMicroBatchesAreThoseOfEagerOnes,
                GetParam().ranks) {
  Twins twins(data_mesh(world), two_regions, options());
  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE(concat("step ", step));
    twins.step(micro_batches(world, step, 3));
  }
  EXPECT_EQ(twins.calls().recorded, 2 * kRecordings);
  EXPECT_EQ(twins.calls().replayed, 2 * (4 * 3 - 1 - kRecordings));
  EXPECT_THAT(reasons(twins.calls()), IsEmpty());
  for (const auto& part : twins.of_replayed().parts) EXPECT_EQ(part->bodies, 1 + kRecordings);
}

// A weight of both regions: two leaves of one slot. ([Note: one leaf a use] of grad/leaf.h.)
TEST_P_ON_RANKS(ReplaysOf, AWeightMayBeOfTwoRegions, GetParam().ranks) {
  TwinOptions tied = options();
  tied.prepare = [own = tied.prepare](Model& model) {
    model.parts[1]->tie(*model.parts[0]);
    own(model);
  };
  const auto run = [](Model& model, const Several& inputs) {
    at::Tensor x = inputs[0] * model.before;
    for (const auto& part : model.parts) {
      x = part->region({x}, [&part = *part](const Several& in) {
        return Several{nn::linear(nn::rms_norm(in[0], part.norm, 1e-6), part.weight)};
      })[0];
    }
    return Several{x * model.after};
  };
  Twins twins(data_mesh(world), run, tied);
  EXPECT_EQ(twins.replayed.named_parameters().size(), 2 + 2 * 3 - 1) << "one is of both";
  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE(concat("step ", step));
    twins.step(micro_batches(world, step, 3));
  }
  EXPECT_EQ(twins.calls().replayed, 2 * (4 * 3 - 1 - kRecordings));
}

/// Steps of one micro-batch, of which the last ones are replayed.
void expect_replayed(World& world, const Model::Run& run,
                     const std::function<Several(int step)>& inputs,
                     const TwinOptions& options = {}, int steps = 7) {
  Twins twins(data_mesh(world), run, options);
  for (int step = 0; step < steps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    twins.step({inputs(step)});
  }
  EXPECT_EQ(twins.calls().replayed, steps - 1 - kRecordings);
  EXPECT_THAT(reasons(twins.calls()), IsEmpty());
}

void expect_replayed(const std::function<Several(Part&, const Several&)>& body,
                     const std::function<Several(World&, int step)>& inputs,
                     const TwinOptions& options = {}) {
  ranks(2).run([&](World& world) {
    expect_replayed(world, around(body), [&](int step) { return inputs(world, step); }, options);
  });
}

Several one_input(World& world, int step) { return {rows(seed_of(world, step))}; }

TEST(Replays, OfFrozenParametersGiveNoGradient) {
  TwinOptions options;
  options.prepare = [](Model& model) {
    model.parts[0]->bias.set_requires_grad(false);
    model.parts[0]->norm.set_requires_grad(false);
  };
  expect_replayed([](Part& part, const Several& in) { return Several{part.layer(in[0])}; },
                  one_input, options);
}

// In a trained table with many rows only the rows of the batch have a gradient: their number
// follows from data. Naive: a frozen one is refused with it.
TEST(Replays, FrozenTablesWithManyRowsAreLookedUp) {
  TwinOptions options;
  options.prepare = [](Model& model) { model.parts[0]->weight.set_requires_grad(false); };
  const auto body = [](Part& part, const Several& in) {
    return Several{part.layer(in[0] + nn::embedding(in[1], part.weight))};
  };
  const auto inputs = [](World& world, int step) {
    return Several{rows(seed_of(world, step)), at::tensor({step, 15 - step, 3}, at::kLong)};
  };
  expect_replayed(body, inputs, options);
}

enum class Backward { kEager, kRecomputed, kDeferred, kReplayed };

/// Matrix products of the last of some steps with one layer, which has two.
std::int64_t products_of(Sharded<Model>& handle, Backward how) {
  std::int64_t products = 0;
  for (int step = 0; step < 2 + kRecordings; ++step) {
    const CountedCalls calls({"aten::mm", "aten::addmm"});
    run_one(handle, {rows(1)});
    if (how == Backward::kDeferred) handle.run_weight_gradients();
    products = calls.count();
    handle.zero_grad();
  }
  return products;
}

// Forward, gradients of inputs, gradients of weights. Naive: a frozen weight's is formed, and
// thrown away unused.
TEST(FrozenWeights, HaveNoProductInAnyKindOfBackward) {
  for (const auto how :
       {Backward::kEager, Backward::kRecomputed, Backward::kDeferred, Backward::kReplayed}) {
    SCOPED_TRACE(concat("backward ", static_cast<int>(how)));
    ranks(1).run([how](World& world) {
      const auto plain = around([how](Part& part, const Several& in) {
        const auto layer = [&part](const Several& all) { return part.layer(all[0]); };
        return Several{how == Backward::kRecomputed ? checkpoint(layer, in) : layer(in)};
      });
      auto handle = fully_shard(std::make_shared<Model>(plain), data_mesh(world));
      if (how == Backward::kReplayed) compile(handle, {.mode = CompileMode::kReplay});
      handle.set_defer_weight_gradients(how == Backward::kDeferred);
      const std::int64_t again = how == Backward::kRecomputed ? 2 : 0;
      EXPECT_EQ(products_of(handle, how), 2 + 2 + 2 + again);
      set_trainable(handle, {freeze({"part0.weight"})}, {});
      EXPECT_EQ(products_of(handle, how), 2 + 2 + again);
      EXPECT_EQ(replay_calls(handle).replayed, how == Backward::kReplayed ? 2 : 0);
    });
  }
}

TEST(Replays, TakeArgumentsWithoutGradientUndefinedAndOfOtherStrides) {
  const auto body = [](Part& part, const Several& in) {
    at::Tensor x = part.layer(in[0]) + in[1].t() * part.bias;
    if (in[2].defined()) x = x * 2.0;
    return Several{x, in[3].sum(0) * x};
  };
  expect_replayed(body, [](World& world, int step) {
    const auto seed = seed_of(world, step);
    return Several{rows(seed), seeded(seed + 1, {Part::kWidth, 3}).set_requires_grad(true),
                   at::Tensor(), seeded(seed + 2, {1, Part::kWidth}).expand({4, Part::kWidth})};
  });
}

TEST(Replays, TakeArgumentsOfWholeNumbersAndBools) {
  const auto body = [](Part& part, const Several& in) {
    const at::Tensor picked = at::embedding(part.weight, in[1]);
    return Several{at::where(in[2], picked, in[0]), in[1] + 1, in[2].logical_not()};
  };
  expect_replayed(body, [](World& world, int step) {
    const auto x = rows(seed_of(world, step));
    const auto ids = (x.select(1, 0).abs() * 10).to(at::kLong).remainder(Part::kWidth);
    return Several{x, ids, x > 0};
  });
}

// The gradient of a result is expanded, turned, or a part of something. Naive: a layout that was
// another one when it was recorded.
TEST(Replays, TakeGradientsOfAnyStrides) {
  using Use = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<Use> uses{[](const auto& y) { return y.sum(); },
                              [](const auto& y) { return (y.t().contiguous().pow(2)).sum(); },
                              [](const auto& y) { return y.slice(1, 2, 9).sin().sum(); },
                              [](const auto& y) { return y.sum(0).pow(2); },
                              [](const auto& y) { return y.select(0, 1).expand({5, 16}).pow(2); }};
  ranks(1).run([&](World& world) {
    for (std::size_t i = 0; i < uses.size(); ++i) {
      SCOPED_TRACE(concat("use ", i));
      const auto run = [use = uses[i]](Model& model, const Several& inputs) {
        Part& part = *model.parts[0];
        const auto y = part.region({inputs[0] + model.before}, [&part](const Several& in) {
          return Several{part.layer(in[0])};
        });
        return Several{use(y[0])};
      };
      expect_replayed(world, run, [&](int step) { return one_input(world, step); });
    }
  });
}

// A bias in front adds up what comes back: the same summands in another layout are other sums.
TEST(Replays, HandBackGradientsWhoseSumsAreTheSame) {
  const std::vector<std::function<Several(Part&, const Several&)>> bodies{
      [](Part&, const Several& in) { return Several{in[0] + 1.0}; },
      [](Part&, const Several& in) { return Several{in[0].sum(0) * 0.1}; },
      [](Part&, const Several& in) { return Several{in[0].mean(1)}; },
      [](Part& part, const Several& in) { return Several{(in[0] * part.bias).sum()}; },
      [](Part&, const Several& in) { return Several{in[0].t().sin().t()}; },
      [](Part&, const Several& in) { return Several{in[0].exp().sum(0, true).expand({37, 16})}; }};
  ranks(1).run([&](World& world) {
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      SCOPED_TRACE(concat("body ", i));
      const auto run = [body = bodies[i]](Model& model, const Several& inputs) {
        Part& part = *model.parts[0];
        return part.region({inputs[0] + model.before},
                           [&part, body](const Several& in) { return body(part, in); });
      };
      expect_replayed(world, run,
                      [&](int step) { return Several{rows(seed_of(world, step), 37)}; });
    }
  });
}

// Naive: results that are expanded, cut out or overlap, in memory of as many elements as they have.
TEST(Replays, HandOutResultsThatArePartsOfTheirMemory) {
  const auto body = [](Part& part, const Several& in) {
    const at::Tensor flat = (in[0] * part.bias).flatten();  // 48 elements
    const at::Tensor one = flat.sigmoid().as_strided({3, 1}, {1, 4}).slice(0, 1, 2);
    return Several{flat.tanh().view({16, 3}).t() * one.neg(),
                   flat.sin().slice(0, 0, 12).expand({4, 12}), flat.cos().slice(0, 4, 20),
                   flat.exp().as_strided({16, 3}, {2, 1})};
  };
  expect_replayed(body, one_input);
}

TEST(Replays, ResultsMayShareMemory) {
  const auto body = [](Part& part, const Several& in) {
    const auto y = part.layer(in[0]);
    return Several{y, y.slice(1, 0, 4), y.t()};
  };
  expect_replayed(body, one_input);
}

TEST(Replays, ChunksAndListsAreOperationsAsOthers) {
  const auto body = [](Part& part, const Several& in) {
    const auto chunks = part.layer(in[0]).chunk(4, 1);
    const auto stacked = at::stack({chunks[0], chunks[2], chunks[3]}).softmax(0);
    const auto sums = at::_foreach_add(std::vector<at::Tensor>{chunks[1], chunks[2]}, 0.5);
    return Several{at::cat({stacked[0], sums[0], sums[1], chunks[0]}, 1),
                   std::get<0>(stacked.max(0)).to(at::kBFloat16), stacked.argmax(0)};
  };
  expect_replayed(body, one_input);
}

// An unneeded result is undefined, before a needed one. Naive: results by their numbers among the
// defined ones.
TEST(Replays, OperationsMayLeaveResultsOut) {
  const auto body = [](Part& part, const Several& in) {
    const auto factors = part.bias.narrow(0, 0, 3).view({1, 1, 3});
    const auto y = at::conv1d(in[1].unsqueeze(1), factors, part.norm.narrow(0, 0, 1), 1, 1);
    return Several{part.layer(in[0]) * y.squeeze(1)};
  };
  expect_replayed(body, [](World& world, int step) {
    return Several{rows(seed_of(world, step)), rows(seed_of(world, step) + 1)};
  });
}

TEST(Replays, ChangesOfOwnTemporariesAreReplayed) {
  const auto body = [](Part& part, const Several& in) {
    at::Tensor y = at::linear(in[0], part.weight);
    y.add_(part.bias).sigmoid_();
    at::Tensor z = at::zeros_like(y);
    z.slice(1, 0, 8).copy_(y.slice(1, 8, 16));
    z.slice(1, 8, 16).copy_(in[0].slice(1, 0, 8));
    return Several{y * z};
  };
  expect_replayed(body, one_input);
}

TEST_ON_RANKS(Replays, ReadWhatABufferHoldsNow, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                return Several{part.layer(in[0]) * part.table};
              }));
  for (int step = 0; step < 8; ++step) {
    for (Model* model : {&twins.of_eager(), &twins.of_replayed()}) {
      model->parts[0]->table.add_(1.0);
    }
    twins.step({one_input(world, step)});
  }
  EXPECT_EQ(twins.calls().replayed, 8 - 1 - kRecordings);
}

// A second backward of a kept graph; in any of the phases, and each time again.
TEST_ON_RANKS(Replays, AKeptGraphGoesBackTwice, 2) {
  Twins twins(data_mesh(world), one_layer());
  twins.steps(7, [&](Sharded<Model>& handle, int step) {
    const auto x = rows(seed_of(world, step)).set_requires_grad(true);
    const auto loss = squares(handle.forward({x})[0]);
    handle.set_requires_gradient_sync(false);
    backward_and_keep_graph(loss);
    handle.set_requires_gradient_sync(true);
    backward(loss);
    return Several{x.grad()};
  });
  EXPECT_GT(twins.calls().replayed, 0);
  EXPECT_THAT(reasons(twins.calls()), IsEmpty());
}

// A graph that was not kept is gone, in a replay as anywhere.
TEST_ON_RANKS(Replays, AGraphThatWasNotKeptDoesNotGoBackAgain, 1) {
  Twins twins(data_mesh(world), [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    return part.region(inputs, [&part](const Several& in) { return Several{part.layer(in[0])}; });
  });
  for (int step = 0; step < 7; ++step) {
    SCOPED_TRACE(concat("step ", step));
    std::vector<std::string> errors;
    twins.both([&](Sharded<Model>& handle) {
      const auto y = handle.forward({rows(seed_of(world, step))})[0];
      const auto seed = at::ones_like(y);
      torch::autograd::backward({y}, {seed});
      errors.push_back(thrown_by([&] { torch::autograd::backward({y}, {seed}); }));
      return Several{};
    });
    EXPECT_THAT(errors, Each(Not(IsEmpty())));
    EXPECT_THAT(errors[1], Says(step == 0 ? "a second time" : "retain_graph"));
    for (auto* handle : {&twins.eager, &twins.replayed}) handle->zero_grad();
  }
  EXPECT_EQ(twins.calls().replayed, 7 - 1 - kRecordings);
}

// Validation under grad mode: graphs without a backward, before and after recordings.
TEST_ON_RANKS(Replays, AForwardWhoseGraphIsDroppedLeavesNothingBehind, 2) {
  Twins twins(data_mesh(world), one_layer());
  for (int step = 0; step < 9; ++step) {
    SCOPED_TRACE(concat("step ", step));
    for (int i = 0; i < step % 3; ++i) {
      twins.both([&](Sharded<Model>& handle) {
        return Several{handle.forward({rows(seed_of(world, step, i + 1))})[0].detach()};
      });
    }
    twins.step({one_input(world, step)});
  }
  EXPECT_GT(twins.calls().replayed, 3);
  EXPECT_THAT(reasons(twins.calls()), IsEmpty());
}

// Two forwards, then two backwards, in either order. Naive: one block for what both leave.
TEST_ON_RANKS(Replays, TwoForwardsMayWaitForTheirBackwards, 2) {
  Twins twins(data_mesh(world), one_layer());
  twins.steps(10, [&](Sharded<Model>& handle, int step) {
    std::vector<at::Tensor> xs, losses;
    for (int i = 0; i < 2; ++i) {
      xs.push_back(rows(seed_of(world, step, i)).set_requires_grad(true));
      losses.push_back(squares(handle.forward({xs.back()})[0]));
    }
    if (step % 2 != 0) std::swap(losses[0], losses[1]);
    for (const auto& loss : losses) backward(loss);
    return Several{xs[0].grad(), xs[1].grad(), losses[0].detach(), losses[1].detach()};
  });
  EXPECT_GT(twins.calls().replayed, 6);
  EXPECT_THAT(reasons(twins.calls()), ElementsAre("being recorded"));
}

// Two calls inside one forward, whose backwards come in the other order.
TEST_ON_RANKS(Replays, ARegionMayBeCalledTwiceInAForward, 2) {
  Twins twins(data_mesh(world), [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    const auto layer = [&part](const Several& in) {
      return Several{nn::linear(nn::rms_norm(in[0], part.norm, 1e-6), part.weight, part.bias)};
    };
    return part.region(part.region({inputs[0] * model.before}, layer), layer);
  });
  for (int step = 0; step < 8; ++step) {
    SCOPED_TRACE(concat("step ", step));
    twins.step(micro_batches(world, step, 1));
  }
  EXPECT_EQ(twins.calls().replayed, 16 - 1 - kRecordings - 2);
}

TEST_ON_RANKS(Replays, CallsWithoutGradientsComeBetween, 2) {
  Twins twins(data_mesh(world), one_layer());
  twins.steps(8, [&](Sharded<Model>& handle, int step) {
    const auto x = rows(seed_of(world, step)).set_requires_grad(true);
    const auto loss = squares(handle.forward({x})[0]);
    const at::NoGradGuard no_grad;
    const auto other = handle.forward({rows(seed_of(world, step, 1))})[0];
    const at::AutoGradMode grad(true);
    backward(loss);
    return Several{other, x.grad()};
  });
  EXPECT_EQ(twins.calls().replayed, 2 * (8 - 1 - kRecordings));
  EXPECT_THAT(reasons(twins.calls()), IsEmpty());
}

// Four kinds of arguments are recorded, each for itself; what comes after them is eager.
TEST_ON_RANKS(Replays, OfOtherSizesAreOtherVariantsFourAtMost, 2) {
  Twins twins(data_mesh(world), one_layer());
  constexpr int kSteps = 7, kVariants = 4, kSizes = 6;
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    std::vector<Several> all;
    for (int rows_more = 0; rows_more < kSizes; ++rows_more) {
      all.push_back({rows(seed_of(world, step, rows_more), 2 + rows_more)});
    }
    twins.step(all);
  }
  const auto calls = twins.calls();
  EXPECT_EQ(calls.replayed, kVariants * (kSteps - 1 - kRecordings));
  EXPECT_EQ(calls.eager.at("more than four variants"), (kSizes - kVariants) * kSteps);
}

// No rows on one rank, on some days; the other one replays meanwhile.
TEST_ON_RANKS(Replays, ARankWithoutRowsIsEagerAlone, 2) {
  Twins twins(data_mesh(world), one_layer());
  for (int step = 0; step < 8; ++step) {
    SCOPED_TRACE(concat("step ", step));
    const bool none = world.rank() == 1 && step % 2 == 1;
    twins.step({{rows(seed_of(world, step), none ? 0 : 3)}});
  }
  EXPECT_EQ(twins.calls().replayed, world.rank() == 0 ? 8 - 1 - kRecordings : 0);
  EXPECT_THAT(reasons(twins.calls()), world.rank() == 0
                                          ? testing::Matcher<std::vector<std::string>>(IsEmpty())
                                          : ElementsAre("no rows"));
}

// A result whose gradient is missing, now and then: the body runs again.
TEST_ON_RANKS(Replays, AMissingGradientIsAnEagerBackward, 1) {
  Twins twins(data_mesh(world), [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    const auto both = part.region({inputs[0] * model.before}, [&part](const Several& in) {
      return Several{part.layer(in[0]), in[0] * part.bias};
    });
    return model.calls % 5 == 0 ? Several{both[1]} : both;
  });
  for (int step = 0; step < 11; ++step) {
    SCOPED_TRACE(concat("step ", step));
    twins.step({one_input(world, step)});
  }
  EXPECT_EQ(twins.calls().eager.at("other gradients than were recorded"), 2);
}

// Naive: a program that knows where parameters lay before.
TEST_ON_RANKS(Replays, WhatIsTrainableChangesBetweenSteps, 2) {
  Twins twins(data_mesh(world), one_layer());
  int step = 0;
  std::int64_t replayed = 0;
  for (const auto& change :
       {freeze({"part0.bias"}), freeze({"part0.norm", "after"}), unfreeze({"part0.bias"})}) {
    for (int i = 0; i < 6; ++i, ++step) {
      SCOPED_TRACE(concat("step ", step));
      twins.step({one_input(world, step)});
    }
    EXPECT_EQ(twins.calls().replayed - std::exchange(replayed, twins.calls().replayed),
              6 - 1 - kRecordings);
    twins.change({change});
  }
}

TEST_ON_RANKS(Replays, AreOffAgainWhenTheyAreSwitchedOff, 1) {
  Twins twins(data_mesh(world), one_layer());
  for (int step = 0; step < 6; ++step) twins.step({one_input(world, step)});
  EXPECT_GT(twins.calls().replayed, 0);
  compile(twins.replayed, {});
  const int bodies = twins.of_replayed().parts[0]->bodies;
  twins.step({one_input(world, 6)});
  EXPECT_EQ(twins.of_replayed().parts[0]->bodies, bodies + 1);
  EXPECT_EQ(twins.calls().replayed, 0);
  compile(twins.replayed, {.mode = CompileMode::kReplay});
  for (int step = 7; step < 13; ++step) twins.step({one_input(world, step)});
  EXPECT_EQ(twins.calls().replayed, 6 - 1 - kRecordings);
  compile(twins.replayed, {.mode = CompileMode::kReplay});
  EXPECT_GT(twins.calls().replayed, 0) << "what was recorded stays";
}

// Naive: what a forward has left goes with the regions.
TEST_ON_RANKS(Replays, AForwardThatWaitsGoesBackAfterTheModelIsSwitchedOff, 1) {
  Twins twins(data_mesh(world), one_layer());
  twins.steps(6, [&](Sharded<Model>& handle, int step) {
    const auto x = rows(seed_of(world, step)).set_requires_grad(true);
    const auto loss = squares(handle.forward({x})[0]);
    if (step == 5) compile(handle, {});
    backward(loss);
    return Several{x.grad()};
  });
}

// -------------------------------------------------------------------------------- changed in place

struct Change {
  bool argument = false;  ///< else of the result
  bool is_read = false;   ///< by backward
};

/// Compares the error of the backward of step `at` after a change of an argument or a result
/// between the passes. Steps before and after it are not affected.
void expect_as_eager(const Change& change, int at) {
  ranks(1).run([&](World& world) {
    Twins twins(data_mesh(world), [&](Model& model, const Several& inputs) {
      Part& part = *model.parts[0];
      const Several arguments{inputs[0] * model.before, inputs[1]};
      const auto y = part.region(arguments, [&part, reads = change.is_read](const Several& in) {
        const auto of_argument = reads ? in[1] * part.bias : in[1] + part.bias;
        const auto sum = in[0] * part.norm + of_argument;
        return Several{reads ? sum.sigmoid() : sum * 1.0};
      });
      return Several{y[0], y[0] * 1.0};
    });
    for (int step = 0; step < 9; ++step) {
      SCOPED_TRACE(concat("step ", step, " of those around ", at));
      std::vector<std::string> errors;
      twins.both([&](Sharded<Model>& handle) {
        const auto x = rows(seed_of(world, step)).set_requires_grad(true);
        const at::Tensor other = rows(seed_of(world, step, 1)).clone();
        const auto results = handle.forward({x, other});
        const auto loss = squares(results[1]);
        if (step == at) {
          const at::NoGradGuard no_grad;
          (change.argument ? other : results[0]).add_(1.0);
        }
        errors.push_back(thrown_by([&] { backward(loss); }));
        return errors.back().empty() ? Several{x.grad()} : Several{};
      });
      const bool fails = step == at && change.is_read;
      for (const auto& error : errors) EXPECT_EQ(error.empty(), !fails) << error;
      if (!fails) {
        twins.update();
        continue;
      }
      for (auto* handle : {&twins.eager, &twins.replayed}) handle->zero_grad();
      if (at <= kRecordings) continue;  // autograd's own words
      EXPECT_THAT(errors.back(), Says("changed in place"));
    }
    EXPECT_GE(twins.calls().replayed, 9 - 1 - kRecordings - 1);
    EXPECT_THAT(reasons(twins.calls()), IsEmpty());
  });
}

/// At the first call, when it is recorded, compared, replayed.
void expect_as_eager(const Change& change) {
  for (const int at : {0, 1, 2, 3, 5}) expect_as_eager(change, at);
}

TEST(Replays, AnArgumentThatBackwardReadsMayNotBeChanged) { expect_as_eager({true, true}); }
TEST(Replays, AnArgumentThatBackwardDoesNotReadMayBeChanged) { expect_as_eager({true, false}); }
TEST(Replays, AResultThatBackwardReadsMayNotBeChanged) { expect_as_eager({false, true}); }
TEST(Replays, AResultThatBackwardDoesNotReadMayBeChanged) { expect_as_eager({false, false}); }

// A later operation adds to a result, as a part of the graph.
TEST_ON_RANKS(Replays, AResultMayBeAddedTo, 1) {
  const auto run = [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    const auto y = part.region({inputs[0] * model.before}, [&part](const Several& in) {
      return Several{part.layer(in[0]) + part.bias, in[0] * 2.0};
    });
    y[0].add_(model.after).mul_(y[1] * 0.1);
    return Several{y[0]};
  };
  expect_replayed(world, run, [&](int step) { return one_input(world, step); });
}

}  // namespace
}  // namespace tessera::test::replay_test
