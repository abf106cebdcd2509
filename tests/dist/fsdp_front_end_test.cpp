// A unit's call by a front end of another language (front_end.h): how a call ends, what references
// of the front end mean to results, and forwards that its checkpoints run again.

#include <ATen/ATen.h>

#include "dist/body.h"
#include "dist/front_end.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/test.h"
#include "tessera/dtype_watch.h"
#include "tessera/state_dict.h"

namespace tessera::test::fsdp_front_end_test {
namespace {

constexpr std::int64_t kWidth = 5;
constexpr auto kUseReentrant = "use_reentrant=False";

/// x + b relu(a x), in the dtype of its weights.
class Layer : public torch::nn::Module {
 public:
  Layer(std::uint64_t seed, at::ScalarType dtype)
      : a(register_parameter("a", seeded(seed, {kWidth + 1, kWidth}, dtype))),
        b(register_parameter("b", seeded(seed + 1, {kWidth, kWidth + 1}, dtype))) {}
  at::Tensor forward(const at::Tensor& input) {
    const auto x = input.to(a.scalar_type());
    if (is_plain) return x + at::linear(at::relu(at::linear(x, a)), b);
    return x + product(at::relu(product(x, a)), b);
  }
  void tie_first(const Layer& other) { a = parameters_["a"] = other.a; }
  at::Tensor a, b;
  bool is_plain = true;
};

/// Where the checkpoints of a model are.
enum class Around : std::uint8_t {
  kNone,
  kInside,       ///< in each unit, around what it computes
  kEach,         ///< around each unit
  kAll,          ///< around all units together
  kAllAndMore,   ///< the same, and around what the root computes behind them
  kRoot,         ///< around the root
  kRootAndMore,  ///< the same, and around what comes behind it
  kNested,       ///< around all, and around each inside it
  kReentrant,    ///< around each unit, a reentrant one
};
constexpr Around kEverywhere[] = {Around::kInside,     Around::kEach, Around::kAll,
                                  Around::kAllAndMore, Around::kRoot, Around::kRootAndMore,
                                  Around::kNested};

/// Three layers, each of which may be a unit, and a last weight.
class Net : public torch::nn::Module {
 public:
  explicit Net(std::uint64_t seed, at::ScalarType middle = at::kFloat)
      : last(register_parameter("last", seeded(seed, {kWidth, kWidth}))) {
    for (std::uint64_t i = 0; i < 3; ++i) {
      layers.push_back(register_module(
          concat("layer", i),
          std::make_shared<Layer>(seed + 10 * (i + 1), i == 1 ? middle : at::kFloat)));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    if (around == Around::kAllAndMore) {
      return non_reentrant([this](const Several& in) { return Several{more(in[0])}; }, {x},
                           stops)[0];
    }
    if (around != Around::kAll && around != Around::kNested) return more(x);
    const auto y =
        non_reentrant([this](const Several& in) { return Several{all(in[0])}; }, {x}, stops)[0];
    return behind(y);
  }

  std::vector<std::shared_ptr<Layer>> layers;
  std::vector<std::shared_ptr<FrontEnd>> units;  ///< by layer; empty: plain
  at::Tensor last;
  Around around = Around::kNone;
  Stops stops = Stops::kEarly;
  std::vector<std::size_t> first = {0, 1, 2}, second = {0, 1, 2};  ///< layers of each run
  int without_grad = -1;  ///< a layer that runs without grad mode

 private:
  at::Tensor call_layer(std::size_t i, const at::Tensor& x) {
    const at::AutoGradMode grad(at::GradMode::is_enabled() && static_cast<int>(i) != without_grad);
    return units.empty() ? layers[i]->forward(x) : (*units[i])(x);
  }
  at::Tensor layer(std::size_t i, const at::Tensor& x) {
    const UnitBody run = [this, i](const Several& in) { return Several{call_layer(i, in[0])}; };
    if (around == Around::kReentrant) return reentrant(run, x);
    const bool repeats = around == Around::kEach || around == Around::kNested;
    return repeats ? non_reentrant(run, {x}, stops)[0] : call_layer(i, x);
  }
  at::Tensor all(const at::Tensor& x) {
    const bool again = FrontEnd::Call::kind_here() == FrontEnd::CallKind::kRecomputed;
    auto y = x;
    for (const auto i : again ? second : first) y = layer(i, y);
    return y;
  }
  at::Tensor behind(const at::Tensor& y) {
    const auto wide = y.to(last.scalar_type());
    return units.empty() ? at::linear(wide, last) : product(wide, last);
  }
  at::Tensor more(const at::Tensor& x) { return behind(all(x)); }
};

/// A net whose layers are units inside a root, all called by the front end.
struct ShardedNet {
  explicit ShardedNet(World& world, std::shared_ptr<Net> shown, const PrecisionPolicy& policy = {},
                      const ShardOptions& inner = {}, const ShardOptions& outer = {})
      : net(std::move(shown)) {
    const auto mesh = data_mesh(world);
    auto options = outer;
    for (const auto& layer : net->layers) {
      layer->is_plain = false;
      net->units.push_back(std::make_shared<FrontEnd>(
          layer,
          [this, layer](const Several& in) -> Several {
            const UnitBody body = [layer](const Several& all) -> Several {
              return {layer->forward(all[0])};
            };
            return net->around == Around::kInside ? non_reentrant(body, in, net->stops) : body(in);
          },
          mesh, policy, inner));
      options.inner.push_back(net->units.back());
    }
    root = std::make_shared<FrontEnd>(
        net, [this](const Several& in) -> Several { return {net->forward(in[0])}; }, mesh, policy,
        options);
  }
  ShardedNet(const ShardedNet&) = delete;
  ShardedNet& operator=(const ShardedNet&) = delete;
  ~ShardedNet() { net->units.clear(); }

  at::Tensor operator()(const at::Tensor& x) const {
    const bool and_more = net->around == Around::kRootAndMore;
    if (net->around != Around::kRoot && !and_more) return (*root)(x);
    return non_reentrant(
        [handle = root, and_more](const Several& in) -> Several {
          const auto y = (*handle)(in[0]);
          // The same values, which are saved.
          return {and_more ? product(y, here(at::eye(kWidth)).to(y.scalar_type())) : y};
        },
        {x}, net->stops)[0];
  }
  void run_and_back(const at::Tensor& x) const { backward(squares((*this)(x))); }
  std::int64_t gathers() const { return root->unit()->runtime().gathers_issued(); }
  bool is_gathered(std::size_t i) const { return net->units[i]->unit()->gathered(); }

  std::shared_ptr<Net> net;
  std::shared_ptr<FrontEnd> root;
};

/// Those that the sharded model has: a tied one is there under its first name alone.
void expect_gradients(const ShardedBase& handle, const Tensors& expected, const std::string& what) {
  for (const auto& [name, found] : whole_gradients(handle)) {
    ASSERT_EQ(expected.count(name), 1U) << what << " " << name;
    const auto& wanted = expected.at(name);  // in the parameter's dtype
    EXPECT_TRUE(same_bits(found.to(wanted.scalar_type()), wanted)) << what << " " << name;
  }
}

Tensors plain_net_gradients(World& world, const std::shared_ptr<Net>& plain, int step = 0) {
  return gradients_of_squares(*plain, world.size(), step, kWidth);
}

std::string as_text(Around around) { return concat("checkpoint ", static_cast<int>(around)); }

// -------------------------------------------------------------------------------- how a call ends

// Naive: no exception of C++ is under way where the call ends, so nobody is told, and the other
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

// Naive: the outer call goes on with a forward that nobody runs any more.
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
      {"a view of what nobody else holds",
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
      {"a result beside one without gradient",
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
      {"one beside a view of it",
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

// ------------------------------------------------------------------ forwards that are run again

class Repeated
    : public ::testing::TestWithParam<std::tuple<int, Around, Stops, /*reshards=*/bool>> {};
INSTANTIATE_TEST_SUITE_P(Grid, Repeated,
                         ::testing::Combine(::testing::Values(1, 2),
                                            ::testing::ValuesIn(kEverywhere),
                                            ::testing::Values(Stops::kEarly, Stops::kNever),
                                            ::testing::Bool()));

// Naive: a unit that is called inside backward opens a forward of its own, finds its parameters
// sharded, or is gathered once more than a step without a checkpoint gathers it.
TEST_P(Repeated, GivesThePlainGradientsWithTheGathersOfAStepWithoutCheckpoints) {
  const auto [count, around, stops, reshards] = GetParam();
  ranks(count).run([around, stops, reshards](World& world) {
    ShardOptions inner;
    inner.reshard_after_forward = reshards;
    ShardedNet model(world, std::make_shared<Net>(1), {}, inner);
    model.net->stops = stops;
    const auto plain = std::make_shared<Net>(1);
    const auto gathers_of_step = [&](int step) {
      const auto before = model.gathers();
      model.root->zero_grad();
      model.run_and_back(input_of(world.rank(), step, kWidth));
      expect_gradients(*model.root, plain_net_gradients(world, plain, step),
                       concat(as_text(model.net->around), ", step ", step));
      for (std::size_t i = 0; i < 3; ++i) EXPECT_FALSE(model.is_gathered(i)) << i;
      return model.gathers() - before;
    };
    gathers_of_step(0);
    const auto expected = gathers_of_step(1);
    model.net->around = around;
    EXPECT_EQ(gathers_of_step(0), expected);
    EXPECT_EQ(gathers_of_step(1), expected);
    EXPECT_EQ(model.root->unit()->expected(), 0);
  });
}

TEST(RepeatedForwards, MicroBatchesAddUpAndGradientsComeOnce) {
  for (const auto around : kEverywhere) {
    ranks(2).run([around](World& world) {
      ShardedNet model(world, std::make_shared<Net>(1));
      model.net->around = around;
      for (int step = 0; step < 2; ++step) {
        model.root->zero_grad();
        model.root->set_requires_gradient_sync(false);
        model.run_and_back(input_of(world.rank(), step, kWidth));
        model.root->set_requires_gradient_sync(true);
        model.run_and_back(input_of(world.rank(), step + 5, kWidth));
        Net plain(1);
        const auto expected = plain_gradients(plain, 2, 2, [&](int rank) {
          for (const int at : {step, step + 5}) {
            backward(squares(plain.forward(input_of(rank, at, kWidth))));
          }
        });
        expect_gradients(*model.root, expected, as_text(around));
      }
    });
  }
}

// Two forwards wait for their backwards, which come in the other order, or both in one.
TEST(RepeatedForwards, SeveralForwardsThatWaitAreKeptApart) {
  for (const auto around : kEverywhere) {
    for (const bool in_one : {true, false}) {
      ranks(2).run([around, in_one](World& world) {
        ShardedNet model(world, std::make_shared<Net>(1));
        model.net->around = around;
        const auto run = [in_one](const auto& call, int rank) {
          auto first = squares(call(input_of(rank, 0, kWidth)));
          auto second = squares(call(input_of(rank, 1, kWidth)));
          if (in_one) return backward(first + second);
          backward(second);
          backward(first);
        };
        run(model, world.rank());
        Net plain(1);
        Tensors expected;
        if (in_one) {
          expected = plain_gradients(plain, 2, 2, [&](int rank) {
            run([&](const auto& x) { return plain.forward(x); }, rank);
          });
        } else {  // each backward is reduced by itself, and sums are added
          expected = gradients_of_squares(plain, 2, 1, kWidth);
          for (const auto& [name, addend] : gradients_of_squares(plain, 2, 0, kWidth)) {
            expected.at(name) = expected.at(name) + addend;
          }
        }
        expect_gradients(*model.root, expected, as_text(around));
      });
    }
  }
}

TEST(RepeatedForwards, AGraphThatIsKeptIsRunAgainTwice) {
  for (const auto around : kEverywhere) {
    ranks(2).run([around](World& world) {
      ShardedNet model(world, std::make_shared<Net>(1));
      model.net->around = around;
      const auto loss = squares(model(input_of(world.rank(), 0, kWidth)));
      backward_and_keep_graph(loss);
      model.root->zero_grad();
      backward(loss);
      expect_gradients(*model.root, plain_net_gradients(world, std::make_shared<Net>(1)),
                       as_text(around));
    });
  }
}

TEST(RepeatedForwards, FrozenUnitsAndTheirMemory) {
  for (const auto around : kEverywhere) {
    for (const std::size_t frozen : {0U, 1U, 2U}) {
      ranks(2).run([around, frozen](World& world) {
        const auto make = [frozen] {
          auto net = std::make_shared<Net>(1);
          for (auto& p : net->layers[frozen]->parameters()) p.requires_grad_(false);
          return net;
        };
        ShardedNet model(world, make());
        model.net->around = around;
        for (int step = 0; step < 2; ++step) {
          model.root->zero_grad();
          model.run_and_back(input_of(world.rank(), step, kWidth));
          expect_gradients(*model.root, plain_net_gradients(world, make(), step),
                           concat(as_text(around), ", frozen layer ", frozen));
          for (std::size_t i = 0; i < 3; ++i) EXPECT_FALSE(model.is_gathered(i)) << i;
        }
      });
    }
  }
}

// One tensor in two units: their root holds it, and lends it to both in either run.
TEST(RepeatedForwards, TiedParametersOfSeveralUnits) {
  for (const auto around : kEverywhere) {
    ranks(2).run([around](World& world) {
      const auto make = [] {
        auto net = std::make_shared<Net>(1);
        net->layers[2]->tie_first(*net->layers[0]);
        return net;
      };
      ShardedNet model(world, make());
      model.net->around = around;
      model.run_and_back(input_of(world.rank(), 0, kWidth));
      expect_gradients(*model.root, plain_net_gradients(world, make()), as_text(around));
    });
  }
}

TEST(RepeatedForwards, MixedDtypesAreCastAsInTheFirstRun) {
  for (const auto around : kEverywhere) {
    for (const bool by_policy : {false, true}) {
      ranks(2).run([around, by_policy](World& world) {
        const auto make = [&] {
          return std::make_shared<Net>(1, by_policy ? at::kFloat : at::kBFloat16);
        };
        const auto policy = by_policy ? in_bfloat16() : PrecisionPolicy();
        const auto gradients = [&](Around where) {
          ShardedNet model(world, make(), policy);
          model.net->around = where;
          model.run_and_back(input_of(world.rank(), 0, kWidth));
          return whole_gradients(*model.root);
        };
        expect_same(gradients(around), gradients(Around::kNone), as_text(around));
        if (by_policy) return;
        ShardedNet model(world, make(), policy);
        model.net->around = around;
        model.run_and_back(input_of(world.rank(), 0, kWidth));
        expect_gradients(*model.root, plain_net_gradients(world, make()), as_text(around));
      });
    }
  }
}

TEST(RepeatedForwards, AUnitThatIsCalledSeveralTimesInOneCheckpoint) {
  for (const auto around : kEverywhere) {
    ranks(2).run([around](World& world) {
      const auto make = [] {
        auto net = std::make_shared<Net>(1);
        net->first = net->second = {0, 1, 1, 0, 2, 1};
        return net;
      };
      ShardedNet model(world, make());
      model.net->around = around;
      for (int step = 0; step < 2; ++step) {
        model.root->zero_grad();
        model.run_and_back(input_of(world.rank(), step, kWidth));
        const auto found = whole_gradients(*model.root);
        ShardedNet other(world, make());
        other.run_and_back(input_of(world.rank(), step, kWidth));
        expect_same(found, whole_gradients(*other.root), as_text(around));
      }
    });
  }
}

// What a function computes without grad mode it computes so again.
TEST(RepeatedForwards, AUnitWithoutGradModeInsideACheckpoint) {
  for (const auto around : {Around::kAll, Around::kAllAndMore, Around::kRoot}) {
    ranks(2).run([around](World& world) {
      const auto make = [] {
        auto net = std::make_shared<Net>(1);
        net->without_grad = 1;
        return net;
      };
      ShardedNet model(world, make());
      model.net->around = around;
      model.run_and_back(input_of(world.rank(), 0, kWidth));
      const auto plain = make();
      expect_gradients(*model.root, plain_net_gradients(world, plain), as_text(around));
    });
  }
}

// It is not gathered for its backward, but for the run that comes before it; and gives the memory
// back with that run, since no backward of it comes by.
TEST(RepeatedForwards, AnEmbeddingThatIsNotUnshardedInBackward) {
  for (const bool reshards : {true, false}) {
    ranks(2).run([reshards](World& world) {
      struct Table : torch::nn::Module {
        Table() : weight(register_parameter("weight", seeded(3, {7, kWidth}))) {}
        at::Tensor weight;
      };
      struct Tower : torch::nn::Module {
        Tower()
            : table(register_module("table", std::make_shared<Table>())),
              layer(register_module("layer", std::make_shared<Layer>(5, at::kFloat))) {}
        std::shared_ptr<Table> table;
        std::shared_ptr<Layer> layer;
      };
      const auto mesh = data_mesh(world);
      const auto tower = std::make_shared<Tower>();
      tower->layer->is_plain = false;
      ShardOptions inner, outer;
      inner.reshard_after_forward = reshards;
      const auto table = std::make_shared<FrontEnd>(
          tower->table,
          [tower](const Several& in) -> Several {
            return {at::embedding(tower->table->weight, in[0])};
          },
          mesh, PrecisionPolicy(), inner);
      const auto layer = std::make_shared<FrontEnd>(
          tower->layer,
          [tower](const Several& in) -> Several { return {tower->layer->forward(in[0])}; }, mesh);
      outer.inner = {table, layer};
      bool was_gathered = false;
      const UnitBody body = [&](const Several& in) -> Several {
        const auto y = (*table)(in[0]);
        if (FrontEnd::Call::kind_here() == FrontEnd::CallKind::kRecomputed) {
          was_gathered = was_gathered || table->unit()->gathered();
        }
        return {(*layer)(y)};
      };
      FrontEnd root(
          tower, [&](const Several& in) -> Several { return non_reentrant(body, in); }, mesh,
          PrecisionPolicy(), outer);
      table->set_unshard_in_backward(false);
      const auto ids_of = [](int rank) { return here(at::arange(4, at::kLong)) + rank; };
      backward(squares(root(ids_of(world.rank()))));
      EXPECT_EQ(was_gathered, !reshards) << "what was gathered for the run goes with it";
      Tower plain;
      const auto expected = plain_gradients(plain, 2, 2, [&](int rank) {
        backward(squares(plain.layer->forward(at::embedding(plain.table->weight, ids_of(rank)))));
      });
      expect_gradients(root, expected, "embedding");
      EXPECT_FALSE(table->unit()->gathered());
    });
  }
}

// ------------------------------------------------------------------------- what is no repetition

TEST(RepeatedForwards, OtherCallsThanInTheFirstRunAreNamed) {
  const std::vector<std::pair<std::vector<std::size_t>, std::vector<std::string>>> cases = {
      {{1, 0, 2}, {"unit layer0", "expected unit layer2"}},
      {{0, 0, 2}, {"unit layer0", "expected unit layer1"}},
      {{0, 2, 1}, {"unit layer2", "expected unit layer1"}},
      {{0, 1, 2, 1}, {"unit layer1", "expected no other call"}},
  };
  for (const auto& [second, says] : cases) {
    const auto errors = errors_of(2, [&](World& world) {
      ShardedNet model(world, std::make_shared<Net>(1));
      model.net->around = Around::kAll;
      model.net->stops = Stops::kNever;
      model.net->second = second;
      model.run_and_back(input_of(world.rank(), 0, kWidth));
    });
    EXPECT_THAT(errors, all_and_one(AllOf(Says(says[0]), Says(says[1])))) << says[0];
  }
}

TEST(RepeatedForwards, ReentrantCheckpointsAreRefusedWithTheRemedy) {
  for (const bool around_root : {false, true}) {
    for (const int count : {1, 2}) {
      const auto errors = errors_of(count, [&](World& world) {
        ShardedNet model(world, std::make_shared<Net>(1));
        auto x = input_of(world.rank(), 0, kWidth).requires_grad_();
        if (around_root) {
          const UnitBody body = [&](const Several& in) -> Several { return {model(in[0])}; };
          return backward(squares(reentrant(body, x)));
        }
        model.net->around = Around::kReentrant;
        model.run_and_back(x);
      });
      EXPECT_THAT(errors,
                  all_and_one(Says("whose first run was without grad mode", kUseReentrant)));
    }
  }
}

// Naive: it is taken for a recomputation, and its values go nowhere.
TEST(RepeatedForwards, AHookOfABackwardThatCallsTheModelIsRefused) {
  for (const bool grad : {true, false}) {
    const auto errors = errors_of(2, [&](World& world) {
      ShardedNet model(world, std::make_shared<Net>(1));
      const auto y = model(input_of(world.rank(), 0, kWidth));
      auto twice = y * 2.0;
      twice.register_hook([&](const at::Tensor& gradient) {
        const at::AutoGradMode mode(grad);
        model(input_of(world.rank(), 1, kWidth));
        return gradient;
      });
      backward(squares(twice));
    });
    EXPECT_THAT(errors, all_and_one(Says("repeats no recorded forward", kUseReentrant)));
  }
}

// Of another model that the backward does not go through: an ordinary evaluation.
TEST(RepeatedForwards, AHookMayEvaluateAnotherModel) {
  ranks(2).run([](World& world) {
    ShardedNet model(world, std::make_shared<Net>(1));
    ShardedNet teacher(world, std::make_shared<Net>(2));
    auto y = model(input_of(world.rank(), 0, kWidth));
    at::Tensor taught;
    (y * 1.0).sum();
    y.register_hook([&](const at::Tensor& gradient) {
      const at::NoGradGuard no_grad;
      taught = teacher(input_of(world.rank(), 1, kWidth));
      return gradient;
    });
    backward(squares(y));
    EXPECT_TRUE(same_bits(taught, Net(2).forward(input_of(world.rank(), 1, kWidth)).detach()));
    expect_gradients(*model.root, plain_net_gradients(world, std::make_shared<Net>(1)), "student");
  });
}

// Naive: the rank that uses the checkpoint's result gathers what the other one does not.
TEST(RepeatedForwards, RanksThatUseACheckpointOfSeveralUnitsDifferentlyAreTold) {
  const auto errors = errors_of(2, [&](World& world) {
    ShardedNet model(world, std::make_shared<Net>(1));
    model.root->become([&](const Several& in) -> Several {
      const auto plain = product(in[0], model.net->last);
      const auto y = non_reentrant(
          [&](const Several& all) -> Several {
            return {(*model.net->units[2])((*model.net->units[1])((*model.net->units[0])(all[0])))};
          },
          in)[0];
      return {plain, y};
    });
    const auto results = model.root->call({input_of(world.rank(), 0, kWidth)});
    backward(squares(results[0]) + (world.rank() == 0 ? squares(results[1]) : at::zeros({})));
  });
  EXPECT_THAT(errors, all_and_one(Says("around each unit")));
}

// ----------------------------------------------------------- what a front end says of its tensors

/// Parameters and buffers by path, as a front end mirrors them.
struct Tensorholder : torch::nn::Module {
  at::Tensor parameter(const std::string& name, const at::Tensor& value, bool trainable = true) {
    return register_parameter(name, value, trainable);
  }
  at::Tensor buffer(const std::string& name, const at::Tensor& value) {
    return register_buffer(name, value);
  }
};

/// A tensor without values, as of a model on the meta device.
at::Tensor unset(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  auto tensor = at::empty({0}, at::TensorOptions(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

FrontEnd shard(World& world, const std::shared_ptr<torch::nn::Module>& module,
               const ShardOptions& options, UnitBody run = {}) {
  return {module, std::move(run), data_mesh(world), PrecisionPolicy(), options};
}

// Naive: two tensors without memory are two parameters, and training tears them apart.
TEST(FrontEndTensors, PathsThatAreTiedAreOneParameter) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      const auto values = seeded(4, {kWidth, kWidth});
      const auto module = std::make_shared<Tensorholder>();
      const auto embed = module->parameter("embed", unset({kWidth, kWidth}));
      const auto own = module->parameter("own", unset({kWidth}));
      const auto head = module->parameter("head", unset({kWidth, kWidth}));
      ShardOptions options;
      options.tied = {{"embed", "head"}};
      auto unit = shard(world, module, options, [=](const Several& in) -> Several {
        return {at::linear(at::linear(in[0], embed) * own, head)};
      });
      ASSERT_EQ(unit.shards().size(), 2U);
      EXPECT_EQ(unit.contract().parameters[0].aliases, std::vector<std::string>{"head"});
      load_state_dict(unit, {whole_entry("embed", values), whole_entry("own", seeded(5, {kWidth})),
                             whole_entry("head", values)});
      backward(squares(unit(input_of(world.rank(), 0, kWidth))));
      Tensorholder plain;
      const auto tied = plain.parameter("embed", values.clone());
      const auto scale = plain.parameter("own", seeded(5, {kWidth}));
      const auto expected = plain_gradients(plain, world.size(), world.size(), [&](int rank) {
        const auto x = input_of(rank, 0, kWidth);
        backward(squares(at::linear(at::linear(x, tied) * scale, tied)));
      });
      expect_same(whole_gradients(unit), expected);
      std::vector<std::string> names;
      for (const auto& entry : state_dict(unit, StateDictKind::kFull)) names.push_back(entry.name);
      EXPECT_THAT(names, ElementsAre("embed", "head", "own"));
    });
  }
}

TEST(FrontEndTensors, PathsThatMayNotBeTiedAreRefused) {
  ranks(1).run([](World& world) {
    const auto refusal = [&](const at::Tensor& first, const at::Tensor& second,
                             std::vector<std::vector<std::string>> tied = {{"first", "second"}},
                             bool second_trains = true) {
      const auto module = std::make_shared<Tensorholder>();
      module->parameter("first", first);
      module->parameter("second", second, second_trains);
      ShardOptions options;
      options.tied = std::move(tied);
      return refusal_of(ErrorKind::kContract, [&] { shard(world, module, options); });
    };
    EXPECT_EQ(refusal(unset({4}), unset({4})), "");
    EXPECT_EQ(refusal(at::empty({0, 4}), at::empty({0, 4})), "");
    EXPECT_THAT(refusal(unset({4}), unset({2, 2})), Says("first and second", "[4] and [2, 2]"));
    EXPECT_THAT(refusal(unset({4}), unset({4}, at::kBFloat16)), Says("found dtypes"));
    EXPECT_THAT(refusal(unset({4}), unset({4}), {{"first", "second"}}, false),
                Says("one frozen and one trainable"));
    EXPECT_THAT(refusal(seeded(1, {4}), seeded(1, {4})), Says("not in one memory"));
    EXPECT_THAT(refusal(unset({4}), seeded(1, {4})), Says("not in one memory"));
    EXPECT_THAT(refusal(unset({4}), unset({4}), {{"first", "third"}}),
                Says("ShardOptions::tied", "third"));
    EXPECT_THAT(refusal(unset({4}), unset({4}), {{"first", "second"}, {"second"}}),
                Says("second twice"));
    const auto both = seeded(1, {4});
    EXPECT_EQ(refusal(both, both.view({4})), "") << "memory says the same";
  });
}

TEST(FrontEndTensors, UnstoredBuffersAreInNoStateDict) {
  ranks(2).run([](World& world) {
    const auto make = [&] {
      const auto module = std::make_shared<Tensorholder>();
      module->parameter("weight", seeded(1, {kWidth}));
      const auto table = module->buffer("table", seeded(2, {kWidth}));
      module->buffer("mean", seeded(3, {kWidth}));
      const auto inner = module->register_module("inner", std::make_shared<Tensorholder>());
      inner->buffer("mask", table);  // the same tensor, stored under this name
      inner->buffer("cache", seeded(4, {2}));
      return module;
    };
    ShardOptions options;
    options.unstored_buffers = {"table", "inner.cache"};
    auto unit = shard(world, make(), options);
    const auto names = [&] {
      std::set<std::string> all;
      for (const auto& entry : state_dict(unit, StateDictKind::kFull)) all.insert(entry.name);
      return all;
    };
    EXPECT_EQ(names(), (std::set<std::string>{"weight", "table", "mean", "inner.mask"}))
        << "a buffer that is stored in one place is stored";
    options.unstored_buffers = {"table", "inner.mask", "inner.cache"};
    auto other = shard(world, make(), options);
    const auto entries = state_dict(other, StateDictKind::kFull);
    EXPECT_EQ(entries.size(), 2U);
    EXPECT_TRUE(load_state_dict(other, entries).missing.empty());
    EXPECT_REFUSED(
        kContract,
        load_state_dict(other, {entries[0], entries[1], whole_entry("table", seeded(2, {kWidth}))}),
        "table");
    options.unstored_buffers = {"weight"};
    EXPECT_REFUSED(kContract, shard(world, make(), options), "unstored_buffers", "weight");
  });
}

TEST(FrontEndTensors, IgnoredOnesHaveTheirNamesAndAreInNoStateDict) {
  ranks(1).run([](World& world) {
    const auto net = std::make_shared<Net>(1);
    ShardOptions inner, outer;
    inner.ignored_parameters = {net->layers[1]->b};
    outer.ignored_parameters = {net->last};
    ShardedNet model(world, net, {}, inner, outer);
    EXPECT_THAT(model.root->ignored_names(), ElementsAre("last", "layer1.b"));
    std::size_t count = 0;
    for (const auto& entry : state_dict(*model.root, StateDictKind::kFull)) {
      EXPECT_NE(entry.name, "last");
      ++count;
    }
    EXPECT_EQ(count, 5U);
    EXPECT_TRUE(ShardedNet(world, std::make_shared<Net>(1)).root->ignored_names().empty());
  });
}

TEST(FrontEndTensors, WholeParametersAndGradientsAreVisited) {
  ranks(2).run([](World& world) {
    ShardedNet model(world, std::make_shared<Net>(1));
    Tensors plain;
    for (const auto& entry : Net(1).named_parameters()) plain[entry.key()] = entry.value().detach();
    expect_same(whole_parameters(*model.root), plain);
  });
}

}  // namespace
}  // namespace tessera::test::fsdp_front_end_test
