// Deferred weight gradients: a unit waits for what was promised, and what is left over is named.

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/leaf.h"
#include "support/plain.h"
#include "support/quotient.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_deferred_test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kWidth = 5;

class DeferredOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DeferredOnRanks, ::testing::Values(1, 2, 3));

struct PendingGrad {
  grad::GradSink* sink;
  grad::Ticket ticket;
  at::Tensor raw;
};

/// x * w whose weight gradient is promised in backward and handed in later.
class DeferredScale : public torch::autograd::Function<DeferredScale> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w,
                            std::int64_t pending, std::int64_t micro_batch) {
    context->save_for_backward({x, w});
    context->saved_data["pending"] = pending;
    context->saved_data["micro_batch"] = micro_batch;
    return x * w;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto leaf = grad::find_leaf(saved[1]);
    auto& sink = *leaf->sink;
    auto* list =
        reinterpret_cast<std::vector<PendingGrad>*>(context->saved_data["pending"].toInt());
    list->push_back(
        {&sink, sink.promise(leaf->slot, "layer 4", context->saved_data["micro_batch"].toInt()),
         grads[0] * saved[0]});
    return {grads[0] * saved[1], at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class Deferred : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const auto y = DeferredScale::apply(x * eager, weight, reinterpret_cast<std::int64_t>(&pending),
                                        micro_batch++);
    if (redeems_inside && y.requires_grad()) {
      // Runs before DeferredScale's backward; pending products of earlier ones are handed in while
      // this one runs.
      y.register_hook([this](const at::Tensor& grad) {
        redeem();
        return grad;
      });
    }
    return y;
  }
  void redeem() {
    for (const auto& one : std::exchange(pending, {})) one.sink->redeem(one.ticket, one.raw);
  }
  at::Tensor eager = register_parameter("eager", seeded(1, {kWidth}));
  at::Tensor weight = register_parameter("weight", seeded(2, {kWidth}));
  std::vector<PendingGrad> pending;
  std::int64_t micro_batch = 0;
  bool redeems_inside = false;
};

Tensors deferred_expected(int count, int micro_batches) {
  Deferred plain;
  // Unsharded the promise is an ordinary gradient.
  const auto forward = [&](const at::Tensor& x) { return x * plain.eager * plain.weight; };
  Tensors slots, sums;
  for (int rank = 0; rank < count; ++rank) {
    slots.clear();
    for (int i = 0; i < micro_batches; ++i) {
      for (const auto& [name, raw] : raw_gradients(
               plain, [&] { backward(forward(input_of(rank, i, kWidth).select(0, 0)).sum()); })) {
        slots[name] = slots[name].defined() ? slots[name] + raw : raw;
      }
    }
    for (const auto& [name, slot] : slots)
      sums[name] = sums[name].defined() ? sums[name] + slot : slot;
  }
  for (auto& [name, sum] : sums) sum = over(sum, count);
  return sums;
}

// Naive: the unit is reduced when its marker ran, without the gradient that is still pending.
TEST_P_ON_RANKS(DeferredOnRanks, DeferredGradientsHandedInAfterTheBackward, GetParam()) {
  auto module = std::make_shared<Deferred>();
  auto handle = fully_shard(module, data_mesh(world));
  const auto optimizer = make_sgd(handle, sgd(0.0));
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    backward(handle.forward(input_of(world.rank(), 0, kWidth).select(0, 0)).sum());
    EXPECT_EQ(module->pending.size(), 1U);
    const auto view = handle.shards()[0];
    EXPECT_FALSE(view.shard.grad().defined()) << "the step's gradients are not complete";
    module->redeem();
    expect_same(whole_gradients(handle), deferred_expected(world.size(), 1));
    optimizer->step();
  }
}

/// A unit with deferred gradients, and one that some micro-batches leave out.
class WithHead : public torch::nn::Module {
 public:
  explicit WithHead(const Mesh& mesh)
      : deferred(std::make_shared<Deferred>()),
        first(register_module("first",
                              std::make_shared<Sharded<Deferred>>(fully_shard(deferred, mesh)))),
        head(register_module("head", std::make_shared<Sharded<Scale>>(fully_shard(
                                         std::make_shared<Scale>(seeded(3, {kWidth})), mesh)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = first->forward(x);
    return uses_head ? head->forward(y) : y;
  }
  std::shared_ptr<Deferred> deferred;
  std::shared_ptr<Sharded<Deferred>> first;
  std::shared_ptr<Sharded<Scale>> head;
  bool uses_head = true;
};

// Naive: what the first micro-batch reduced at once is never published, and added to the next step.
TEST_P_ON_RANKS(DeferredOnRanks, AUnitThatOnlyTheFirstMicroBatchUsesHasItsGradientInThisStep,
                GetParam()) {
  auto module = std::make_shared<WithHead>(data_mesh(world));
  auto handle = fully_shard(module, data_mesh(world));
  std::vector<Tensors> steps;
  for (int step = 0; step < 3; ++step) {
    handle.zero_grad();
    for (const bool uses_head : {true, false}) {
      module->uses_head = uses_head;
      backward(handle.forward(input_of(world.rank(), 0, kWidth).select(0, 0)).sum());
    }
    module->deferred->redeem();
    EXPECT_TRUE(handle.named_parameters()["head.weight"].grad().defined()) << step;
    steps.push_back(whole_gradients(handle));
    expect_same(steps.back(), steps.front(), concat("step ", step));
  }
  EXPECT_TRUE(steps.front().at("head.weight").ne(0).all().item<bool>());
}

TEST_P_ON_RANKS(DeferredOnRanks, DeferredGradientsOfSeveralMicroBatchesHandedInLater, GetParam()) {
  for (const bool inside : {false, true}) {
    auto module = std::make_shared<Deferred>();
    module->redeems_inside = inside;
    auto handle = fully_shard(module, data_mesh(world));
    handle.set_requires_gradient_sync(false);
    for (int i = 0; i < 3; ++i) {
      handle.set_requires_gradient_sync(i == 2);
      backward(handle.forward(input_of(world.rank(), i, kWidth).select(0, 0)).sum());
    }
    module->redeem();
    expect_same(whole_gradients(handle), deferred_expected(world.size(), 3),
                inside ? "inside" : "after");
  }
}

TEST_ON_RANKS(DeferredGradients, HandedInTwiceNamesLayerAndMicroBatch, 1) {
  auto module = std::make_shared<Deferred>();
  auto handle = fully_shard(module, data_mesh(world));
  backward(handle.forward(seeded(1, {kWidth})).sum());
  const auto twice = module->pending;
  module->redeem();
  EXPECT_THAT(thrown_by([&] { twice[0].sink->redeem(twice[0].ticket, twice[0].raw); }),
              Says("weight", "layer 4", "micro-batch 0", "twice"));
}

/// Two units one after the other; their pending products are handed in by redeem().
struct TwoDeferred : torch::nn::Module {
  explicit TwoDeferred(const Mesh& mesh) {
    for (int i = 0; i < 2; ++i) {
      modules.push_back(std::make_shared<Deferred>());
      handles.push_back(register_module(concat("unit", i), std::make_shared<Sharded<Deferred>>(
                                                               fully_shard(modules.back(), mesh))));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return handles[1]->forward(handles[0]->forward(x)); }
  void redeem() {
    for (const auto& module : modules) module->redeem();
  }
  std::vector<std::shared_ptr<Deferred>> modules;
  std::vector<std::shared_ptr<Sharded<Deferred>>> handles;
};

/// Throws in backward once all ranks have come there.
class ThrowsLast : public torch::autograd::Function<ThrowsLast> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t seat) {
    context->saved_data["seat"] = seat;
    return x * 1.0;
  }
  static variable_list backward(AutogradContext* context, variable_list) {
    reinterpret_cast<RankBarrier::Seat*>(context->saved_data["seat"].toInt())->wait();
    throw std::runtime_error("the user's backward went wrong");
  }
};

// Naive: forgetting the tickets of a failed step closes them, and the units whose backward was over
// are reduced on the way to the next step.
TEST_P(DeferredOnRanks, TicketsOfAFailedStepAreForgottenAndTheNextStepIsRight) {
  RankBarrier meeting(GetParam());
  ranks(GetParam()).run([&](World& world) {
    RankBarrier::Seat seat(meeting);
    const auto step = [&](TwoDeferred& module, Sharded<TwoDeferred>& handle) {
      handle.zero_grad();
      backward(handle.forward(input_of(world.rank(), 0, kWidth).select(0, 0)).sum());
      module.redeem();
      return whole_gradients(handle);
    };
    const auto untroubled = std::make_shared<TwoDeferred>(data_mesh(world));
    auto same = fully_shard(untroubled, data_mesh(world));
    const auto expected = step(*untroubled, same);

    const auto module = std::make_shared<TwoDeferred>(data_mesh(world));
    auto handle = fully_shard(module, data_mesh(world));
    const auto x = input_of(world.rank(), 1, kWidth).select(0, 0).requires_grad_();
    const auto place = reinterpret_cast<std::int64_t>(&seat);
    EXPECT_NE(thrown_by([&] { backward(handle.forward(ThrowsLast::apply(x, place)).sum()); }), "");
    if (world.size() > 1) world.recover();
    const auto pending = std::exchange(module->modules[1]->pending, {});
    module->modules[0]->pending.clear();
    const auto reductions = handle.unit()->runtime().reductions_issued();
    expect_same(step(*module, handle), expected);
    EXPECT_EQ(handle.unit()->runtime().reductions_issued() - reductions, world.size() > 1 ? 2 : 0);
    ASSERT_EQ(pending.size(), 1U);
    EXPECT_THAT(thrown_by([&] { pending[0].sink->redeem(pending[0].ticket, pending[0].raw); }),
                Says("failed", "layer 4"));
  });
}

// Naive: the norm and the gradients of the step before, as if they were this one's.
TEST_P_ON_RANKS(DeferredOnRanks, NormAndWholeGradientsWaitForPendingGradients, GetParam()) {
  auto module = std::make_shared<Deferred>();
  auto handle = fully_shard(module, data_mesh(world));
  backward(handle.forward(seeded(1, {kWidth})).sum());
  EXPECT_THAT(thrown_by([&] { clip_grad_norm(handle, 1.0); }), Says("gradient norm", "layer 4"));
  EXPECT_THAT(thrown_by([&] { whole_gradients(handle); }), Says("layer 4"));
  module->redeem();
  EXPECT_GT(clip_grad_norm(handle, 1.0), 0);
}

TEST_P_ON_RANKS(DeferredOnRanks, LeftOverAtTheStepNamesLayerAndMicroBatch, GetParam()) {
  auto module = std::make_shared<Deferred>();
  module->micro_batch = 3;
  auto handle = fully_shard(module, data_mesh(world));
  const auto optimizer = make_sgd(handle, {});
  backward(handle.forward(seeded(1, {kWidth})).sum());
  EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("weight", "layer 4", "micro-batch 3"));
}

// Naive: a sum in the raw dtype, where 256 + 1 is 256 and the promise of 1 is lost.
TEST_P_ON_RANKS(DeferredOnRanks, PromisesOfTwoHundredFiftySixOneAndMinusTwoHundredFiftySixMakeOne,
                GetParam()) {
  auto policy = in_bfloat16();
  policy.final_dtype = DType::kFloat32;
  auto module = std::make_shared<Deferred>();
  {
    const at::NoGradGuard no_grad;
    module->eager.fill_(1);  // the promises are the inputs themselves
  }
  auto handle = fully_shard(module, data_mesh(world), policy);
  for (const double value : {256.0, 1.0, -256.0}) {
    const bool last = value < 0;
    handle.set_requires_gradient_sync(last);
    backward(handle.forward(here(at::full({kWidth}, value))).sum());
    module->redeem();
  }
  EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"), here(at::ones({kWidth}))));
}

}  // namespace
}  // namespace tessera::test::fsdp_deferred_test
