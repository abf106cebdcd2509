// A region that cannot be replayed stays eager, by its reason, and computes what it computed
// before; what a recording cannot see is found by comparing; after errors the region can be used
// again.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <stdexcept>

#include "base/test_hooks.h"
#include "capture/replay/region_program.h"
#include "dist/replayed.h"

namespace tessera::test::replay_refused_test {
namespace {

using ::testing::SizeIs;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int kRecordings = 3;
constexpr int kSteps = 8;

using Body = std::function<Several(Part&, const Several&)>;

std::uint64_t seed_of(World& world, int step) {
  return 1000 + static_cast<std::uint64_t>(100 * step + world.rank());
}

Several one_input(World& world, int step) { return {rows(seed_of(world, step))}; }

struct Expected {
  std::string why;  ///< of eager calls, but for the first ones
  TwinOptions options = {};
  std::function<Several(World&, int step)> inputs = one_input;
};

/// Steps of both twins are the same, and the reason is counted.
void expect_eager(World& world, const Model::Run& run, const Expected& expected) {
  Twins twins(data_mesh(world), run, expected.options);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    const auto inputs = expected.inputs(world, step);
    for (auto* handle : {&twins.eager, &twins.replayed}) {
      handle->set_requires_gradient_sync(true);
    }
    twins.both([&](Sharded<Model>& handle) {
      // Arguments may be changed: each has its own. So may the process's random numbers.
      Several own;
      for (const auto& input : inputs) own.push_back(input.defined() ? input.clone() : input);
      if (world.size() == 1) at::manual_seed(static_cast<std::uint64_t>(step));
      auto left = run_one(handle, own);
      left.insert(left.end(), own.begin(), own.end());
      return left;
    });
    twins.update();
  }
  const auto calls = twins.calls();
  EXPECT_THAT(reasons(calls), SizeIs(1));
  EXPECT_THAT(reasons(calls), Each(Says(expected.why)));
  EXPECT_EQ(calls.replayed, 0);
}

void expect_eager(const Body& body, const Expected& expected, int count = 2) {
  ranks(count).run([&](World& world) { expect_eager(world, around(body), expected); });
}

// ------------------------------------------------------------------------------ what is recorded

// One rank: numbers come from the process's generator.
TEST(ReplayRefuses, RandomNumbers) {
  const auto body = [](Part& part, const Several& in) {
    return Several{at::dropout(part.layer(in[0]), 0.5, /*train=*/true)};
  };
  expect_eager(body, {"random numbers, of aten::bernoulli_"}, 1);
}

TEST(ReplayRefuses, ValuesThatTheHostReads) {
  const auto body = [](Part& part, const Several& in) {
    return Several{part.layer(in[0]) * in[0].abs().mean().item<float>()};
  };
  expect_eager(body, {"values that the host reads, by aten::_local_scalar_dense"});
}

TEST(ReplayRefuses, SizesThatFollowFromData) {
  const auto body = [](Part& part, const Several& in) {
    const auto at = at::nonzero(in[0].select(1, 0) > -10.0).flatten();
    return Several{part.layer(in[0]).index_select(0, at)};
  };
  expect_eager(body, {"sizes that follow from data, of aten::nonzero"});
}

TEST(ReplayRefuses, MemoryThatAKernelOutsideTheDispatcherWrites) {
  const auto body = [](Part& part, const Several& in) {
    const at::Tensor mine = at::empty({3, Part::kWidth});
    const float* from = in[0].const_data_ptr<float>();
    for (std::int64_t i = 0; i < mine.numel(); ++i) mine.data_ptr<float>()[i] = from[i] + 1.0F;
    return Several{part.layer(in[0]) * mine};
  };
  expect_eager(body, {"memory that aten::mul.Tensor reads and no operation has written"});
}

TEST(ReplayRefuses, ChangesOfArguments) {
  const auto body = [](Part& part, const Several& in) {
    in[1].add_(1.0);
    return Several{part.layer(in[0]) * in[1]};
  };
  Expected expected{"a change of what came in from outside, by aten::add_"};
  expected.inputs = [](World& world, int step) {
    return Several{rows(seed_of(world, step)), rows(seed_of(world, step) + 1)};
  };
  expect_eager(body, expected);
}

TEST(ReplayRefuses, ChangesOfBuffers) {
  const auto body = [](Part& part, const Several& in) {
    part.table.mul_(0.9).add_(in[0].detach().mean(0), 0.1);
    return Several{part.layer(in[0]) * part.table};
  };
  expect_eager(body, {"a change of what came in from outside, by aten::mul_"});
}

// No operation writes it. Naive: the program runs behind the body, and finds what that left.
TEST(ReplayRefuses, TablesThatTheBodyRefillsThroughAPointer) {
  const auto body = [](Part& part, const Several& in) {
    auto* table = static_cast<float*>(part.table.mutable_data_ptr());
    const float* from = in[0].const_data_ptr<float>();
    std::copy_n(from, Part::kWidth, table);
    return Several{part.layer(in[0]) * part.table};
  };
  expect_eager(body, {"memory from outside that a call changes by no operation"});
}

// Nothing to lay out, but large results to hold twice.
TEST(ReplayRefuses, AProductAlone) {
  const auto body = [](Part& part, const Several& in) {
    return Several{nn::linear(in[0], part.weight)};
  };
  expect_eager(body, {"a product alone"});
}

// An operation that declares no change of the sums that it keeps. Naive: a comparison that keeps
// them once more.
TEST(ReplayRefuses, RunningSumsOfABatchNorm) {
  const auto body = [](Part& part, const Several& in) {
    return Several{at::batch_norm(part.layer(in[0]), part.norm, part.bias, part.table, part.sums,
                                  /*training=*/true, 0.1, 1e-5, false)};
  };
  expect_eager(body, {"a change of what came in from outside, by aten::native_batch_norm"});
}

TEST(ReplayRefuses, ResultsThatAreArguments) {
  const auto body = [](Part& part, const Several& in) { return Several{part.layer(in[0]), in[0]}; };
  expect_eager(body, {"a result that is an argument or a parameter"});
}

TEST(ReplayRefuses, ResultsThatAreViewsOfParameters) {
  const auto body = [](Part& part, const Several& in) {
    return Several{part.layer(in[0]), part.weight.t()};
  };
  expect_eager(body, {"a result that is an argument or a parameter"});
}

TEST_ON_RANKS(ReplayRefuses, ArgumentsThatShareMemory, 2) {
  const auto run = [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    const auto x = inputs[0] * model.before;
    return part.region({x, x.slice(1, 0, 1)},
                       [&part](const Several& in) { return Several{part.layer(in[0]) * in[1]}; });
  };
  // The two results are added up here as there: one use each.
  expect_eager(world, run, {"arguments that share memory"});
}

// An argument that is the parameter that is read inside, in the first calls. Naive: a program that
// takes every other argument for it from then on.
TEST_ON_RANKS(ReplayRefuses, ArgumentsThatAreParameters, 1) {
  const auto run = [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    const bool is_other = model.calls > 5;
    const auto y =
        part.region({inputs[0], is_other ? part.bias * 2.0 : part.norm},
                    [&part](const Several& in) { return Several{in[0] * in[1] + part.norm}; });
    return Several{y[0] * model.after};
  };
  TwinOptions options;
  options.prepare = [](Model& model) {
    for (auto& each : model.parts[0]->parameters()) each.set_requires_grad(false);
  };
  Twins twins(data_mesh(world), run, options);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    twins.step({{one_input(world, step)[0].set_requires_grad(true)}});
  }
  EXPECT_THAT(reasons(twins.calls()), ElementsAre("an argument that is a parameter or a buffer"));
}

TEST_ON_RANKS(ReplayRefuses, UnitsInside, 2) {
  const auto make = [&] {
    const auto chain = std::make_shared<Chain>(1, 1, Part::kWidth);
    chain->shard_blocks(data_mesh(world));
    return chain;
  };
  class Outer : public torch::nn::Module {
   public:
    explicit Outer(std::shared_ptr<Chain> inner)
        : chain(register_module("chain", std::move(inner))) {}
    at::Tensor forward(const at::Tensor& x) {
      return grad::in_region(grad::regions_here(), chain, "", {x}, [this](const Several& in) {
        return Several{chain->forward(in[0])};
      })[0];
    }
    std::shared_ptr<Chain> chain;
  };
  auto eager = fully_shard(std::make_shared<Outer>(make()), data_mesh(world));
  auto replayed = fully_shard(std::make_shared<Outer>(make()), data_mesh(world));
  compile(replayed, {.mode = CompileMode::kReplay});
  for (int step = 0; step < kSteps; ++step) {
    for (auto* handle : {&eager, &replayed}) {
      handle->zero_grad();
      backward(squares(handle->forward(rows(seed_of(world, step)))));
    }
    expect_same(whole_gradients(replayed), whole_gradients(eager));
  }
  EXPECT_THAT(reasons(replay_calls(replayed)), ElementsAre("a unit inside"));
}

TEST_ON_RANKS(ReplayRefuses, ParametersThatAreNotSharded, 2) {
  Expected expected{"a parameter that is not sharded"};
  expected.options.options = [](Model& model) {
    ShardOptions options;
    options.ignored_parameters = {model.parts[0]->bias};
    return options;
  };
  Twins twins(data_mesh(world), one_layer(), expected.options);
  for (int step = 0; step < kSteps; ++step) {
    twins.step({one_input(world, step)});
    EXPECT_TRUE(same_bits(twins.of_replayed().parts[0]->bias.grad(),
                          twins.of_eager().parts[0]->bias.grad()));
  }
  EXPECT_THAT(reasons(twins.calls()), ElementsAre(expected.why));
  EXPECT_EQ(twins.calls().recorded, 0);
}

TEST_ON_RANKS(ReplayRefuses, WeightGradientsThatArePutOff, 2) {
  Twins twins(data_mesh(world), one_layer());
  for (int step = 0; step < 2 * kSteps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    // The recorded products were not deferred.
    const bool defers = step > kRecordings && step % 3 == 2;
    twins.both([&](Sharded<Model>& handle) {
      handle.set_defer_weight_gradients(defers);
      auto left = run_one(handle, one_input(world, step));
      if (defers) handle.run_weight_gradients();
      return left;
    });
    twins.update();
  }
  EXPECT_THAT(reasons(twins.calls()), Contains("weight gradients are deferred"));
  EXPECT_GT(twins.calls().replayed, 0);
}

// Naive: the operand of the deferred product is gone once autograd has used what was handed out,
// the gradient of another argument.
TEST_ON_RANKS(ReplayPutsOff, ProductsOfWhatIsHandedOut, 1) {
  Twins twins(data_mesh(world), [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    const Several all{inputs[0] * model.before, inputs[1] * model.after};
    return part.region(all, [&part](const Several& in) {
      return Several{(nn::linear(in[0], part.weight) + in[1]).tanh()};
    });
  });
  twins.steps(kSteps, [&](Sharded<Model>& handle, int step) {
    handle.set_defer_weight_gradients(true);
    const auto x = rows(seed_of(world, step));
    auto left = run_one(handle, {x, rows(seed_of(world, step + 100))});
    Several others;  // take the place of what is free
    for (int i = 0; i < 16; ++i) others.push_back(at::full_like(x, 1e6));
    handle.run_weight_gradients();
    return left;
  });
  EXPECT_GT(twins.calls().replayed, 0);
}

TEST_ON_RANKS(ReplayRefuses, CallsUnderAutocast, 2) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                return Several{at::linear(in[0], part.weight, part.bias).tanh()};
              }));
  for (int step = 0; step < 2 * kSteps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    at::autocast::set_autocast_enabled(at::kCPU, step % 3 == 2);
    twins.step({one_input(world, step)});
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
  EXPECT_THAT(reasons(twins.calls()), ElementsAre("autocast"));
  EXPECT_GT(twins.calls().replayed, 4);
}

TEST_ON_RANKS(ReplayRefuses, ChosenTargetsOfABackward, 1) {
  Twins twins(data_mesh(world), one_layer());
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    if (step == 2 || step == 6) {
      const auto x = rows(seed_of(world, step)).set_requires_grad(true);
      const auto y = twins.replayed.forward({x})[0];
      EXPECT_THAT(thrown_by([&] { torch::autograd::grad({squares(y)}, {x}); }),
                  Says("torch::autograd::grad"));
      twins.replayed.zero_grad();
    }
    twins.step({one_input(world, step)});
  }
  EXPECT_GT(twins.calls().replayed, 0);
}

// ------------------------------------------------------------------------ what comparing finds

TEST(ReplayFinds, ANumberThatTheHostWorksOutAgain) {
  const auto body = [](Part& part, const Several& in) {
    return Several{part.layer(in[0]) * static_cast<float>(part.bodies)};
  };
  expect_eager(body, {"aten::mul.Scalar: found other arguments than before"});
}

TEST_ON_RANKS(ReplayFinds, ATensorThatIsAnotherOneInEachCall, 2) {
  const auto run = [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    const at::Tensor other = inputs[0].detach() + 1.0;
    const auto y = part.region({inputs[0] * model.before}, [&part, other](const Several& in) {
      return Several{part.layer(in[0]) * other};
    });
    return Several{y[0] * model.after};
  };
  expect_eager(world, run, {"found other memory from outside than before"});
}

TEST(ReplayFinds, ABranchThatFollowsFromValues) {
  const auto body = [](Part& part, const Several& in) {
    const auto y = part.layer(in[0]);
    return Several{part.bodies % 2 == 0 ? y.sigmoid() : y.tanh()};
  };
  expect_eager(body, {"found aten::tanh, expected aten::sigmoid"});
}

TEST(ReplayFinds, ABranchThatEndsEarlier) {
  const auto body = [](Part& part, const Several& in) {
    const auto y = part.layer(in[0]);
    return Several{part.bodies == 3 ? y : y.tanh()};
  };
  expect_eager(body, {"expected aten::tanh"});
}

TEST(ReplayFinds, ATableThatIsMadeAgain) {
  const auto body = [](Part& part, const Several& in) {
    return Several{part.layer(in[0]) * (part.table * static_cast<double>(part.bodies))};
  };
  // The factor is a constant of the operation.
  expect_eager(body, {"aten::mul.Scalar: found other arguments than before"});
}

// Positions that the host reads where no operation shows it.
TEST(ReplayFinds, WhatTheHostReadThroughPointers) {
  const auto body = [](Part& part, const Several& in) {
    const float first = in[1].const_data_ptr<float>()[0];
    return Several{part.layer(in[0]).narrow(1, first > 0 ? 0 : 4, 8).repeat({1, 2})};
  };
  Expected expected{"aten::slice_backward: found other arguments than before"};
  expected.inputs = [](World& world, int step) {
    return Several{one_input(world, step)[0], at::full({1}, step % 2 == 0 ? 0.5 : -0.5)};
  };
  expect_eager(body, expected);
}

// In place over memory that an operation has written.
TEST(ReplayFinds, AKernelOutsideTheDispatcherThatChangesAResult) {
  const auto body = [](Part& part, const Several& in) {
    const at::Tensor y = part.layer(in[0]);
    {
      float* values = y.data_ptr<float>();
      for (std::int64_t i = 0; i < y.numel(); ++i) values[i] *= 0.5F;
    }
    return Several{y * part.bias};
  };
  expect_eager(body, {"found other values than eager ones"});
}

// --- raw gradients: whose each is

/// Adds a weight to the part's own, of the same shape.
TwinOptions with_another_weight() {
  TwinOptions options;
  options.prepare = [](Model& model) {
    model.parts[0]->register_parameter("other", seeded(50, {Part::kWidth, Part::kWidth}) * 0.2);
  };
  return options;
}

at::Tensor other_of(Part& part) { return *part.named_parameters(false).find("other"); }

/// Two products and two sums, whose gradients are of two shapes.
Several two_of_each(Part& part, const Several& in) {
  const at::Tensor y = nn::linear(nn::rms_norm(in[0], part.norm, 1e-6), part.weight, part.bias);
  return Several{nn::linear(y.tanh(), other_of(part))};
}

// The operations of each call are the same, of the same values: only who gets what is another.
TEST(ReplayFinds, WeightsThatSwapTheirRoles) {
  const auto body = [](Part& part, const Several& in) {
    const bool swaps = part.bodies % 2 == 0;
    const at::Tensor first = swaps ? other_of(part) : part.weight;
    const at::Tensor second = swaps ? part.weight : other_of(part);
    return Several{nn::linear(nn::linear(in[0], first).tanh(), second)};
  };
  Expected expected{"found the gradient of part0.other, expected the gradient of part0.weight"};
  expected.options = with_another_weight();
  expect_eager(body, expected);
}

/// Adds two of one shape; their gradients are handed back the other way round in every other call.
struct AddsAndSwaps : torch::autograd::Function<AddsAndSwaps> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, const at::Tensor& b,
                            bool swaps) {
    context->saved_data["swaps"] = swaps;
    return a + 2.0 * b;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const at::Tensor one = grads[0] * 1.0, two = grads[0] * 2.0;
    const bool swaps = context->saved_data["swaps"].toBool();
    return {swaps ? two : one, swaps ? one : two, at::Tensor()};
  }
};

// The products are the same in each call, and so is the order of the slots.
TEST(ReplayFinds, RawGradientsThatSwapTheirSlots) {
  const auto body = [](Part& part, const Several& in) {
    const auto sum = AddsAndSwaps::apply(part.bias, part.norm, part.bodies % 2 == 0);
    return Several{(in[0] * sum).tanh()};
  };
  expect_eager(body, {"the gradient of part0.bias: found other arguments than before"});
}

/// The program of a region is made wrong: it is found before it is replayed.
void expect_found(const std::function<void(capture::Program&)>& fault, const std::string& why) {
  std::atomic<int> faults{0};
  const test_hooks::Set wrong(test_hooks::made_program, [&](capture::Program& program) {
    fault(program);
    ++faults;
  });
  Expected expected{why};
  expected.options = with_another_weight();
  expect_eager(two_of_each, expected);
  EXPECT_EQ(faults, 2) << "of two ranks";
}

/// The places of two steps that hand in gradients of one shape, of `dims` dims.
std::vector<std::size_t> gradients_of(const capture::Program& program, std::size_t dims) {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    const auto& [call, gradient] = program.steps[i];
    if (call || gradient.raw == capture::kNone) continue;
    const auto& raw = program.values[static_cast<std::size_t>(gradient.raw)];
    if (raw.sizes.size() == dims) found.push_back(i);
  }
  EXPECT_THAT(found, SizeIs(2)) << dims;
  return found;
}

constexpr auto kAGradient = "the gradient of part0.";

// With products, which would lie in one place one after the other, such a swap changes nothing.
TEST(ReplayFinds, AProgramThatSwapsRawValues) {
  const auto fault = [](capture::Program& program) {
    const auto at = gradients_of(program, 1);
    std::swap(program.steps[at[0]].gradient.raw, program.steps[at[1]].gradient.raw);
  };
  expect_found(fault, kAGradient);
}

TEST(ReplayFinds, AProgramThatSwapsSlots) {
  for (const auto dims : {std::size_t{1}, std::size_t{2}}) {
    SCOPED_TRACE(concat("of ", dims, " dims"));
    const auto fault = [dims](capture::Program& program) {
      const auto at = gradients_of(program, dims);
      std::swap(program.steps[at[0]].gradient.slot, program.steps[at[1]].gradient.slot);
    };
    expect_found(fault, kAGradient);
  }
}

// Products would be written into each other's slots, though the steps that hand them in are right.
TEST(ReplayFinds, AProgramThatSwapsDirectSlots) {
  const auto fault = [](capture::Program& program) {
    std::vector<capture::TapeGradient*> direct;
    for (auto& step : program.steps) {
      if (step.call && step.call->direct) direct.push_back(&*step.call->direct);
    }
    ASSERT_THAT(direct, SizeIs(2));
    std::swap(direct[0]->slot, direct[1]->slot);
  };
  expect_found(fault, kAGradient);
}

// Memory that is still read is written over: as if it were laid out where another value lies.
TEST(ReplayFinds, AProgramWhoseMemoryOverlaps) {
  const auto fault = [](capture::Program& program) {
    for (auto& memory : program.memories) {
      if (memory.place == capture::MemoryPlace::kScratch) memory.offset = 0;
    }
  };
  expect_found(fault, "found other values than eager ones");
}

// A number of the first call that every replay would go by.
TEST(ReplayFinds, AProgramWithAStaleConstant) {
  const auto fault = [](capture::Program& program) {
    for (auto& step : program.steps) {
      if (!step.call) continue;
      for (auto& slot : step.call->arguments) {
        if (slot.form == capture::Slot::Form::kConstant && slot.constant.isDouble()) {
          slot.constant = slot.constant.toDouble() * 2.0;
        }
      }
    }
  };
  expect_found(fault, "rms_norm");
}

// A leaf without an owner: its gradient is in no slot.
TEST_ON_RANKS(ReplayFinds, ALeafThatIsNoParameter, 1) {
  struct Leaves {
    std::vector<at::Tensor> of{at::ones({Part::kWidth}).set_requires_grad(true),
                               at::ones({Part::kWidth}).set_requires_grad(true)};
  };
  const auto leaves = std::make_shared<Leaves>();
  int made = 0;
  TwinOptions options;
  options.prepare = [&](Model& model) {
    model.run =
        around([leaf = leaves->of[static_cast<std::size_t>(made++)]](
                   Part& part, const Several& in) { return Several{part.layer(in[0]) * leaf}; });
  };
  Twins twins(data_mesh(world), {}, options);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    twins.step({one_input(world, step)});
    EXPECT_TRUE(same_bits(leaves->of[1].grad(), leaves->of[0].grad()));
    for (auto& leaf : leaves->of) leaf.mutable_grad().reset();
  }
  EXPECT_THAT(reasons(twins.calls()), ElementsAre(Says("neither an argument nor")));
}

// A tensor that is no argument goes back through its own graph, which has that of the argument in
// it.
TEST_ON_RANKS(ReplayFinds, ATensorFromOutsideThatHasAHistory, 1) {
  const auto run = [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    const at::Tensor x = inputs[0] * model.before, other = x + model.before;
    const auto y = part.region(
        {x}, [&part, other](const Several& in) { return Several{in[0] * part.bias + other}; });
    return Several{y[0] * model.after};
  };
  expect_eager(world, run, {"a tensor from outside that has a history"});
}

// ------------------------------------------------------------------------------------- errors

/// Throws in the forward, or in the backward.
struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, bool now, bool later) {
    if (now) throw std::runtime_error("the body's own");
    context->saved_data["later"] = later;
    return x * 1.0;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (context->saved_data["later"].toBool()) throw std::runtime_error("the body's own");
    return {grads[0] * 1.0, at::Tensor(), at::Tensor()};
  }
};

/// An error of the body in step `at`; the steps before and behind it are those of the eager twin.
void expect_usable_after(int at, bool in_forward) {
  ranks(1).run([&](World& world) {
    Twins twins(data_mesh(world), around([&](Part& part, const Several& in) {
                  const bool throws = part.throws;
                  return Several{Throws::apply(part.layer(in[0]), throws && in_forward,
                                               throws && !in_forward)};
                }));
    for (int step = 0; step < kSteps + 2; ++step) {
      SCOPED_TRACE(concat("step ", step, " of those around ", at));
      if (step == at) {
        for (auto* handle : {&twins.eager, &twins.replayed}) {
          handle->module()->parts[0]->throws = true;
          EXPECT_THAT(thrown_by([&] { run_one(*handle, one_input(world, step)); }),
                      Says("the body's own"));
          handle->module()->parts[0]->throws = false;
          handle->zero_grad();
        }
        continue;
      }
      twins.step({one_input(world, step)});
    }
    EXPECT_GE(twins.calls().replayed, kSteps + 2 - 1 - kRecordings - 2);
    EXPECT_THAT(reasons(twins.calls()), IsEmpty());
  });
}

TEST(ReplayErrors, OfTheBodyInForwardLeaveTheRegionUsable) {
  for (const int at : {0, 1, 2, 3}) expect_usable_after(at, true);
}

TEST(ReplayErrors, OfTheBodyInBackwardLeaveTheRegionUsable) {
  for (const int at : {0, 1, 2, 3}) expect_usable_after(at, false);
}

// An operation that fails while it is replayed, as it fails in an eager call.
TEST_ON_RANKS(ReplayErrors, OfAReplayLeaveTheRegionUsable, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                return Several{in[0] + at::embedding(part.weight, in[1])};
              }));
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    const auto ids = at::arange(3) + step;
    if (step == 5) {
      for (auto* handle : {&twins.eager, &twins.replayed}) {
        EXPECT_THAT(thrown_by([&] { run_one(*handle, {rows(1), ids + 100}); }),
                    Says("out of range"));
        handle->zero_grad();
      }
    }
    twins.step({{rows(seed_of(world, step)), ids}});
  }
  EXPECT_EQ(twins.calls().replayed, kSteps + 1 - 1 - kRecordings);
}

// Options that do not fit leave everything as it was.
TEST_ON_RANKS(ReplayErrors, OptionsThatDoNotFitSwitchNothingOn, 1) {
  Twins twins(data_mesh(world), one_layer());
  EXPECT_THAT(thrown_by([&] { compile(twins.eager, {.mode = CompileMode::kReplay, .form = 7}); }),
              Says("form"));
  for (int step = 0; step < kSteps; ++step) twins.step({one_input(world, step)});
  EXPECT_EQ(twins.of_eager().parts[0]->bodies, kSteps);
}

}  // namespace
}  // namespace tessera::test::replay_refused_test
