// Forwards that the checkpoints of a front end run again, and what is no repetition.

#include "dist/front_end_net.h"

namespace tessera::test::fsdp_repeated_forwards_test {
namespace {

using namespace front_end_net;  // NOLINT(google-build-using-namespace): the model of all tests

constexpr auto kUseReentrant = "use_reentrant=False";

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

// One tensor in two units: their root owns it, and shares it with both in either run.
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

// A function without grad mode computes so again.
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

// The hook runs another model that the backward does not go through: an ordinary evaluation.
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

}  // namespace
}  // namespace tessera::test::fsdp_repeated_forwards_test
