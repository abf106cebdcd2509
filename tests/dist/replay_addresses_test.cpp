// The addresses of gathered parameters, slots and regions' memory are the same in each replayed
// step, so that a recording with a region's addresses (a CUDA graph) holds in later steps.
#include <optional>

#include "base/test_hooks.h"
#include "dist/replayed.h"
#include "tessera/step_scope.h"

namespace tessera::test::replay_addresses_test {
namespace {

/// The addresses in a step, in its order.
using Addresses = std::vector<std::pair<std::string, const void*>>;

/// A unit that is a region, or its recomputation is.
class Layer : public Part, public Recomputable {
 public:
  using Part::Part;
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const Several& in) {
      return recompute() == RecomputeMode::kNone ? layer(in[0])
                                                 : region({in[0]}, [this](const Several& all) {
                                                     return Several{layer(all[0])};
                                                   })[0];
    };
    return checkpoint(run, {x}, recompute());
  }
};

class Layers : public torch::nn::Module {
 public:
  Layers(const Mesh& mesh, const PrecisionPolicy& policy, RecomputeMode mode)
      : scale(register_parameter("scale", seeded(1, {Part::kWidth}) + 1.0)) {
    for (std::uint64_t i = 0; i < 4; ++i) {
      layers.push_back(std::make_shared<Layer>(10 + 10 * i, at::kFloat));
      layers.back()->set_recompute(mode);
      // Buckets of one size, and another in between.
      if (i == 2) layers.back()->register_parameter("more", seeded(5, {4 * Part::kWidth}));
      handles.push_back(register_module(
          concat("layer", i),
          std::make_shared<Sharded<Layer>>(fully_shard(layers.back(), mesh, policy))));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x * scale;
    for (const auto& handle : handles) y = handle->forward(y);
    return y;
  }
  at::Tensor scale;
  std::vector<std::shared_ptr<Layer>> layers;
  std::vector<std::shared_ptr<Sharded<Layer>>> handles;
};

/// Notes the addresses in a step, on its thread: slots as gradients reach them, blocks as regions
/// take them, and with each where the unit is gathered.
class Notes {
 public:
  explicit Notes(const Layers& model)
      : model_(model),
        blocks_(test_hooks::took_block, [this](const std::string& unit, const void* block) {
          note("block of ", unit, block);
        }) {
    here() = this;
  }
  ~Notes() { here() = nullptr; }
  Notes(const Notes&) = delete;
  Notes& operator=(const Notes&) = delete;

  /// The notes of this thread: slots are seen by a hook of the process.
  static Notes*& here() {
    thread_local Notes* notes = nullptr;
    return notes;
  }
  void note(const char* what, const std::string& name, const void* where) {
    seen_.emplace_back(what + name, where);
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      if (!name.starts_with(concat("layer", i))) continue;
      seen_.emplace_back(concat("gathered layer", i), model_.layers[i]->weight.const_data_ptr());
    }
  }
  Addresses take() { return std::exchange(seen_, {}); }

 private:
  const Layers& model_;
  Addresses seen_;
  const test_hooks::Set<decltype(test_hooks::took_block)> blocks_;
};

struct Case {
  int ranks, form, micro_batches;
  RecomputeMode mode = RecomputeMode::kNone;
  std::optional<DType> compute = {};
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.ranks << "ranks_form" << c.form << "_of" << c.micro_batches << "_recompute"
       << static_cast<int>(c.mode) << (c.compute ? to_string(*c.compute) : "");
}

class ReplayAddresses : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Steps, ReplayAddresses,
                         ::testing::Values(Case{1, 3, 1}, Case{2, 3, 1}, Case{2, 3, 3},
                                           Case{2, 1, 1}, Case{2, 1, 3}, Case{2, 2, 3},
                                           Case{2, 3, 1, RecomputeMode::kFull},
                                           Case{2, 3, 3, RecomputeMode::kFull},
                                           Case{2, 1, 3, RecomputeMode::kSelective},
                                           Case{3, 3, 3, RecomputeMode::kNone, DType::kBFloat16},
                                           Case{2, 1, 1, RecomputeMode::kFull, DType::kBFloat16}),
                         ::testing::PrintToStringParamName());

// Results are fresh in each call: others hold them.
TEST_P(ReplayAddresses, AreThoseOfTheStepBefore) {
  const auto& c = GetParam();
  const test_hooks::Set slots(test_hooks::after_accept,
                              [](const GradContract& contract, const at::Tensor& slot) {
                                Notes::here()->note("", contract.name, slot.const_data_ptr());
                              });
  ranks(c.ranks).run([&](World& world) {
    PrecisionPolicy policy;
    policy.param_dtype = c.compute;
    auto model = fully_shard(std::make_shared<Layers>(data_mesh(world), policy, c.mode),
                             data_mesh(world), policy);
    Notes notes(*model.module());
    compile(model,
            {.mode = CompileMode::kReplay, .form = c.form, .micro_batches = c.micro_batches});
    const auto optimizer = make_adamw(model, adamw(1e-4));
    std::vector<Addresses> steps;
    for (int step = 0; step < 10; ++step) {
      StepScope scope(model, {.reshard = StepReshard::kMicroBatch,
                              .sync_every_micro_batch = c.form == 2,
                              .micro_batches = c.micro_batches});
      for (int k = 0; k < c.micro_batches; ++k) {
        scope.begin_forward(0, k);
        const auto loss = squares(
            model.forward(rows(static_cast<std::uint64_t>(100 * step + 10 * k + world.rank()))));
        scope.begin_backward(0, k);
        backward(loss);
      }
      scope.finish();
      optimizer->step();
      model.zero_grad();
      steps.push_back(notes.take());
    }
    const auto& expected = steps[6];
    for (const auto* what : {"block of layer3", "layer1.weight", "gathered layer0"}) {
      EXPECT_THAT(expected, Contains(::testing::Pair(what, ::testing::NotNull())));
    }
    for (std::size_t step = 7; step < steps.size(); ++step) {
      EXPECT_EQ(steps[step], expected) << "step " << step;
    }
    EXPECT_GT(replay_calls(model).replayed, 0);
  });
}

}  // namespace
}  // namespace tessera::test::replay_addresses_test
