// Stages of one rank under one root, and lists of what to do with them: what step scopes are tested
// with. Every list is compared with the loop over micro-batches that has no scope.
#pragma once

#include <optional>
#include <sstream>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "nn/linear.h"
#include "support/plain.h"
#include "tessera/step_scope.h"

namespace tessera::test {

/// x + gain * tanh(linear(x)): a weight whose gradient may be deferred, and two that may not.
class Piece : public torch::nn::Module, public Recomputable {
 public:
  Piece(std::uint64_t seed, std::int64_t width, RecomputeMode mode) {
    // Else it is left to plans.
    if (mode != RecomputeMode::kNone) set_recompute(mode);
    const at::NoGradGuard no_grad;
    linear = register_module("linear", std::make_shared<nn::Linear>(width, width, nn::Bias::kYes));
    linear->weight.set_data(seeded(seed, {width, width}));
    linear->bias.set_data(seeded(seed + 1, {width}));
    gain = register_parameter("gain", seeded(seed + 2, {width}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (before) before();
    const auto run = [this](const std::vector<at::Tensor>& in) {
      const at::Tensor y = at::tanh(linear->forward(in[0]));
      return in[0] + (uses_gain ? y * gain : y).to(in[0].scalar_type());
    };
    return checkpoint(run, {x}, recompute());
  }
  std::shared_ptr<nn::Linear> linear;
  at::Tensor gain;
  bool uses_gain = true;
  std::function<void()> before;  ///< runs inside the forward
};

/// w x, w one number, 1 at first.
class Factor : public torch::nn::Module {
 public:
  Factor() {
    const at::NoGradGuard no_grad;
    linear = register_module("linear", std::make_shared<nn::Linear>(1, 1, nn::Bias::kNo));
    linear->weight.set_data(here(at::ones({1, 1})));
  }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  std::shared_ptr<nn::Linear> linear;
};

struct StagedOptions {
  int stages = 2;
  int pieces = 2;  ///< of each
  std::int64_t width = 6;
  RecomputeMode mode = RecomputeMode::kNone;
  bool recomputes_outside = false;           ///< checkpoint(unit), not unit(checkpoint)
  bool ties = false;                         ///< the root's scale is used by the last stage, too
  std::optional<int> frozen = std::nullopt;  ///< the pieces of this stage
  bool freezes_scale = false;
};

/// Stages of a few pieces that are units, and a scale that the root holds.
class Staged : public torch::nn::Module {
 public:
  Staged(const Mesh& mesh, const StagedOptions& options, const PrecisionPolicy& policy)
      : scale(register_parameter("scale", seeded(7, {options.width}) + 1.0)), options_(options) {
    scale.set_requires_grad(!options.freezes_scale);
    for (int i = 0; i < options.stages * options.pieces; ++i) {
      const auto seed = 100 + 10 * static_cast<std::uint64_t>(i);
      pieces.push_back(std::make_shared<Piece>(seed, options.width, options.mode));
      if (options.frozen == i / options.pieces) {
        for (auto& parameter : pieces.back()->parameters()) parameter.set_requires_grad(false);
      }
      handles.push_back(register_module(
          concat("piece", i),
          std::make_shared<Sharded<Piece>>(fully_shard(pieces.back(), mesh, policy))));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (int stage = 0; stage < options_.stages; ++stage) y = run(stage, y);
    return y;
  }
  at::Tensor run(int stage, const at::Tensor& x) {
    const bool scales = stage == 0 || (options_.ties && stage + 1 == options_.stages);
    at::Tensor y = scales ? x * scale : x;
    for (int i = stage * options_.pieces; i < (stage + 1) * options_.pieces; ++i) {
      if (i == skip) continue;
      const auto& handle = handles[static_cast<std::size_t>(i)];
      y = options_.recomputes_outside
              ? checkpoint([&handle](const auto& in) { return handle->forward(in[0]); }, {y})
              : handle->forward(y);
    }
    return y;
  }
  at::Tensor scale;
  std::vector<std::shared_ptr<Piece>> pieces;
  std::vector<std::shared_ptr<Sharded<Piece>>> handles;
  int skip = -1;  ///< this piece is left out

 private:
  StagedOptions options_;
};

struct StagedModel {
  StagedModel(const Mesh& mesh, const StagedOptions& staged, const PrecisionPolicy& policy = {},
              const ShardOptions& root = {})
      : options(staged),
        module(std::make_shared<Staged>(mesh, staged, policy)),
        handle(fully_shard(module, mesh, policy, root)) {}
  fsdp::Runtime& runtime() { return handle.unit()->runtime(); }
  StagedOptions options;
  std::shared_ptr<Staged> module;
  Sharded<Staged> handle;
};

/// One line of a list: F, B (all of it), I (inputs only) or W (weights) of a stage and micro-batch.
struct Slot {
  char kind;
  int stage;
  int micro_batch;
};

/// "F0.0 F1.0 I1.0 W1.0 ...".
inline std::vector<Slot> slots_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<Slot> slots;
  char kind = 0, dot = 0;
  int stage = 0, micro_batch = 0;
  while (in >> kind >> stage >> dot >> micro_batch) slots.push_back({kind, stage, micro_batch});
  return slots;
}

/// Runs slots of one model inside a scope, messages between stages replaced by detached tensors.
class SlotRunner {
 public:
  using InputOf = std::function<at::Tensor(int micro_batch)>;
  SlotRunner(StagedModel& model, StepScope& scope, InputOf input)
      : model_(model), scope_(scope), input_(std::move(input)) {}

  void run(const Slot& slot) {
    const auto key = std::pair(slot.stage, slot.micro_batch);
    const bool is_last = slot.stage + 1 == model_.options.stages;
    switch (slot.kind) {
      case 'F': {
        scope_.begin_forward(slot.stage, slot.micro_batch);
        at::Tensor x = slot.stage == 0 ? input_(slot.micro_batch)
                                       : out_.at({slot.stage - 1, slot.micro_batch}).detach();
        if (slot.stage > 0) x.requires_grad_();
        in_[key] = x;
        const at::Tensor y = model_.handle.call(&Staged::run, slot.stage, x);
        out_[key] = is_last ? scaled(squares(y)) : y;
        return;
      }
      case 'B':
      case 'I': {
        scope_.begin_backward(slot.stage, slot.micro_batch,
                              slot.kind == 'B' ? Backward::kFull : Backward::kInputOnly);
        const at::Tensor y = std::exchange(out_.at(key), at::Tensor());
        if (is_last) {
          torch::autograd::backward({y}, {});
        } else if (y.requires_grad()) {
          torch::autograd::backward({y}, {in_.at({slot.stage + 1, slot.micro_batch}).grad()});
        }
        return;
      }
      case 'W':
        scope_.run_weight_gradients(slot.stage, slot.micro_batch);
        return;
      default:
        FAIL() << slot.kind;
    }
  }

  std::function<at::Tensor(const at::Tensor&)> scaled = [](const at::Tensor& loss) { return loss; };

 private:
  StagedModel& model_;
  StepScope& scope_;
  InputOf input_;
  std::map<std::pair<int, int>, at::Tensor> in_, out_;
};

inline SlotRunner::InputOf inputs(const World& world, int step = 0, std::int64_t width = 6) {
  return [rank = world.rank(), step, width](int micro_batch) {
    return input_of(rank, 10 * step + micro_batch, width);
  };
}

/// Runs one step: the slots, with each stage resharded and reduced where it is over.
inline void run_step(StagedModel& model, const std::vector<Slot>& slots, StepScopeOptions options,
                     const SlotRunner::InputOf& input,
                     const std::function<at::Tensor(const at::Tensor&)>& scaled = {}) {
  options.stages = model.options.stages;
  StepScope scope(model.handle, options);
  SlotRunner runner(model, scope, input);
  if (scaled) runner.scaled = scaled;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    runner.run(slots[i]);
    const auto comes_again = [&](const char* kinds) {
      return std::any_of(slots.begin() + static_cast<std::ptrdiff_t>(i) + 1, slots.end(),
                         [&](const Slot& later) {
                           return later.stage == slots[i].stage &&
                                  std::string(kinds).find(later.kind) != std::string::npos;
                         });
    };
    if (slots[i].kind != 'W' && slots[i].kind != 'F' && !comes_again("FBI")) {
      scope.reshard(slots[i].stage);
    }
    if (slots[i].kind != 'F' && slots[i].kind != 'I' &&
        (options.sync_every_micro_batch || !comes_again("FBIW"))) {
      scope.reduce(slots[i].stage);
    }
  }
  scope.finish();
}

/// Runs the same micro-batches in a loop without a scope. Each stage is a forward of its own: a
/// parameter that two of them share has two gradients, as in a list.
inline void run_loop(StagedModel& model, int micro_batches, const SlotRunner::InputOf& input,
                     bool sync_every = false,
                     const std::function<at::Tensor(const at::Tensor&)>& scaled = {}) {
  for (int k = 0; k < micro_batches; ++k) {
    const bool last = k + 1 == micro_batches;
    model.handle.set_requires_gradient_sync(last || sync_every);
    model.handle.set_requires_replica_reduce(last);
    at::Tensor y = input(k);
    for (int stage = 0; stage < model.options.stages; ++stage) {
      y = model.handle.call(&Staged::run, stage, y);
    }
    const at::Tensor loss = squares(y);
    backward(scaled ? scaled(loss) : loss);
  }
}

/// Bit for bit the gradients of both, which are gone then.
template <class Model>
void expect_same_and_clear(Model& model, Model& loop, const std::string& what = "") {
  expect_same(whole_gradients(model.handle), whole_gradients(loop.handle), what);
  model.handle.zero_grad();
  loop.handle.zero_grad();
}

}  // namespace tessera::test
