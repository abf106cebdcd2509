// A forward paired with a backward (StepScope::run_pair) over one unit that both are in: sums are
// those of the same calls in turn, a tensor that is used twice included; and calls that run in turn
// instead are logged once.

#include <torch/csrc/autograd/custom_function.h>

#include "comm/turns.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/log_level.h"
#include "tessera/recompute.h"
#include "tessera/step_scope.h"

namespace tessera::test::step_pair_sums_test {
namespace {

constexpr int kMicroBatches = 4;

thread_local int t_in_pairs = 0;  // turns that were taken inside of a pair

void take_turn() {
  if (comm::Turns::under_way()) ++t_in_pairs;
  comm::Turns::pass();
}

/// An exchange as a pair sees it: a turn in forward, and one in backward.
class Turn : public torch::autograd::Function<Turn> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    take_turn();
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    take_turn();
    return gradients;
  }
};

enum class Recomputes : std::uint8_t { kNothing, kInside, kAround };

/// a twice + b twice + c once, with turns between the uses of `twice`: its gradient is autograd's own
/// sum a + b.
class Sums : public torch::nn::Module {
 public:
  explicit Sums(Recomputes recomputes) : recomputes_(recomputes) {
    twice = register_parameter("twice", here(at::ones({1})));
    once = register_parameter("once", here(at::ones({1})));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const std::vector<at::Tensor>& in) { return sum(in[0]); };
    return recomputes_ == Recomputes::kInside ? checkpoint(run, {x}) : run({x});
  }

  at::Tensor twice, once;
  int turns = 1;
  double dropout = 0.0;

 private:
  at::Tensor sum(const at::Tensor& x) {
    at::Tensor y = x.slice(0, 0, 1) * twice;
    for (int i = 0; i < turns; ++i) y = Turn::apply(y);
    y = y + x.slice(0, 1, 2) * twice + x.slice(0, 2, 3) * once;
    return dropout > 0 ? at::dropout(y, dropout, true) : y;
  }

  Recomputes recomputes_;
};

/// Two of them, each a unit: a forward comes to the second one while a backward is in it.
class Both : public torch::nn::Module {
 public:
  Both(const Mesh& mesh, Recomputes recomputes) : recomputes_(recomputes) {
    for (const char* name : {"first", "second"}) {
      sums.push_back(std::make_shared<Sums>(recomputes));
      units_.push_back(register_module(
          name, std::make_shared<Sharded<Sums>>(fully_shard(sums.back(), mesh, in_bfloat16()))));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return run(0, x) + run(1, x); }

  std::vector<std::shared_ptr<Sums>> sums;

 private:
  at::Tensor run(std::size_t i, const at::Tensor& x) {
    const auto unit = units_[i];
    if (recomputes_ != Recomputes::kAround) return unit->forward(x);
    return checkpoint([unit](const auto& in) { return unit->forward(in[0]); }, {x});
  }

  Recomputes recomputes_;
  std::vector<std::shared_ptr<Sharded<Sums>>> units_;
};

enum class Way : std::uint8_t { kPairs, kInTurn };

struct Model {
  Model(World& world, Recomputes of)
      : module(std::make_shared<Both>(data_mesh(world), of)),
        handle(fully_shard(module, data_mesh(world), in_bfloat16())) {}

  void set_turns(int turns) {
    for (const auto& sums : module->sums) sums->turns = turns;
  }

  /// F0, then F(k+1) paired with B(k), then the last B. Returns the sums.
  Tensors step(Way way, StepReshard reshard = StepReshard::kStep) {
    constexpr double kTwice[] = {256, 256, 256, 256}, kOnce[] = {256, 1, -256, 0};
    StepScope scope(handle, {.reshard = reshard, .schedule = "pairs"});
    std::map<int, at::Tensor> outputs;
    const auto forward = [&](int k) {
      if (turns_of) set_turns(turns_of(k));
      const auto x = here(at::tensor({kTwice[k], 1.0, kOnce[k]}).to(at::kBFloat16));
      outputs[k] = handle.forward(x);
    };
    const auto backward_of = [&](int k) {
      if (turns_of) set_turns(turns_of(k));
      backward(outputs.at(k).sum());
    };
    scope.begin_forward(0, 0);
    forward(0);
    for (int k = 0; k + 1 < kMicroBatches; ++k) {
      if (way == Way::kPairs) {
        scope.run_pair({0, k + 1, [&] { forward(k + 1); }},
                       {0, k, Backward::kFull, [&] { backward_of(k); }});
        continue;
      }
      scope.begin_forward(0, k + 1);
      forward(k + 1);
      scope.begin_backward(0, k);
      backward_of(k);
    }
    scope.begin_backward(0, kMicroBatches - 1);
    backward_of(kMicroBatches - 1);
    scope.finish();
    auto sums = whole_gradients(handle);
    handle.zero_grad();
    return sums;
  }

  std::shared_ptr<Both> module;
  Sharded<Both> handle;
  std::function<int(int micro_batch)> turns_of = {};
};

// The classic: in bf16 256 + 1 is 256. Within a forward autograd adds so, over micro-batches
// nothing does. Naive: the forward gives the leaf another accumulator while the backward, or what
// it recomputes, is between its uses, and both addends arrive unrounded.
TEST(StepPairs, ATensorThatIsUsedTwiceIsAddedAsInTurn) {
  for (const int count : {1, 2}) {
    for (const auto recomputes : {Recomputes::kNothing, Recomputes::kInside, Recomputes::kAround}) {
      for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
        SCOPED_TRACE(concat(count, " ranks, ", static_cast<int>(recomputes), " recomputes, ",
                            static_cast<int>(reshard)));
        ranks(count).run([&](World& world) {
          Model model(world, recomputes), in_turn(world, recomputes);
          for (int step = 0; step < 3; ++step) {
            t_in_pairs = 0;
            const auto found = model.step(Way::kPairs, reshard);
            EXPECT_EQ(t_in_pairs > 0, step > 0) << "step " << step;
            expect_same(found, in_turn.step(Way::kInTurn, reshard), concat("step ", step));
            for (const std::string unit : {"first.", "second."}) {
              EXPECT_EQ(found.at(unit + "twice").item<double>(), 4 * 256.0) << "step " << step;
              EXPECT_EQ(found.at(unit + "once").item<double>(), 1.0) << "step " << step;
            }
          }
        });
      }
    }
  }
}

/// Three steps of pairs that are none; what was printed meanwhile.
std::string said_in_turn(int count, Recomputes recomputes,
                         const std::function<void(Model&, int rank)>& change) {
  set_log_level(LogLevel::kWarn);
  ::testing::internal::CaptureStderr();
  ranks(count).run([&](World& world) {
    Model model(world, recomputes), in_turn(world, recomputes);
    change(model, world.rank());
    change(in_turn, world.rank());
    t_in_pairs = 0;
    for (int step = 0; step < 3; ++step) {
      at::manual_seed(5);  // of the process
      const auto found = model.step(Way::kPairs);
      at::manual_seed(5);
      expect_same(found, in_turn.step(Way::kInTurn), concat("step ", step));
    }
    EXPECT_EQ(t_in_pairs, 0);
  });
  return ::testing::internal::GetCapturedStderr();
}

void expect_once(const std::string& said, const std::string& why) {
  EXPECT_THAT(said,
              Says(concat("StepScope::run_pair: found that ", why), "run one after the other"));
  EXPECT_EQ(said.find("run_pair"), said.rfind("run_pair")) << said;
}

// Recomputation sets the process's generator while it runs, which a forward between would see.
TEST(StepPairs, CheckpointsThatDrawRunInTurnAndSaySoOnce) {
  const auto drops = [](Model& model, int /*rank*/) { model.module->sums[1]->dropout = 0.5; };
  expect_once(said_in_turn(1, Recomputes::kInside, drops),
              "checkpoints draw random numbers of the process");
}

TEST(StepPairs, MicroBatchesOfOtherTurnsRunInTurnAndSaySoOnce) {
  const auto varies = [](Model& model, int /*rank*/) {
    model.turns_of = [](int micro_batch) { return 1 + micro_batch % 2; };
  };
  expect_once(said_in_turn(2, Recomputes::kNothing, varies),
              "micro-batches have other numbers of exchanges");
}

TEST(StepPairs, RanksOfOtherTurnsRunInTurnAndSaySoOnce) {
  const auto differs = [](Model& model, int rank) { model.set_turns(1 + rank); };
  expect_once(said_in_turn(2, Recomputes::kNothing, differs),
              "ranks have other numbers of exchanges in a pass");
}

TEST_ON_RANKS(StepPairs, APassThatLeavesItsRecordedTurnsIsNamed, 1) {
  Model model(world, Recomputes::kNothing);
  model.step(Way::kPairs);
  model.set_turns(2);
  EXPECT_THAT(thrown_by([&] { model.step(Way::kPairs); }),
              Says("forward of stage 0, micro-batch 1", "found 4 turns, expected 2",
                   "first step of the schedule 'pairs'"));
  world.recover();
  model.handle.zero_grad();
  model.set_turns(1);
  model.step(Way::kPairs);
  EXPECT_EQ(model.step(Way::kPairs).at("first.once").item<double>(), 1.0);
}

}  // namespace
}  // namespace tessera::test::step_pair_sums_test
