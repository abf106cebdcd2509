// The values that libraries above comm keep for a call: each of two passes that take turns has its
// own, and a backward that recomputes while a forward runs has the same bits as in turn.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "base/pass_local.h"
#include "comm/turns.h"
#include "fsdp/runtime/recompute_scopes.h"
#include "fsdp/runtime/unit_trace.h"
#include "grad/keep.h"
#include "grad/region.h"
#include "support/test.h"
#include "tessera/keep.h"
#include "tessera/recompute.h"

namespace tessera::fsdp::turns_scopes_test {
namespace {

using comm::Turns;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

TEST(TurnsOfCheckpoints, EachPassIsInsideItsOwn) {
  Turns turns;
  Recorded mine, other;
  mine.mode = other.mode = RecomputeMode::kSelective;
  const auto forward = [&] {
    const FirstForwardScope scope(mine);
    Turns::pass();
    EXPECT_EQ(first_forward(), &mine);
    EXPECT_EQ(grad::kept_results(grad::CheckpointRun::kFirst), &mine);
    EXPECT_EQ(recomputing(), nullptr);
    EXPECT_EQ(grad::kept_results(grad::CheckpointRun::kAgain), nullptr);
    Turns::pass();
  };
  const auto again = [&] {
    EXPECT_EQ(first_forward(), nullptr);
    EXPECT_EQ(grad::kept_results(grad::CheckpointRun::kFirst), nullptr);
    const RecomputeScope scope(other);
    Turns::pass();
    EXPECT_EQ(recomputing(), &other);
    EXPECT_EQ(grad::kept_results(grad::CheckpointRun::kAgain), &other);
    EXPECT_EQ(first_forward(), nullptr);
  };
  turns.run(forward, again);
  EXPECT_EQ(first_forward(), nullptr);
  EXPECT_EQ(recomputing(), nullptr);
}

struct NoRegions : grad::Regions {
  std::vector<at::Tensor> run(const std::shared_ptr<torch::nn::Module>& /*owner*/,
                              std::string_view /*name*/, const std::vector<at::Tensor>& inputs,
                              const grad::RegionBody& body) override {
    return body(inputs);
  }
  void forget() override {}
};

TEST(TurnsOfRegions, EachPassHasThoseOfItsModel) {
  Turns turns;
  const std::shared_ptr<grad::Regions> one = std::make_shared<NoRegions>();
  const std::shared_ptr<grad::Regions> two = std::make_shared<NoRegions>();
  const auto of = [](const std::shared_ptr<grad::Regions>& regions) {
    return [&regions] {
      EXPECT_EQ(grad::regions_here(), nullptr);
      const grad::RegionsScope scope(regions);
      const auto& here = grad::regions_here();
      Turns::pass();
      EXPECT_EQ(here, regions);  // what was found stays as long as the scope
      EXPECT_EQ(grad::regions_here(), regions);
    };
  };
  turns.run(of(one), of(two));
  EXPECT_EQ(grad::regions_here(), nullptr);
}

struct NoRecording : grad::Recording {
  void gradient(grad::GradSink& /*sink*/, grad::SlotId /*slot*/,
                const at::Tensor& /*raw*/) override {}
  void deferred(grad::GradSink& /*sink*/, grad::SlotId /*slot*/,
                const grad::Product& /*product*/) override {}
  void keep(const at::Tensor& /*value*/, grad::CheckpointRun /*run*/) override {}
  void refuse(std::string_view /*why*/) override {}
};

TEST(TurnsOfRegions, ARecordingTakesNone) {
  Turns turns;
  NoRecording recording;
  const auto records = [&] {
    const grad::RecordingScope scope(&recording);
    Turns::pass();
  };
  EXPECT_REFUSED(kInternal, turns.run(records, [] {}), "turn inside of a recording");
  const auto records_nothing = [] {
    const grad::RecordingScope scope(nullptr);
    Turns::pass();
  };
  EXPECT_EQ(turns.run(records_nothing, [] {}).first, 1);
}

TEST(TurnsOfUnits, EachPassLeavesItsInnermostUnit) {
  Turns turns;
  UnitTrace trace;
  const auto calls = [&trace](const std::string& outer, const std::string& inner) {
    return [&trace, &outer, &inner] {
      trace.forward_begins(outer);
      for (int i = 0; i < 3; ++i) {
        trace.forward_begins(inner);
        Turns::pass();
        EXPECT_EQ(UnitHere::unit(), inner);
        trace.forward_ends();
        EXPECT_EQ(UnitHere::unit(), outer);
        Turns::pass();
      }
      trace.forward_ends();
      EXPECT_EQ(UnitHere::unit(), "");
    };
  };
  const std::string a = "a", b = "a.layer", c = "c", d = "c.layer";
  turns.run(calls(a, b), calls(c, d));
}

/// Stands for an exchange: it passes in both directions.
struct Exchange : torch::autograd::Function<Exchange> {
  static at::Tensor forward(AutogradContext* /*ctx*/, const at::Tensor& x) {
    Turns::pass();
    return x.clone();
  }
  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& grads) {
    Turns::pass();
    return {grads[0].clone()};
  }
};

/// x * x, of which a selective checkpoint keeps the result.
struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return keep(x.sizes(), [&] { return x * x; });
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {2 * ctx->get_saved_variables()[0] * grads[0]};
  }
};

struct Model {
  explicit Model(RecomputeMode recompute) : mode(recompute) {
    at::Generator generator = at::detail::createCPUGenerator(3);
    for (int i = 0; i < 3; ++i) {
      weights.push_back(at::randn({16, 16}, generator).set_requires_grad(true));
      batches.push_back(at::randn({8, 16}, generator));
    }
  }
  at::Tensor loss(int batch) const {
    at::Tensor x = batches[static_cast<std::size_t>(batch)];
    for (const at::Tensor& weight : weights) {
      const auto layer = [&weight](const std::vector<at::Tensor>& inputs) {
        const at::Tensor out = Exchange::apply(inputs[0].matmul(weight)).to(at::kFloat);
        const at::Tensor more = Exchange::apply(Square::apply(out.tanh()));
        return more + inputs[0];
      };
      x = checkpoint(layer, {x}, mode);
    }
    return x.pow(2).mean();
  }
  RecomputeMode mode;
  std::vector<at::Tensor> weights, batches;
};

/// Autocast of the CPU while it lives.
class Autocast {
 public:
  explicit Autocast(bool enabled) : before_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool before_;
};

TEST(TurnsOfCheckpoints, ARecomputingBackwardInAPairWithAForwardGivesTheBitsOfInTurn) {
  for (const auto mode : {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
    for (const bool casts : {false, true}) {
      // The forward of one micro-batch computes under autocast, that of the other does not.
      const auto loss_of = [casts](const Model& model, int batch) {
        const Autocast autocast(casts && batch == 1);
        return model.loss(batch);
      };
      const Model in_turn(mode), paired(mode);
      std::vector<at::Tensor> expected, found;
      for (int batch = 0; batch < 3; ++batch) {
        expected.push_back(loss_of(in_turn, batch).detach());
        loss_of(in_turn, batch).backward();
      }
      Turns turns;
      at::Tensor last = loss_of(paired, 0);
      found.push_back(last.detach());
      for (int batch = 1; batch < 3; ++batch) {
        at::Tensor next;
        const auto counts =
            turns.run([&] { next = loss_of(paired, batch); }, [&] { last.backward(); });
        EXPECT_EQ(counts.first, 6);
        EXPECT_EQ(counts.second, mode == RecomputeMode::kNone ? 6 : 12);
        last = next;
        found.push_back(last.detach());
      }
      last.backward();
      for (const auto& weight : in_turn.weights) expected.push_back(weight.grad());
      for (const auto& weight : paired.weights) found.push_back(weight.grad());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::equal(expected[i], found[i]))
            << static_cast<int>(mode) << ' ' << casts << ' ' << i;
      }
    }
  }
}

TEST(TurnsOfCheckpoints, AFailedForwardEndsARecomputationAndTheNextBackwardIsWhole) {
  const Model model(RecomputeMode::kFull), expected(RecomputeMode::kFull);
  Turns turns;
  for (int turn = 0; turn < 13; turn += 2) {
    const at::Tensor loss = model.loss(0);
    const auto fails = [turn] {
      for (int i = 0; i < turn; ++i) Turns::pass();
      throw std::runtime_error("the cause");
    };
    EXPECT_EQ(thrown_by([&] { turns.run(fails, [&] { loss.backward(); }); }), "the cause");
    EXPECT_EQ(recomputing(), nullptr);
    EXPECT_TRUE(at::GradMode::is_enabled());
    for (const auto& weight : model.weights) weight.mutable_grad().reset();
  }
  model.loss(1).backward();
  expected.loss(1).backward();
  for (std::size_t i = 0; i < model.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(model.weights[i].grad(), expected.weights[i].grad()));
  }
}

}  // namespace
}  // namespace tessera::fsdp::turns_scopes_test
