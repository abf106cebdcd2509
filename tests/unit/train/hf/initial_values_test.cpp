// Initial parameters of a Nemotron-H from scratch: distributions as transformers' class
// draws them, in the range of the sample's own spread.

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/thread_ranks.h"
#include "models/family.h"
#include "support/temporary_folder.h"
#include "support/test.h"
#include "train/hf/model_source.h"
#include "train/parallelize.h"

namespace tessera::train::initial_values_test {
namespace {

using models::LayerType;
using models::MambaSpec;
using models::ModelSpec;
using Values = std::vector<double>;

constexpr std::int64_t kHeads = 512;

/// Two layers of Mamba-2 and an MLP, with 1024 heads in all.
ModelSpec wide_spec(const std::function<void(MambaSpec&)>& change) {
  ModelSpec spec = models::traits(models::Family::kNemotronH).spec;
  spec.layer_types = {LayerType::kLinear, LayerType::kMlp, LayerType::kLinear};
  spec.num_hidden_layers = 3;
  spec.vocab_size = 16;
  spec.hidden_size = 32;
  spec.intermediate_size = 8;
  spec.num_attention_heads = 2;
  spec.num_key_value_heads = 2;
  spec.head_dim = 4;
  spec.moe->moe_intermediate_size = spec.moe->shared_intermediate_size = 8;
  MambaSpec& mamba = *spec.mamba;
  mamba.mamba_num_heads = kHeads;
  mamba.mamba_head_dim = 1;
  mamba.n_groups = 1;
  mamba.ssm_state_size = 4;
  change(mamba);
  return spec;
}

/// The values of all parameters whose name ends so, of both layers together.
Values drawn(const std::string& end, const std::function<void(MambaSpec&)>& change) {
  const TemporaryFolder folder;
  Config config;
  config.model.config = folder.write("config.json", config_json(wide_spec(change))).string();
  config.precision.param_dtype.dtype = DType::kFloat32;
  Values values;
  launch_threads(1, ThreadBackend::kInProcess, [&](World& world) {
    const Mesh mesh = world.mesh(MeshShape::dense(1, 1, 1, 1, 1));
    const auto model = parallelize(open_model(config.model), config, mesh);
    for (const ShardView& view : model->shards()) {
      if (!view.contract->name.ends_with(end)) continue;
      const at::Tensor shard = view.shard.detach().to(at::kDouble).contiguous();
      values.insert(values.end(), shard.const_data_ptr<double>(),
                    shard.const_data_ptr<double>() + shard.numel());
    }
  });
  return values;
}

/// The logarithms of the first steps of states.
Values log_steps(const std::function<void(MambaSpec&)>& change) {
  Values values = drawn(".dt_bias", change);
  for (double& value : values) value = std::log(std::log1p(std::exp(value)));
  return values;
}

/// The largest distance of the sample's distribution from the uniform one within [low, high], times
/// the root of its size: above 1.63 in one of a hundred samples (Kolmogorov).
double distance_from_uniform(Values sample, double low, double high) {
  std::ranges::sort(sample);
  const auto size = static_cast<double>(sample.size());
  double largest = 0.0;
  for (std::size_t i = 0; i < sample.size(); ++i) {
    const double share = (sample[i] - low) / (high - low), below = static_cast<double>(i) / size;
    largest = std::max({largest, share - below, below + 1.0 / size - share});
  }
  return largest * std::sqrt(size);
}
constexpr double kOneInAHundred = 1.63;

TEST(InitialValues, StepsAreUniformInTheLogarithmBetweenTheirKeys) {
  const auto published = [](MambaSpec&) {};
  const auto wider = [](MambaSpec& mamba) {
    mamba.time_step_min = 0.01;
    mamba.time_step_max = 2.0;
  };
  const Values found = log_steps(published), changed = log_steps(wider);
  ASSERT_EQ(found.size(), 2 * kHeads);
  EXPECT_LT(distance_from_uniform(found, std::log(0.001), std::log(0.1)), kOneInAHundred);
  EXPECT_LT(distance_from_uniform(changed, std::log(0.01), std::log(2.0)), kOneInAHundred);
  EXPECT_GT(distance_from_uniform(changed, std::log(0.001), std::log(0.1)), 10.0);
}

// transformers draws between the keys and lifts what lies below the floor onto it.
TEST(InitialValues, StepsBelowTheFloorAreTheFloor) {
  const Values found = log_steps([](MambaSpec& mamba) { mamba.time_step_floor = 0.01; });
  // fp32 of the parameter: 1e-7 relative of values near -4.6, and of their softplus.
  const double floor = std::log(0.01), rounding = 1e-5;
  Values above;
  for (const double step : found) {
    EXPECT_GE(step, floor - rounding);
    if (step > floor + rounding) above.push_back(step);
  }
  // Half of the range lies below: 512 of 1024, 16 the deviation of a binomial's.
  EXPECT_NEAR(static_cast<double>(above.size()), 512.0, 4 * 16.0);
  EXPECT_LT(distance_from_uniform(above, floor, std::log(0.1)), kOneInAHundred);
}

TEST(InitialValues, ALeastStepOfZeroBeginsAtTheFloor) {
  const Values found = log_steps([](MambaSpec& mamba) {
    mamba.time_step_min = 0.0;
    mamba.time_step_floor = 0.005;
  });
  EXPECT_LT(distance_from_uniform(found, std::log(0.005), std::log(0.1)), kOneInAHundred);
}

// Naive: as every other matrix.
TEST(InitialValues, OutProjIsNarrowerTheMoreLayersThereAre) {
  const auto scaled = drawn(".out_proj.weight", [](MambaSpec&) {});
  const double bound = 1.0 / std::sqrt(kHeads * 3.0);
  EXPECT_LT(distance_from_uniform(scaled, -bound, bound), kOneInAHundred);

  const auto plain =
      drawn(".out_proj.weight", [](MambaSpec& mamba) { mamba.rescale_prenorm_residual = false; });
  double squares = 0.0;
  for (const double value : plain) squares += value * value;
  // The standard deviation of 32768 values is known within 0.4 %.
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(plain.size())), 0.02, 0.02 * 4 * 0.004);
  EXPECT_GT(distance_from_uniform(plain, -bound, bound), 10.0);
}

}  // namespace
}  // namespace tessera::train::initial_values_test
