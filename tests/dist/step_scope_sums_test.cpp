// Sums inside a step scope: unrounded in any order of forming them, and divided once.

#include "dist/staged.h"
#include "support/test.h"
#include "tessera/grad_scaler.h"

namespace tessera::test::step_scope_sums_test {
namespace {

constexpr int kMicroBatches = 4;
constexpr const char* kZeroBubble =
    "F0.0 F0.1 F1.0 I1.0 F0.2 I0.0 F1.1 I1.1 W1.0 I0.1 F1.2 I1.2 W0.0 F0.3 W1.1 I0.2 W0.1 W1.2 "
    "F1.3 B1.3 W0.2 I0.3 W0.3";

// Naive: one rounding to bf16 a micro-batch, where the sum is kept in the layer's dtype.
TEST_ON_RANKS(StepScopes, DeferredAndEagerWeightsAreFp32SumsOfTheirBf16Gradients, 1) {
  constexpr int kMany = 20;
  const StagedOptions staged{.stages = 1, .pieces = 2};
  StagedModel model(data_mesh(world), staged, in_bfloat16());
  std::string list;
  // Every third one at once, the others two micro-batches later.
  for (int k = 0; k < kMany; ++k) {
    list += concat(" F0.", k, k % 3 == 2 ? " B0." : " I0.", k);
    if (k % 3 == 1) list += concat(" W0.", k - 1, " W0.", k);
  }
  const auto input = inputs(world, 0, staged.width);
  // Each micro-batch's own gradients, as bf16 has them.
  Tensors sums;
  StagedModel alone(data_mesh(world), staged, in_bfloat16());
  for (int k = 0; k < kMany; ++k) {
    alone.handle.zero_grad();
    backward(squares(alone.handle.forward(input(k))));
    for (const auto& [name, gradient] : whole_gradients(alone.handle)) {
      EXPECT_TRUE(same_bits(gradient.to(at::kBFloat16).to(at::kFloat), gradient)) << name;
      auto& sum = sums[name];
      sum = sum.defined() ? sum + gradient : gradient;
    }
  }
  for (int step = 0; step < 2; ++step) {
    run_step(model, slots_of(list), {.schedule = "twenty"}, input);
    expect_same(whole_gradients(model.handle), sums, concat("step ", step));
    model.handle.zero_grad();
  }
}

struct List {
  const char* slots;
  int ranks;
  bool syncs_every;
};
constexpr List kLists[] = {{"FBFBFB", 1, false},   {"FIWFIWFIW", 1, false}, {"FIFIFIWWW", 2, false},
                           {"FFFIWBIW", 2, false}, {"FIWFBFIW", 2, true},   {"FIFIWFIWW", 2, true},
                           {"FFFBBB", 2, true}};

// The classic: in bf16 256 + 1 is 256.
TEST(StepScopes, WhatBf16WouldLoseStays) {
  for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
    for (const auto& [list, count, syncs] : kLists) {
      ranks(count).run([&](World& world) {
        auto handle = fully_shard(std::make_shared<Factor>(), data_mesh(world), in_bfloat16());
        for (int step = 0; step < 2; ++step) {
          StepScope scope(handle,
                          {.reshard = reshard, .sync_every_micro_batch = syncs, .schedule = list});
          std::map<char, int> done;
          std::map<int, at::Tensor> out;
          std::vector<int> pending;
          const double values[] = {256, 1, -256};
          for (const char kind : std::string(list)) {
            if (kind == 'F') {
              const int k = done['F']++;
              scope.begin_forward(0, k);
              out[k] = handle.forward(here(at::full({1, 1}, values[k], at::kBFloat16)));
            } else if (kind == 'W') {
              scope.run_weight_gradients(0, done['W']++);
              while (std::find(pending.begin(), pending.end(), done['W']) == pending.end() &&
                     done['W'] < done['B']) {
                ++done['W'];
              }
            } else {
              const int k = done['B']++;
              if (kind == 'I') pending.push_back(k);
              if (kind == 'B' && done['W'] == k) ++done['W'];
              scope.begin_backward(0, k, kind == 'B' ? Backward::kFull : Backward::kInputOnly);
              backward(out[k].sum());
            }
            if (syncs && kind != 'F') scope.reduce(0);
          }
          scope.finish();
          EXPECT_EQ(whole_gradients(handle).at("linear.weight").item<double>(), 1.0) << list;
          handle.zero_grad();
        }
      });
    }
  }
}

// Micro-batches of several scopes are one sum where all but the last leave them unreduced.
TEST(StepScopes, SeveralScopesAreOneSumWithoutGradientSync) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      StagedModel model(data_mesh(world), {}), loop(data_mesh(world), {});
      for (int step = 0; step < 2; ++step) {
        for (int part = 0; part < 2; ++part) {
          model.handle.set_requires_gradient_sync(part == 1);
          run_step(model, slots_of(kZeroBubble), {.schedule = "part"},
                   inputs(world, part, model.options.width));
        }
        run_loop(loop, 2 * kMicroBatches, [&](int k) {
          return inputs(world, k / kMicroBatches, model.options.width)(k % kMicroBatches);
        });
        expect_same_and_clear(model, loop);
      }
    });
  }
}

// Losses are multiplied by a power of two, gradients divided by it, once.
TEST_ON_RANKS(StepScopes, ALossScaleIsTakenOutOnce, 2) {
  StagedModel model(data_mesh(world), {}), loop(data_mesh(world), {});
  GradScalerOptions options;
  options.init_scale = 1024;
  GradScaler scaler(model.handle, options);
  for (int step = 0; step < 2; ++step) {
    const auto input = inputs(world, step, model.options.width);
    run_step(model, slots_of(kZeroBubble), {.schedule = "scaled"}, input,
             [&](const at::Tensor& loss) { return scaler.scaled(loss); });
    run_loop(loop, kMicroBatches, input);
    expect_same_and_clear(model, loop);
  }
}

}  // namespace
}  // namespace tessera::test::step_scope_sums_test
