// `.grad` as a tensor that users hold, clear and replace: what is whose, and what a later step may
// write to. The reference is PyTorch's unsharded answer: an existing gradient is added to in place.

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/torch_dtype.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"

namespace tessera::test::fsdp_kept_gradients_test {
namespace {

constexpr std::int64_t kWidth = 6;

/// Ranks, replicas, dtype of the final gradient, divide factor: with fp32 and 1 the gradient is the
/// accumulator itself, with replicas the sum over them, else memory of its own.
struct Layout {
  int ranks, replicas;
  DType final;
  double divide;
  ThreadBackend backend = ThreadBackend::kInProcess;
};

class KeptGradients : public ::testing::TestWithParam<Layout> {
 protected:
  /// Two parameters of one bucket: the gradient of `one` is x, that of `two` twice that.
  struct Pair : torch::nn::Module {
    at::Tensor one = register_parameter("one", here(at::ones({kWidth})));
    at::Tensor two = register_parameter("two", here(at::ones({kWidth})));
    at::Tensor forward(const at::Tensor& x) { return (x * one + 2 * x * two).sum(); }
  };

  void run(const std::function<void(World&, Sharded<Pair>&)>& body) const {
    ranks(GetParam().ranks, GetParam().backend).run([&](World& world) {
      auto handle = shard(world);
      body(world, handle);
    });
  }

  static Sharded<Pair> shard(World& world) {
    PrecisionPolicy policy;
    policy.final_dtype = GetParam().final;
    ShardOptions options;
    options.divide_factor = GetParam().divide;
    return fully_shard(std::make_shared<Pair>(), data_mesh(world, GetParam().replicas), policy,
                       options);
  }

  /// `body` is refused on all ranks, on the first one that comes to it by this name.
  static void expect_refusal(const std::function<void(World&, Sharded<Pair>&)>& body) {
    std::vector<std::string> errors(static_cast<std::size_t>(GetParam().ranks));
    ranks(GetParam().ranks, GetParam().backend).run([&](World& world) {
      errors[static_cast<std::size_t>(world.rank())] = thrown_by([&] {
        auto handle = shard(world);
        body(world, handle);
      });
    });
    EXPECT_THAT(errors, Each(Not(std::string())));
    EXPECT_THAT(errors, Contains(Says("gradient of one", "wait to be added to it")));
  }

  /// A micro-batch whose gradients add up to `value` and 2 `value` over all ranks.
  static void micro_batch(World& world, Sharded<Pair>& handle, double value) {
    const auto share = value * GetParam().divide / world.size();
    backward(handle.forward(here(at::full({kWidth}, share))));
  }

  static at::Tensor& grad_of(const ShardedBase& handle, const std::string& name) {
    for (const auto& view : handle.shards()) {
      if (view.contract->name == name) return view.shard.mutable_grad();
    }
    throw std::runtime_error("no " + name);
  }

  static bool holds(const at::Tensor& gradient, double value) {
    return at::equal(gradient, at::full_like(gradient, value));
  }
};
INSTANTIATE_TEST_SUITE_P(
    Layouts, KeptGradients,
    ::testing::Values(Layout{1, 1, DType::kFloat32, 1}, Layout{1, 1, DType::kFloat32, 2},
                      Layout{1, 1, DType::kBFloat16, 1}, Layout{2, 1, DType::kFloat32, 1},
                      Layout{4, 1, DType::kFloat32, 4}, Layout{2, 2, DType::kFloat32, 2},
                      Layout{2, 2, DType::kBFloat16, 1}, Layout{4, 1, DType::kFloat32, 1},
                      Layout{4, 2, DType::kFloat32, 1},
                      Layout{2, 1, DType::kFloat32, 1, ThreadBackend::kGloo}),
    [](const auto& one) {
      const auto& layout = one.param;
      return concat(layout.backend == ThreadBackend::kGloo ? "Gloo" : "", layout.ranks, "Ranks",
                    layout.replicas, "Replicas", to_string(layout.final), "Over",
                    static_cast<int>(layout.divide));
    });

// Naive: the next step writes its gradients into what the user has kept of this one.
TEST_P(KeptGradients, AreNotWrittenToByALaterStep) {
  run([](World& world, Sharded<Pair>& handle) {
    std::vector<std::pair<at::Tensor, double>> kept;
    for (int step = 1; step <= 4; ++step) {
      handle.zero_grad();
      micro_batch(world, handle, step);
      kept.emplace_back(grad_of(handle, "one"), step);                 // the gradient itself
      kept.emplace_back(grad_of(handle, "two").detach(), 2.0 * step);  // what shares its memory
      for (const auto& [gradient, value] : kept) EXPECT_TRUE(holds(gradient, value)) << step;
      EXPECT_TRUE(holds(grad_of(handle, "two"), 2.0 * step));
    }
  });
}

// As unsharded: while it stands it is one tensor, and says when it was added to.
TEST_P(KeptGradients, AreAddedToInPlaceWhileTheyStand) {
  run([](World& world, Sharded<Pair>& handle) {
    micro_batch(world, handle, 1);
    const at::Tensor kept = grad_of(handle, "one");
    const auto version = kept._version();
    micro_batch(world, handle, 2);
    EXPECT_TRUE(kept.is_same(grad_of(handle, "one")));
    EXPECT_TRUE(holds(kept, 3));
    EXPECT_GT(kept._version(), version);
    handle.zero_grad(/*set_to_none=*/false);
    micro_batch(world, handle, 5);
    EXPECT_TRUE(kept.is_same(grad_of(handle, "one")));
    EXPECT_TRUE(holds(kept, 5));
    EXPECT_TRUE(holds(grad_of(handle, "two"), 10));
  });
}

// One is cleared and kept, its neighbour in the same memory stands.
TEST_P(KeptGradients, OfOneParameterLeaveItsNeighboursSum) {
  run([](World& world, Sharded<Pair>& handle) {
    micro_batch(world, handle, 1);
    const at::Tensor kept = grad_of(handle, "one");
    const at::Tensor standing = grad_of(handle, "two");
    grad_of(handle, "one").reset();
    micro_batch(world, handle, 3);
    EXPECT_TRUE(holds(kept, 1));
    EXPECT_TRUE(holds(grad_of(handle, "one"), 3));
    EXPECT_TRUE(standing.is_same(grad_of(handle, "two")));
    EXPECT_TRUE(holds(standing, 8));
    micro_batch(world, handle, 1);
    EXPECT_TRUE(holds(kept, 1));
    EXPECT_TRUE(holds(grad_of(handle, "one"), 4));
    EXPECT_TRUE(holds(standing, 10));
  });
}

// Naive: new memory at every step, since somebody once kept a gradient.
TEST_P(KeptGradients, CostNothingOnceNoOneKeepsAny) {
  run([](World& world, Sharded<Pair>& handle) {
    micro_batch(world, handle, 1);
    at::Tensor kept = grad_of(handle, "one");
    handle.zero_grad();
    micro_batch(world, handle, 2);
    kept = at::Tensor();
    const void* place = grad_of(handle, "two").const_data_ptr();
    for (int step = 3; step < 6; ++step) {
      handle.zero_grad();
      micro_batch(world, handle, step);
      // Devices give the memory back in between.
      if (world.device().is_cpu()) {
        EXPECT_EQ(grad_of(handle, "two").const_data_ptr(), place);
      }
      EXPECT_TRUE(holds(grad_of(handle, "two"), 2.0 * step));
    }
  });
}

TEST_P(KeptGradients, SurviveALossScaleThatComesAndGoes) {
  run([](World& world, Sharded<Pair>& handle) {
    auto& runtime = handle.unit()->runtime();
    std::vector<std::pair<at::Tensor, double>> kept;
    runtime.set_has_scaler(true);
    for (int step = 1; step <= 5; ++step) {
      const double scale = step % 2 == 0 ? 8.0 : 1.0;
      handle.zero_grad();
      runtime.set_loss_scale(scale, "test");
      micro_batch(world, handle, step * scale);
      kept.emplace_back(grad_of(handle, "one"), step);
      for (const auto& [gradient, value] : kept) EXPECT_TRUE(holds(gradient, value)) << step;
    }
    handle.zero_grad();
    runtime.set_loss_scale(1.0, "test");
    runtime.set_has_scaler(false);
  });
}

// `.grad` of a shard takes a tensor of any device. Naive: libtorch names two devices, no parameter.
TEST_ON_RANKS(GradientsElsewhere, AreRefusedByName, 1) {
  const auto block = std::make_shared<Block>(1, kWidth);
  auto handle = fully_shard(block, data_mesh(world));
  const auto optimizer = make_sgd(handle, sgd(0.1));
  const auto step = [&] { backward(squares(handle.forward(here(at::ones({kWidth}))))); };
  step();
  for (const auto& view : handle.shards()) {
    auto& grad = view.shard.mutable_grad();
    if (view.contract->name == "b") grad = at::empty_like(grad, at::TensorOptions(at::kMeta));
  }
  const auto is_named = Says("gradient of b: found it on meta, expected ", world.device().str());
  EXPECT_THAT(thrown_by([&] { gradient_norm(handle); }), is_named);
  EXPECT_THAT(thrown_by([&] { optimizer->step(); }), is_named);
  EXPECT_THAT(thrown_by(step), is_named);
  handle.zero_grad();
  step();
  EXPECT_EQ(thrown_by([&] { optimizer->step(); }), "");
}

// ---------------------------------------------------------------- between unsynced micro-batches

// Naive, with one shard rank: the whole bucket's sums go; with several: nothing of what waits does.
TEST_P(KeptGradients, ZerosClearTheSumOfTheirParameterAlone) {
  run([](World& world, Sharded<Pair>& handle) {
    for (const bool shown_before : {false, true}) {
      handle.zero_grad();
      const double shown = shown_before ? 16 : 0;
      if (shown_before) micro_batch(world, handle, shown);
      handle.set_requires_gradient_sync(false);
      micro_batch(world, handle, 1);
      for (const auto& view : handle.shards()) {
        if (view.contract->name != "one") continue;
        view.shard.mutable_grad() = here(at::zeros(
            {view.end - view.begin}, at::TensorOptions().dtype(to_scalar_type(GetParam().final))));
      }
      micro_batch(world, handle, 2);
      handle.set_requires_gradient_sync(true);
      micro_batch(world, handle, 4);
      EXPECT_TRUE(holds(grad_of(handle, "one"), 6)) << shown_before;
      EXPECT_TRUE(holds(grad_of(handle, "two"), 2 * (shown + 7))) << shown_before;
    }
  });
}

// Naive: with one shard rank what waits is cleared as well, with several it is not.
TEST_P(KeptGradients, ClearingOneThatStandsClearsWhatWaitsOnAnyNumberOfRanks) {
  run([](World& world, Sharded<Pair>& handle) {
    micro_batch(world, handle, 16);
    handle.set_requires_gradient_sync(false);
    micro_batch(world, handle, 1);
    grad_of(handle, "one").reset();
    micro_batch(world, handle, 2);
    handle.set_requires_gradient_sync(true);
    micro_batch(world, handle, 4);
    EXPECT_TRUE(holds(grad_of(handle, "one"), 6));
    EXPECT_TRUE(holds(grad_of(handle, "two"), 46));
  });
}

// Naive: where the gradient is the accumulator itself a change in place counts as in the sum, while
// with several ranks what waits lies elsewhere.
TEST_P(KeptGradients, ZerosWrittenInPlaceClearWhatWaitsOnAnyNumberOfRanks) {
  run([](World& world, Sharded<Pair>& handle) {
    for (const bool all : {false, true}) {
      handle.zero_grad();
      micro_batch(world, handle, 16);
      handle.set_requires_gradient_sync(false);
      micro_batch(world, handle, 1);
      if (all) {
        handle.zero_grad(/*set_to_none=*/false);
      } else {
        grad_of(handle, "one").zero_();
      }
      micro_batch(world, handle, 2);
      handle.set_requires_gradient_sync(true);
      micro_batch(world, handle, 4);
      EXPECT_TRUE(holds(grad_of(handle, "one"), 6)) << all;
      EXPECT_TRUE(holds(grad_of(handle, "two"), all ? 12 : 46)) << all;
    }
  });
}

// Naive: the reduction that is still pending adds to the tensor that the user has.
TEST_P(KeptGradients, ZerosWrittenInPlaceClearWhatWaitsForTheLastBackward) {
  run([](World& world, Sharded<Pair>& handle) {
    micro_batch(world, handle, 16);
    const at::Tensor kept = grad_of(handle, "one");
    handle.set_is_last_backward(false);
    micro_batch(world, handle, 1);
    EXPECT_TRUE(world.size() == 1 || holds(kept, 16)) << "as the last backward showed it";
    kept.zero_();
    micro_batch(world, handle, 2);
    handle.set_is_last_backward(true);
    micro_batch(world, handle, 4);
    EXPECT_TRUE(kept.is_same(grad_of(handle, "one")));
    EXPECT_TRUE(holds(kept, 6));
    EXPECT_TRUE(holds(grad_of(handle, "two"), 46));
  });
}

// Naive: what was scaled before counts as scaled while the first micro-batch waited.
TEST_P(KeptGradients, ValuesWrittenInPlaceBeforeAnythingWaitsCount) {
  run([](World& world, Sharded<Pair>& handle) {
    micro_batch(world, handle, 16);
    grad_of(handle, "one").mul_(0.5);
    handle.set_requires_gradient_sync(false);
    micro_batch(world, handle, 1);
    micro_batch(world, handle, 2);
    handle.set_requires_gradient_sync(true);
    micro_batch(world, handle, 4);
    EXPECT_TRUE(holds(grad_of(handle, "one"), 15));
    EXPECT_TRUE(holds(grad_of(handle, "two"), 46));
  });
}

// Pending gradients and the user's writes can no longer be told apart on one rank; so on none.
TEST_P(KeptGradients, OtherValuesWhileSomethingWaitsAreRefused) {
  expect_refusal([](World& world, Sharded<Pair>& handle) {
    handle.set_requires_gradient_sync(false);
    micro_batch(world, handle, 1);
    for (const auto& view : handle.shards()) {
      if (view.contract->name != "one") continue;
      const auto final = at::TensorOptions().dtype(to_scalar_type(GetParam().final));
      view.shard.mutable_grad() = here(at::ones({view.end - view.begin}, final));
    }
    micro_batch(world, handle, 2);
  });
}

// Naive, where the gradient is the accumulator: half of what was shown and all of what waits.
TEST_P(KeptGradients, OtherValuesWrittenInPlaceWhileSomethingWaitsAreRefused) {
  for (const bool until_the_last : {false, true}) {
    expect_refusal([&](World& world, Sharded<Pair>& handle) {
      micro_batch(world, handle, 16);
      if (until_the_last) {
        handle.set_is_last_backward(false);
      } else {
        handle.set_requires_gradient_sync(false);
      }
      micro_batch(world, handle, 1);
      grad_of(handle, "one").mul_(0.5);
      micro_batch(world, handle, 2);
    });
  }
}

}  // namespace
}  // namespace tessera::test::fsdp_kept_gradients_test
