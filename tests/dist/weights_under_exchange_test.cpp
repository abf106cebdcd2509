// Weight gradients of experts that are formed while rows' gradients travel back: the same bits as
// at once, in that window, once, and before their unit is reduced.

#include <optional>

#include "base/test_hooks.h"
#include "base/trace.h"
#include "dist/cut_modules.h"
#include "dist/held_bytes.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "moe/experts.h"
#include "nn/mlp.h"
#include "parallel/transition.h"
#include "parallel/transition_watch.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/step_scope.h"

namespace tessera::test::weights_under_exchange_test {
namespace {

constexpr std::int64_t kHidden = 6;
constexpr std::int64_t kWithin = 4;
constexpr std::int64_t kCount = 8;
constexpr std::int64_t kChosen = 2;
constexpr std::int64_t kTokens = 5;
constexpr std::int64_t kRank = 2;

enum class Trained : std::uint8_t { kAll, kAdapters, kBehindFrozen };

struct Layers {
  RecomputeMode mode = RecomputeMode::kNone;
  Trained trained = Trained::kAll;
  bool has_biases = false;
  at::ScalarType experts = at::kFloat;
};

/// Experts over ep, routed by token number, with a shared one.
class Mixture : public torch::nn::Module, public DeclaresLayouts {
 public:
  Mixture(const Mesh& mesh, std::uint64_t seed, const Layers& layers, bool is_frozen)
      : mode_(layers.mode), ep_(parallel::axis_of(mesh, axis::kExpert)) {
    const bool adapts = layers.trained == Trained::kAdapters;
    const auto add = [&](const std::string& name, std::vector<std::int64_t> sizes, bool of_experts,
                         bool trains) {
      const at::Tensor whole = seeded(seed++, sizes, at::kDouble) * 0.5;
      layouts_[name] = layout_on(of_experts ? MeshKind::kSparse : MeshKind::kDense,
                                 {shard("ep", of_experts ? ep_.size : 1, 0)});
      own_[name] = register_parameter(name,
                                      local_part(here(whole), layouts_[name], mesh)
                                          .to(of_experts ? layers.experts : at::kFloat),
                                      trains && !is_frozen);
    };
    add("shared", {kHidden, kHidden}, false, true);
    add("score", {kChosen, kHidden}, false, true);
    add("gate_up", {kCount, 2 * kWithin, kHidden}, true, !adapts);
    add("down", {kCount, kHidden, kWithin}, true, !adapts);
    if (layers.has_biases) add("gate_up_bias", {kCount, 2 * kWithin}, true, !adapts);
    if (layers.has_biases) add("down_bias", {kCount, kHidden}, true, !adapts);
    if (!adapts) return;
    add("gate_up_a", {kCount, kRank, kHidden}, true, true);
    add("gate_up_b", {kCount, 2 * kWithin, kRank}, true, true);
  }
  ParameterLayout layout_of(const std::string& parameter) const override {
    return layouts_.at(parameter);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const std::vector<at::Tensor>& in) { return mixed(in[0]); };
    return mode_ == RecomputeMode::kNone ? run({x}) : checkpoint(run, {x}, mode_);
  }

  std::function<void()> in_shared_backward;

 private:
  at::Tensor mixed(const at::Tensor& x) {
    moe::ExpertWeights weights{own_["gate_up"], own_["down"], own_["gate_up_bias"],
                               own_["down_bias"]};
    if (own_.contains("gate_up_a"))
      weights.gate_up_adapter = {own_["gate_up_a"], own_["gate_up_b"]};
    moe::ExpertOptions options{nn::swiglu_halves, moe::Score::kAfterExperts, ep_, "experts"};
    at::Tensor shared;
    options.meanwhile = [&] {
      shared = at::tanh(at::linear(x, own_["shared"].to(x.scalar_type())));
      if (in_shared_backward && shared.requires_grad()) {
        shared.register_hook([this](const at::Tensor& /*grad*/) { in_shared_backward(); });
      }
    };
    const at::Tensor first =
        at::arange(x.size(0), x.options().dtype(at::kLong)).mul(3).remainder(7);
    const moe::Routing routing{at::stack({first, first + 1}, 1),
                               at::sigmoid(at::linear(x, own_["score"].to(x.scalar_type()))),
                               {}};
    const at::Tensor y = moe::experts(x, routing, weights, options);
    return x + shared + y;
  }

  RecomputeMode mode_;
  parallel::Axis ep_;
  std::map<std::string, ParameterLayout> layouts_;
  Tensors own_;
};

/// Two of them, each a unit.
struct Model : torch::nn::Module {
  Model(const Mesh& mesh, const Layers& layers, const PrecisionPolicy& policy) {
    for (int i = 0; i < 2; ++i) {
      const bool is_frozen = layers.trained == Trained::kBehindFrozen && i == 0;
      const auto seed = static_cast<std::uint64_t>(10 + 20 * i);
      mixtures.push_back(std::make_shared<Mixture>(mesh, seed, layers, is_frozen));
      units.push_back(
          register_module(concat("layer", i), std::make_shared<Sharded<Mixture>>(fully_shard(
                                                  mixtures.back(), mesh, policy, undivided()))));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& unit : units) x = unit->forward(x);
    return x;
  }
  std::vector<std::shared_ptr<Mixture>> mixtures;
  std::vector<std::shared_ptr<Sharded<Mixture>>> units;
};

enum class Formed : std::uint8_t { kUnderExchange, kAtOnce };

Sharded<Model> sharded(World& world, const Layers& layers = {}, const PrecisionPolicy& policy = {},
                       Formed formed = Formed::kUnderExchange) {
  const Mesh mesh = world.mesh(
      {MeshShape::dense(1, 1, world.size(), 1, 1), MeshShape::sparse(1, 1, 1, world.size(), 1)});
  auto model =
      fully_shard(std::make_shared<Model>(mesh, layers, policy), mesh, policy, undivided());
  if (formed == Formed::kAtOnce) model.unit()->runtime().sink().set_under_exchange(nullptr);
  return model;
}

/// One rank has no tokens in one of the micro-batches.
at::Tensor tokens_of(int rank, int micro_batch) {
  const std::int64_t tokens = rank == 1 && micro_batch == 1 ? 0 : kTokens;
  return here(seeded(static_cast<std::uint64_t>(100 * micro_batch + rank), {tokens, kHidden}));
}

/// Runs three micro-batches in a scope. `full`: how many of them are kFull, the others kInputOnly.
Tensors in_a_step(World& world, Sharded<Model>& model, int full) {
  StepScope scope(model, {.schedule = concat(full)});
  std::vector<at::Tensor> losses;
  for (int i = 0; i < 3; ++i) {
    scope.begin_forward(0, i);
    losses.push_back(squares(model.forward(tokens_of(world.rank(), i).requires_grad_(true))));
  }
  for (int i = 0; i < 3; ++i) {
    scope.begin_backward(0, i, i < full ? Backward::kFull : Backward::kInputOnly);
    backward(losses[static_cast<std::size_t>(i)]);
    if (i >= full) scope.run_weight_gradients(0, i);
  }
  scope.reduce(0);
  scope.finish();
  return whole_gradients(model);
}

/// The same of a loop, whose inputs require no gradient: what is in front is frozen.
Tensors in_a_loop(World& world, Sharded<Model>& model) {
  for (int i = 0; i < 3; ++i) {
    model.set_requires_gradient_sync(i == 2);
    backward(squares(model.forward(tokens_of(world.rank(), i))));
  }
  return whole_gradients(model);
}

class WeightsUnderExchange : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, WeightsUnderExchange, ::testing::Values(1, 2, 4));

/// How many products an exchange, a marker, or a W formed while `act` ran.
template <class Act>
int handed_in(const Act& act) {
  int count = 0;
  const test_hooks::Set counts(test_hooks::hands_in,
                               [&](const std::string&, const std::function<void()>& hand_in) {
                                 ++count;
                                 hand_in();
                               });
  act();
  return count;
}

void expect_the_bits(World& world, const Layers& layers, const PrecisionPolicy& policy) {
  auto at_once = sharded(world, layers, policy, Formed::kAtOnce);
  auto model = sharded(world, layers, policy);
  Tensors expected, found;
  EXPECT_EQ(handed_in([&] { expected = in_a_loop(world, at_once); }), 0);
  const int formed = handed_in([&] { found = in_a_loop(world, model); });
  expect_same(found, expected, "loop");
  // Only the second layer's: rows of the first one require no gradient. A frozen checkpoint's
  // result does.
  const bool has_window = world.size() > 1 && layers.trained != Trained::kAdapters &&
                          (layers.trained == Trained::kAll || layers.mode != RecomputeMode::kNone);
  EXPECT_EQ(formed, has_window ? 3 * 2 : 0);
  at_once.zero_grad();
  expected = in_a_step(world, at_once, 3);
  for (const int full : {3, 1}) {
    model.zero_grad();
    expect_same(in_a_step(world, model, full), expected, concat(full, " full"));
    EXPECT_EQ(model.unit()->runtime().under_exchange().size(), 0U);
  }
}

TEST_P(WeightsUnderExchange, AreTheBitsOfThoseAtOnce) {
  ranks(GetParam()).run([](World& world) {
    int number = 0;
    for (const auto mode :
         {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
      for (const auto trained : {Trained::kAll, Trained::kAdapters, Trained::kBehindFrozen}) {
        for (const auto& policy : {PrecisionPolicy{}, in_bfloat16()}) {
          // One rank has no exchange; of four ranks each third case.
          if (world.size() == 1 && trained != Trained::kAll) continue;
          if (world.size() == 4 && ++number % 3 != 0) continue;
          SCOPED_TRACE(concat("mode ", static_cast<int>(mode), ", trained ",
                              static_cast<int>(trained), policy.param_dtype ? ", bf16" : ""));
          expect_the_bits(world, {mode, trained, /*has_biases=*/mode != RecomputeMode::kNone},
                          policy);
        }
      }
    }
  });
}

// Naive: rows of fp32 experts whose products take the rows' dtype, or of a tensor that is cast.
TEST_P(WeightsUnderExchange, OfExpertsInAnotherDtypeAreTheSameToo) {
  ranks(GetParam()).run([](World& world) {
    for (const auto dtype : {at::kBFloat16, at::kDouble}) {
      auto at_once = sharded(world, {.experts = dtype}, {}, Formed::kAtOnce);
      auto model = sharded(world, {.experts = dtype});
      expect_same(in_a_step(world, model, 3), in_a_step(world, at_once, 3));
    }
  });
}

/// The exchanges and products of a rank, in order, while it lives.
class Order : parallel::TransitionWatch {
 public:
  Order() : watched_(*this) { here_ = this; }
  ~Order() override { here_ = nullptr; }
  Order(const Order&) = delete;
  Order& operator=(const Order&) = delete;

  static std::chrono::microseconds issued(const std::string& where) {
    if (here_ != nullptr) here_->add("issue " + where);
    return std::chrono::microseconds(0);
  }
  void add(std::string what) { events_.push_back(std::move(what)); }
  const std::vector<std::string>& events() const { return events_; }

 private:
  void saw(const parallel::Transition& of, parallel::Direction direction, const at::Tensor&,
           const at::Tensor&) override {
    add(concat("have ", of.where, direction == parallel::Direction::kBackward ? " backward" : ""));
  }

  static inline thread_local Order* here_ = nullptr;
  std::vector<std::string> events_;
  parallel::TransitionWatchScope watched_;
  test_hooks::Set<decltype(test_hooks::hands_in)> forms_{
      test_hooks::hands_in, [this](const std::string& name, const std::function<void()>& hand_in) {
        add("form " + name);
        hand_in();
      }};
};

// Naive: products in front of the issue, or behind the wait, which fill no time of the exchange.
TEST(WeightsUnderExchangeOrder, BetweenIssueAndWaitOldestFirstAndBehindTheSharedExperts) {
  const test_hooks::Set looks(test_hooks::exchange_delay, Order::issued);
  ranks(2).run([](World& world) {
    auto model = sharded(world);
    const auto layer = model.module()->mixtures[1];
    std::optional<Order> order;
    layer->in_shared_backward = [&] { order->add("shared"); };
    const at::Tensor loss = squares(model.forward(tokens_of(world.rank(), 0)));
    order.emplace();
    backward(loss);
    EXPECT_THAT(order->events(),
                ElementsAre("issue experts combine backward", "have experts combine backward",
                            "issue experts dispatch backward", "shared", "form layer1.down",
                            "form layer1.gate_up", "have experts dispatch backward",
                            "issue experts combine backward", "have experts combine backward"));
  });
}

TEST(WeightsUnderExchangeOrder, ATraceShowsThemWithinTheExchange) {
  ranks(2).run([](World& world) {
    auto model = sharded(world);
    const at::Tensor loss = squares(model.forward(tokens_of(world.rank(), 0)));
    const auto trace = std::make_shared<Trace>();
    {
      const TraceHere traced(trace);
      backward(loss);
    }
    const auto spans = trace->take();
    const auto exchange = std::ranges::find(spans, "experts dispatch backward", &TraceSpan::name);
    const auto products =
        std::ranges::find(spans, "weight gradients under an exchange", &TraceSpan::name);
    ASSERT_TRUE(exchange != spans.end() && products != spans.end());
    EXPECT_LT(exchange->begin, products->begin);
    EXPECT_LE(products->end, exchange->end);
  });
}

// Where both ends of a transition are one node nothing is left between them, and backward comes to
// the unit's marker with products that are not formed yet.
TEST(WeightsUnderExchangeOrder, WhatNoExchangeComesToIsFormedBeforeItsReduction) {
  ranks(2).run([](World& world) {
    auto at_once = sharded(world, {}, {}, Formed::kAtOnce);
    const auto expected = in_a_step(world, at_once, 3);
    const test_hooks::Set one_node(
        test_hooks::transition_forward,
        [](const parallel::Transition& of, const at::Tensor& x) { return of.forward(x); });
    auto model = sharded(world);
    Tensors found;
    EXPECT_EQ(handed_in([&] { found = in_a_step(world, model, 3); }), 3 * 4);
    expect_same(found, expected);
    model.zero_grad();
    at_once.zero_grad();
    expect_same(in_a_loop(world, model), in_a_loop(world, at_once), "loop");
  });
}

/// Returns what both ranks say where products are handed in as `fault` does it, in a step of one
/// micro-batch that is reduced while its backward runs. `behind` runs after that.
using Fault = std::function<void(const std::string&, const std::function<void()>& hand_in)>;
std::vector<std::string> errors_with(const Fault& fault, const std::function<void()>& behind = {}) {
  return errors_of(2, [&](World& world) {
    auto model = sharded(world);
    const test_hooks::Set put_in(test_hooks::hands_in, fault);
    StepScope scope(model, {.micro_batches = 1});
    scope.begin_forward(0, 0);
    const at::Tensor loss = squares(model.forward(tokens_of(world.rank(), 0)));
    scope.begin_backward(0, 0, Backward::kFull);
    backward(loss);
    if (behind) behind();
    scope.finish();
  });
}

TEST(WeightsUnderExchangeFaults, FormedTwiceIsNamed) {
  const auto errors = errors_with([](const std::string&, const std::function<void()>& hand_in) {
    hand_in();
    hand_in();
  });
  EXPECT_THAT(errors, Contains(Says("layer1.down (layer layer1, stage 0, micro-batch 0)",
                                    "found its ticket redeemed twice")));
}

TEST(WeightsUnderExchangeFaults, NeverFormedIsNamed) {
  const auto errors = errors_with([](const std::string&, const std::function<void()>&) {});
  EXPECT_THAT(errors,
              Each(Says("StepScope::finish: found 2 deferred gradients",
                        "layer1.down (layer layer1, stage 0, micro-batch 0)", "layer1.gate_up")));
}

TEST(WeightsUnderExchangeFaults, NeverFormedOutsideOfAStepIsNamed) {
  ranks(2).run([](World& world) {
    auto model = sharded(world);
    const test_hooks::Set never(test_hooks::hands_in,
                                [](const std::string&, const std::function<void()>&) {});
    backward(squares(model.forward(tokens_of(world.rank(), 0))));
    EXPECT_THAT(thrown_by([&] { whole_gradients(model); }),
                Says("2 deferred gradients", "layer1.down", "layer1.gate_up"));
  });
}

TEST(WeightsUnderExchangeFaults, FormedBehindTheReductionIsNamed) {
  static thread_local std::vector<std::function<void()>> late;
  const auto errors = errors_with(
      [](const std::string&, const std::function<void()>& hand_in) { late.push_back(hand_in); },
      [] {
        for (const auto& hand_in : std::exchange(late, {})) hand_in();
      });
  EXPECT_THAT(errors, Each(Says("unit layer1", "arrived after its reduction")));
}

// Naive: products of a backward that an exception ended are formed in the next one.
TEST(WeightsUnderExchange, AFailureDropsWhatItLeft) {
  ranks(2).run([](World& world) {
    auto at_once = sharded(world, {}, {}, Formed::kAtOnce);
    const auto expected = in_a_step(world, at_once, 3);
    auto model = sharded(world);
    const auto& store = model.unit()->runtime().under_exchange();
    const auto layer = model.module()->mixtures[1];
    if (world.rank() == 0) {
      layer->in_shared_backward = [&] {
        EXPECT_EQ(store.size(), 2U);
        throw std::runtime_error("in between");
      };
    }
    EXPECT_THAT(thrown_by([&] { in_a_step(world, model, 3); }),
                Says(world.rank() == 0 ? "in between" : "rank 0"));
    layer->in_shared_backward = {};
    world.recover();
    model.zero_grad();
    EXPECT_EQ(store.size(), 0U);
    expect_same(in_a_step(world, model, 3), expected);
  });
}

// The inputs of products are held from the backward of each to the window, and nothing else is.
TEST_ON_RANKS(WeightsUnderExchangeMemory, IsWhatTheProductsReadUntilTheWindow, 2,
              ThreadBackend::kGloo) {
  struct Held {
    std::int64_t in_window = 0;
    std::int64_t behind_it = 0;
  };
  const auto held_by = [&](Formed formed) {
    auto model = sharded(world, {}, {}, formed);
    model.set_requires_gradient_sync(false);
    const auto& layers = model.module()->mixtures;
    Held held;
    // The second time slots are there, and hold a sum.
    for (int i = 0; i < 2; ++i) {
      const HeldBytes counter;
      layers[1]->in_shared_backward = [&] { held.in_window = counter.bytes(); };
      // Experts of the first layer have no window, and are through by then.
      layers[0]->in_shared_backward = [&] { held.behind_it = counter.bytes(); };
      const at::Tensor loss = squares(model.forward(tokens_of(0, 0)));
      backward(loss);
    }
    return held;
  };
  const Held at_once = held_by(Formed::kAtOnce), deferred = held_by(Formed::kUnderExchange);
  // Every rank has the same tokens: its experts get twice the rows of those that choose them.
  const at::Tensor first = at::arange(kTokens).mul(3).remainder(7);
  const at::Tensor mine = at::stack({first, first + 1}).floor_divide(kCount / 2).eq(world.rank());
  const std::int64_t rows = 2 * mine.sum().item<std::int64_t>();
  EXPECT_EQ(deferred.in_window - at_once.in_window, rows * (3 * kWithin + 2 * kHidden) * 4);
  EXPECT_EQ(deferred.behind_it, at_once.behind_it);
}

}  // namespace
}  // namespace tessera::test::weights_under_exchange_test
