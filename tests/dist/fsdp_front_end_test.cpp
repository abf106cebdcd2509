// A unit's call by a front end of another language (front_end.h): how a call ends, and what
// references of the front end mean to results.

#include "dist/front_end_net.h"
#include "tessera/dtype_watch.h"

namespace tessera::test::fsdp_front_end_test {
namespace {

using namespace front_end_net;  // NOLINT(google-build-using-namespace): the model of all tests

// -------------------------------------------------------------------------------- how a call ends

// Naive: no exception of C++ is in flight where the call ends, so no rank is told, and the other
// ranks wait in the gather of the next unit.
TEST(FrontEndCall, AnExceptionOfTheFrontEndEndsTheStepOnAllRanksUntilRecovery) {
  for (const int count : {1, 2}) {
    RankBarrier meeting(count);
    ranks(count).run([&](World& world) {
      RankBarrier::Seat seat(meeting);
      ShardedNet model(world, std::make_shared<Net>(1));
      model.run_and_back(input_of(world.rank(), 0, kWidth));
      model.root->zero_grad();
      seat.wait();  // an abort would end a step that is still under way
      const bool culprit = world.rank() == count - 1;
      const auto run = model.net->units[1];
      const auto layer = model.net->layers[1];
      if (culprit) {
        run->become([](const Several&) -> Several { throw std::runtime_error("the user's text"); });
      }
      const auto error = thrown_by([&] { model.run_and_back(input_of(world.rank(), 1, kWidth)); });
      if (culprit) {
        EXPECT_THAT(error, Says("the user's text"));
      } else {
        EXPECT_THAT(error, Says("an exception of the front end"));
      }
      run->become([layer](const Several& in) -> Several { return {layer->forward(in[0])}; });
      if (count > 1) {
        EXPECT_THAT(thrown_by([&] { (*model.root)(input_of(world.rank(), 1, kWidth)); }),
                    Says("recover the World on every rank first"));
        world.recover();
      }
      model.root->zero_grad();
      model.run_and_back(input_of(world.rank(), 2, kWidth));
      expect_gradients(*model.root, plain_net_gradients(world, std::make_shared<Net>(1), 2),
                       "after the failure");
    });
  }
}

// Naive: the outer call continues with a forward that no longer runs.
TEST(FrontEndCall, AnExceptionThatTheFrontEndCatchesBetweenTwoUnitsIsRefused) {
  ranks(1).run([](World& world) {
    ShardedNet model(world, std::make_shared<Net>(1));
    model.net->units[1]->become([](const Several&) -> Several { throw std::runtime_error("no"); });
    model.root->become([&](const Several& in) -> Several {
      try {
        return {model.net->forward(in[0])};
      } catch (const std::exception&) {
        return {in[0]};
      }
    });
    EXPECT_THAT(thrown_by([&] { (*model.root)(input_of(0, 0, kWidth)); }),
                Says("an exception of a unit inside was caught"));
  });
}

TEST(FrontEndCall, StoppingAForwardThatIsNoRecomputationIsAFailure) {
  ranks(1).run([](World& world) {
    ShardedNet model(world, std::make_shared<Net>(1));
    model.net->units[0]->become([](const Several&) -> Several { throw EarlyStop(); });
    const auto& runtime = model.root->unit()->runtime();
    EXPECT_FALSE(runtime.has_failed());
    EXPECT_THROW((*model.root)(input_of(0, 0, kWidth)), EarlyStop);
    EXPECT_TRUE(runtime.has_failed());
  });
}

TEST(FrontEndCall, ARecomputationOutsideOfABackwardIsRefused) {
  ranks(1).run([](World& world) {
    ShardedNet model(world, std::make_shared<Net>(1));
    model.root->kind = FrontEnd::CallKind::kRecomputed;
    EXPECT_REFUSED(kUsage, (*model.root)(input_of(0, 0, kWidth)), "outside of a backward");
    model.root->kind.reset();
    model.run_and_back(input_of(0, 0, kWidth));
  });
}

// Naive: a call that was stopped leaves its frame, and the next operations count as inside it.
TEST(FrontEndCall, StoppedAndFailedCallsLeaveAWatchOfDtypes) {
  ranks(1).run([](World& world) {
    for (const bool fails : {false, true}) {
      ShardedNet model(world, std::make_shared<Net>(1), in_bfloat16());
      const DtypeWatch watch(*model.root);
      if (fails) {
        model.net->units[1]->become(
            [](const Several&) -> Several { throw std::runtime_error("no"); });
        EXPECT_NE(thrown_by([&] { (*model.root)(input_of(0, 0, kWidth)); }), "");
      } else {
        model.net->around = Around::kAll;
        model.run_and_back(input_of(0, 0, kWidth));
      }
      const auto before = watch.findings();
      const auto x = seeded(1, {2}).to(at::kBFloat16);
      const auto wide = x * seeded(2, {2});  // inside a unit this would be one
      EXPECT_EQ(wide.scalar_type(), at::kFloat);
      EXPECT_EQ(watch.findings(), before);
    }
  });
}

TEST(FrontEndCall, AWorldThatIsClosedIsRefusedByShardingAndByForwards) {
  const auto world = World::of_one();
  const auto net = std::make_shared<Net>(1);
  const auto mesh = world->mesh(MeshShape::dense(1, 1, 1, 1, 1));
  FrontEnd handle(net, [net](const Several& in) -> Several { return {net->forward(in[0])}; }, mesh);
  handle(input_of(0, 0, kWidth));
  world->close();
  EXPECT_REFUSED(kUsage, handle(input_of(0, 0, kWidth)), "found its World closed");
  EXPECT_REFUSED(kUsage, FrontEnd(std::make_shared<Net>(2), {}, mesh), "a World that is closed");
}

// --------------------------------------------------------- what the front end holds of its results

struct Changed {
  std::string what;
  Body::Run run;
  std::function<at::Tensor(const Several& results, const at::Tensor& x)> use;
};

at::Tensor change_first(const Several& results, const at::Tensor& x) {
  auto y = results[0];
  y += x;
  return squares(y.relu_() * 3.0) + squares(x);
}

/// The unit with an object for each result, and what it says where it is refused.
std::string error_of_change(World& world, const Changed& one, bool has_objects,
                            bool says_base_objects = true) {
  const auto body = std::make_shared<Body>(one.run);
  FrontEnd unit(body, [body](const Several& in) { return body->forward(in); }, data_mesh(world));
  unit.has_objects = has_objects;
  unit.says_base_objects = says_base_objects;
  const auto plain = std::make_shared<Body>(one.run);
  const auto run = [&](const std::function<Several(const Several&)>& call) {
    auto x = seeded(7, {3, Body::kWidth}).requires_grad_();
    backward(one.use(call({x}), x));
    return x.grad();
  };
  at::Tensor of_x;
  const auto error =
      thrown_by([&] { of_x = run([&](const Several& in) { return unit.call(in); }); });
  if (!error.empty()) return error;
  const auto expected = run([&](const Several& in) { return plain->forward(in); });
  EXPECT_TRUE(same_bits(of_x, expected)) << one.what;
  EXPECT_TRUE(same_bits(whole_gradients(unit).at("weight"), plain->weight.grad())) << one.what;
  return "";
}

// Naive: every result of Python looks held, since its own object refers to it.
TEST(FrontEndResults, WhatOnlyTheFrontEndsObjectsHoldMayBeChangedInPlace) {
  const std::vector<Changed> allowed = {
      {"a result", [](Body& b, const Several& in) -> Several { return {in[0] * b.weight}; },
       change_first},
      {"a result of no node",
       [](Body& b, const Several& in) -> Several { return {(in[0] * b.weight).clone()}; },
       change_first},
      {"a view of what nothing else holds",
       [](Body& b, const Several& in) -> Several {
         return {(in[0] * b.weight).unsqueeze(0).squeeze(0)};
       },
       change_first},
      {"two parts of one tensor that share no element",
       [](Body& b, const Several& in) -> Several {
         const auto y = in[0] * b.weight;
         return {y.narrow(0, 0, 1), y.narrow(0, 1, 2)};
       },
       [](const Several& results, const at::Tensor&) {
         results[0].mul_(2.0);
         results[1].add_(results[0]);
         return squares(results[0]) + squares(results[1]);
       }},
      {"a result and one without gradient",
       [](Body& b, const Several& in) -> Several {
         const auto y = in[0] * b.weight;
         return {y, y.detach().argmax(1)};
       },
       change_first},
  };
  ranks(1).run([&](World& world) {
    for (const auto& one : allowed) {
      EXPECT_EQ(error_of_change(world, one, true), "") << one.what;
      EXPECT_EQ(error_of_change(world, one, false), "") << one.what;
    }
  });
}

TEST(FrontEndResults, WhatSomebodyElseHoldsMayNot) {
  const std::vector<Changed> refused = {
      {"one that the module keeps",
       [](Body& b, const Several& in) -> Several { return {b.kept = in[0] * b.weight}; },
       change_first},
      {"a view of one that the module keeps",
       [](Body& b, const Several& in) -> Several {
         b.kept = in[0] * b.weight;
         return {b.kept.view({-1, Body::kWidth})};
       },
       change_first},
      {"the same twice",
       [](Body& b, const Several& in) -> Several {
         const auto y = in[0] * b.weight;
         return {y, y};
       },
       change_first},
      {"one and a view of it",
       [](Body& b, const Several& in) -> Several {
         const auto y = in[0] * b.weight;
         return {y, y.narrow(0, 0, 1)};
       },
       change_first},
      {"an argument", [](Body&, const Several& in) -> Several { return {in[0]}; }, change_first},
  };
  ranks(1).run([&](World& world) {
    for (const auto& one : refused) {
      for (const bool has_objects : {true, false}) {
        EXPECT_THAT(error_of_change(world, one, has_objects), Says("in place")) << one.what;
      }
    }
  });
}

// A front end that keeps quiet about an object of a base is taken at its word: somebody holds it.
TEST(FrontEndResults, AnObjectOfABaseThatIsNotGivenUpHoldsIt) {
  ranks(1).run([&](World& world) {
    const Changed view = {"a view",
                          [](Body& b, const Several& in) -> Several {
                            return {(in[0] * b.weight).view({-1, Body::kWidth})};
                          },
                          change_first};
    EXPECT_THAT(error_of_change(world, view, true, /*says_base_objects=*/false), Says("in place"));
  });
}

}  // namespace
}  // namespace tessera::test::fsdp_front_end_test
