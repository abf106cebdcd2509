// Launches of a layer on a device, and the places where the host waits: differences between models
// of more and of fewer layers, so that embedding and head are left out.
#include <ATen/ATen.h>

#include <sstream>

#include "comm/device.h"
#include "models/decoder.h"
#include "nn/linear.h"
#include "nn/parameter.h"
#include "sim/streams.h"
#include "support/test.h"
#include "unit/models/small_spec.h"

namespace tessera::sim::launches_test {
namespace {

using models::Family;
using models::ModelSpec;

std::int64_t sum_of(const std::map<std::string, std::int64_t>& counts) {
  std::int64_t sum = 0;
  for (const auto& [name, count] : counts) sum += count;
  return sum;
}

std::string text_of(const std::map<std::string, std::int64_t>& counts) {
  std::ostringstream text;
  for (const auto& [name, count] : counts) text << name << ' ' << count << ", ";
  return text.str();
}

struct PassCounts {
  Counts forward, backward;
};

/// Counts the second pass: the first one makes the tables of rope.
PassCounts counts_of(const ModelSpec& spec) {
  models::Decoder model(spec);
  nn::materialize(model);
  {
    const at::NoGradGuard no_grad;
    for (auto& item : model.named_parameters()) {
      const at::Tensor values = at::full(item.value().sizes(), 0.01, at::kBFloat16);
      item.value().set_data(values.to(device(0)));
    }
  }
  const at::Tensor ids = at::arange(24).view({2, 12}).to(device(0));
  PassCounts counts;
  for (int pass = 0; pass < 2; ++pass) {
    for (auto& item : model.named_parameters()) item.value().mutable_grad() = at::Tensor();
    take_counts();
    const at::Tensor loss = model.loss_sum(ids, ids);
    counts.forward = take_counts();
    loss.backward();
    counts.backward = take_counts();
  }
  return counts;
}

Counts of_one_layer(const Counts& more, const Counts& fewer, std::int64_t layers) {
  Counts result;
  for (const auto& [name, count] : more.launches) {
    const auto found = fewer.launches.find(name);
    const std::int64_t rest = count - (found == fewer.launches.end() ? 0 : found->second);
    EXPECT_EQ(rest % layers, 0) << name;
    if (rest != 0) result.launches[name] = rest / layers;
  }
  result.waits = more.waits;
  return result;
}

PassCounts of_one_layer(ModelSpec spec) {
  comm::use_device(device(0));
  spec.num_hidden_layers = 3;
  const PassCounts more = counts_of(spec);
  spec.num_hidden_layers = 1;
  const PassCounts fewer = counts_of(spec);
  return {of_one_layer(more.forward, fewer.forward, 2),
          of_one_layer(more.backward, fewer.backward, 2)};
}

// In bf16, without recomputation: a GPU that is fed by a slow host stands still between launches.
TEST(Launches, ALayerOfQwen3MakesFewAndNoneOfThemIsWaitedFor) {
  const PassCounts counts = of_one_layer(models::small(Family::kQwen3));
  EXPECT_LE(sum_of(counts.forward.launches), 40) << text_of(counts.forward.launches);
  EXPECT_LE(sum_of(counts.backward.launches), 80) << text_of(counts.backward.launches);
  EXPECT_EQ(counts.forward.waits.size(), 0U) << text_of(counts.forward.waits);
  EXPECT_EQ(counts.backward.waits.size(), 0U) << text_of(counts.backward.waits);
}

ModelSpec with_experts() {
  ModelSpec spec = models::small(Family::kQwen3Moe);
  spec.moe.emplace();
  spec.moe->num_experts = 8;
  spec.moe->experts_per_token = 2;
  spec.moe->moe_intermediate_size = 24;
  return spec;
}

// Order, counts and ends of the experts' rows are formed where they are read.
TEST(Launches, ALayerOfExpertsOnItsOwnRankLetsNoneWait) {
  const PassCounts counts = of_one_layer(with_experts());
  EXPECT_LE(sum_of(counts.forward.launches), 60) << text_of(counts.forward.launches);
  EXPECT_LE(sum_of(counts.backward.launches), 80) << text_of(counts.backward.launches);
  EXPECT_EQ(counts.forward.launches.at("_grouped_mm"), 2);
  EXPECT_EQ(counts.backward.launches.at("_grouped_mm"), 4);
  EXPECT_EQ(counts.forward.waits.size(), 0U) << text_of(counts.forward.waits);
  EXPECT_EQ(counts.backward.waits.size(), 0U) << text_of(counts.backward.waits);
}

// Attention reads the tensors of projections and rope without a copy.
TEST(Launches, AttentionCopiesNothing) {
  const PassCounts counts = of_one_layer(models::small(Family::kLlama));
  EXPECT_EQ(counts.forward.launches.at("_scaled_dot_product_flash_attention"), 1);
  ASSERT_EQ(counts.backward.launches.at("_scaled_dot_product_flash_attention_backward"), 1);
  EXPECT_EQ(counts.forward.launches.count("copy_"), 0U) << text_of(counts.forward.launches);
  EXPECT_EQ(counts.backward.launches.count("copy_"), 0U) << text_of(counts.backward.launches);
}

// On the host the factors of a large model take minutes a step.
TEST(Launches, DropoutIsDrawnWhereItDrops) {
  comm::use_device(device(0));
  const nn::DropoutDraw draw{.probability = 0.3, .stream = 0x123456789ABCDEF0, .first_row = 2};
  take_counts();
  const at::Tensor found = nn::dropout_factors(draw, {2, 3, 40}, at::kFloat, device(0));
  const Counts counts = take_counts();
  EXPECT_EQ(counts.launches.count("upload"), 0U) << text_of(counts.launches);
  EXPECT_EQ(counts.waits.size(), 0U) << text_of(counts.waits);
  EXPECT_TRUE(found.cpu().equal(nn::dropout_factors(draw, {2, 3, 40}, at::kFloat)));
}

}  // namespace
}  // namespace tessera::sim::launches_test
