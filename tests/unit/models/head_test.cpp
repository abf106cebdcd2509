// A head's gradient is never put off: what a weight product waits with is the gradient of all
// logits.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "models/decoder.h"
#include "models/gemma4/gemma4_model.h"
#include "nn/parameter.h"
#include "support/ranks.h"
#include "tessera/shard.h"
#include "unit/models/small_spec.h"

namespace tessera::models::head_test {
namespace {

template <class Head>
void expect_no_ticket(std::shared_ptr<Head> head, const ModelSpec& spec) {
  nn::materialize(*head);
  {
    const at::NoGradGuard no_grad;
    for (auto& item : head->named_parameters()) item.value().fill_(0.5);
  }
  test::ranks(1).run([&](World& world) {
    auto handle = fully_shard(head, test::data_mesh(world));
    handle.set_defer_weight_gradients(true);
    const at::Tensor x = at::ones({1, 3, spec.hidden_size}).set_requires_grad(true);
    const at::Tensor targets = at::arange(3, at::kLong).reshape({1, 3});
    const at::Tensor loss = handle.forward(x, targets);
    torch::autograd::backward({loss}, {});
    EXPECT_EQ(handle.unit()->runtime().sink().open_tickets(), 0U);
    EXPECT_TRUE(handle.named_parameters()["lm_head.weight"].grad().defined());
    EXPECT_TRUE(x.grad().defined());
  });
}

TEST(Head, OfADecoderFormsItsGradientAtOnce) {
  const ModelSpec spec = tiny(Family::kQwen3);
  expect_no_ticket(std::make_shared<DecoderHead>(spec, local_sizes(spec, {})), spec);
}

TEST(Head, OfGemma4FormsItsGradientAtOnce) {
  ModelSpec spec = tiny(Family::kGemma4);
  spec.gemma4.emplace().final_logit_softcapping = 30.0;
  expect_no_ticket(std::make_shared<Gemma4Head>(spec, nn::TensorRegion()), spec);
}

}  // namespace
}  // namespace tessera::models::head_test
