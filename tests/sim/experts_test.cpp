// Experts on devices: rows are ordered there as on the CPU, products end where the device says, and
// the host reads once where tokens travel, else never.
#include "moe/experts.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "comm/device.h"
#include "nn/mlp.h"
#include "sim/in_place.h"
#include "sim/reads.h"
#include "sim/streams.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/world.h"
#include "unit/nn/compare.h"

namespace tessera::moe::on_devices_test {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kExperts = 6, kHidden = 16, kInner = 24;

/// Returns [tokens, 2], ascending; no token chooses expert 4.
at::Tensor choice(std::int64_t tokens) {
  const at::Tensor token = at::arange(tokens, at::kLong);
  const at::Tensor first = token.remainder(3);
  return at::stack({first, at::where(token.remainder(2).eq(0), first + 1, at::full_like(first, 5))},
                   1);
}

struct Inputs {
  Tensors tensors;  ///< x, weights, gate_up, down, and biases or adapters
  at::Tensor indices, grad;
};

Inputs inputs_of(std::int64_t tokens, at::ScalarType dtype, bool bias) {
  auto draw = [&, seed = 0](at::IntArrayRef shape, double scale) mutable {
    return (sim::drawn(static_cast<std::uint64_t>(++seed), shape) * scale).to(dtype);
  };
  Inputs inputs{
      {draw({tokens, kHidden}, 1), draw({tokens, 2}, 0.3).abs(),
       draw({kExperts, 2 * kInner, kHidden}, 0.2), draw({kExperts, kHidden, kInner}, 0.2)},
      choice(tokens),
      draw({tokens, kHidden}, 1)};
  if (bias) {
    inputs.tensors.push_back(draw({kExperts, 2 * kInner}, 0.1));
    inputs.tensors.push_back(draw({kExperts, kHidden}, 0.1));
  }
  return inputs;
}

struct Ran {
  Tensors results;  ///< on the CPU: the output, then a gradient of each tensor
  int reads = 0;
};

Ran run(const Inputs& inputs, const at::Device& where, const parallel::Axis& ep = {}) {
  Tensors leaves;
  for (const at::Tensor& tensor : inputs.tensors) {
    leaves.push_back(tensor.to(where, tensor.scalar_type(), false, /*copy=*/true));
    leaves.back().requires_grad_(true);
  }
  ExpertWeights weights{leaves[2], leaves[3]};
  if (leaves.size() == 6) {
    weights.gate_up_bias = leaves[4];
    weights.down_bias = leaves[5];
  } else if (leaves.size() == 8) {
    weights.gate_up_adapter = {leaves[4], leaves[5], 0.5};
    weights.down_adapter = {leaves[6], leaves[7], 0.5};
  }
  const at::Tensor indices = inputs.indices.to(where), grad = inputs.grad.to(where);
  const sim::Reads reads;
  const at::Tensor out = experts(leaves[0], {indices, leaves[1], {}}, weights,
                                 {nn::swiglu_halves, Score::kAfterExperts, ep, "experts"});
  out.backward(grad);
  Ran ran{{}, reads.count()};
  ran.results.push_back(out.detach().cpu());
  for (const at::Tensor& leaf : leaves) ran.results.push_back(leaf.grad().cpu());
  return ran;
}

TEST(ExpertsOnDevices, RowsAreOrderedAsOnTheCpu) {
  comm::use_device(sim::device(0));
  for (const std::int64_t tokens : {0, 1, 13}) {
    const Dispatch expected = dispatch(choice(tokens), kExperts);
    sim::take_counts();
    const Dispatch found = dispatch(choice(tokens).to(sim::device(0)), kExperts);
    EXPECT_TRUE(found.slot_of_row.cpu().equal(expected.slot_of_row));
    EXPECT_TRUE(found.row_of_slot.cpu().equal(expected.row_of_slot));
    EXPECT_TRUE(found.offsets.empty());
    const at::Tensor ends = at::tensor(expected.offsets, at::kInt).narrow(0, 1, kExperts);
    EXPECT_TRUE(found.ends.cpu().equal(ends));
  }
}

// bf16 takes the grouped product, which reads ends on the device; fp32 a loop, for which the host
// reads them once. An expert without rows has gradients of zeros.
TEST(ExpertsOnDevices, AreThoseOfFp64OnTheCpu) {
  comm::use_device(sim::device(0));
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool bias : {false, true}) {
      for (const std::int64_t tokens : {1, 37}) {
        const Inputs inputs = inputs_of(tokens, dtype, bias);
        Inputs wide = inputs;
        for (at::Tensor& each : wide.tensors) each = each.to(at::kDouble);
        wide.grad = wide.grad.to(at::kDouble);
        const Ran expected = run(wide, at::kCPU), found = run(inputs, sim::device(0));
        EXPECT_EQ(found.reads, dtype == at::kFloat ? 1 : 0);
        // Rounded after each product, gate and sum.
        const nn::Bound bound =
            dtype == at::kFloat ? nn::Bound{4e-6, 4e-6} : nn::Bound{6.0 / 256, 6.0 / 256};
        for (std::size_t i = 0; i < found.results.size(); ++i) {
          nn::expect_close(found.results[i], expected.results[i], bound,
                           "result " + std::to_string(i) + " of " + std::to_string(tokens));
        }
        EXPECT_EQ(found.results[3][4].abs().sum().item<double>(), 0.0);
      }
    }
  }
}

// Products of bf16 that read nothing, and of fp32, for which the host reads once.
TEST(ExpertsOnDevices, AdaptersOfThemAreThoseOfFp64OnTheCpu) {
  comm::use_device(sim::device(0));
  for (const std::int64_t tokens : {1, 37}) {
    Inputs inputs = inputs_of(tokens, at::kBFloat16, /*bias=*/false);
    std::uint64_t seed = 20;
    for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{kExperts, 4, kHidden},
                                                   {kExperts, 2 * kInner, 4},
                                                   {kExperts, 4, kInner},
                                                   {kExperts, kHidden, 4}}) {
      inputs.tensors.push_back(sim::drawn(++seed, shape) * 0.3);
    }
    Inputs wide = inputs;
    for (at::Tensor& each : wide.tensors) each = each.to(at::kDouble);
    wide.grad = wide.grad.to(at::kDouble);
    const Ran expected = run(wide, at::kCPU), found = run(inputs, sim::device(0));
    EXPECT_EQ(found.reads, 1);
    // As above, with one more sum for each product.
    for (std::size_t i = 0; i < found.results.size(); ++i) {
      nn::expect_close(found.results[i], expected.results[i], {8.0 / 256, 8.0 / 256},
                       "result " + std::to_string(i) + " of " + std::to_string(tokens));
    }
    EXPECT_EQ(found.results[5].scalar_type(), at::kFloat);
    EXPECT_EQ(found.results[5][4].abs().sum().item<double>(), 0.0);
  }
}

TEST(ExpertsOnDevices, TokensThatTravelHaveTheBitsOfOneRankAndTheHostReadsOnce) {
  // Threads share out a product by its rows, of which ranks have others than one rank.
  at::set_num_threads(1);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::vector<std::int64_t>& tokens :
         {std::vector<std::int64_t>{16, 16}, {0, 7}, {0, 0}, {5, 0, 11}}) {
      for (const test::Place& where : {test::Place{"sim"}, test::Place{"sim:0", true}}) {
        const sim::In here(where);
        const int size = static_cast<int>(tokens.size());
        std::int64_t all = 0;
        for (const std::int64_t each : tokens) all += each;
        const Inputs inputs = inputs_of(all, dtype, /*bias=*/false);
        comm::use_device(sim::device(0));
        const Ran whole = run(inputs, sim::device(0));
        test::ranks(size).run([&](World& world) {
          at::set_num_threads(1);
          const parallel::Axis axis = parallel::axis_of(
              world.mesh(MeshShape::sparse(1, 1, 1, world.size(), 1)), axis::kExpert);
          std::int64_t begin = 0;
          for (int rank = 0; rank < axis.rank; ++rank)
            begin += tokens[static_cast<std::size_t>(rank)];
          const std::int64_t count = tokens[static_cast<std::size_t>(axis.rank)];
          const std::int64_t own = kExperts / size, first = axis.rank * own;
          const auto mine = [&](const Tensors& of, std::size_t by_token) {
            Tensors parts;
            for (std::size_t i = 0; i < of.size(); ++i) {
              parts.push_back(i < by_token ? of[i].narrow(0, begin, count)
                                           : of[i].narrow(0, first, own));
            }
            return parts;
          };
          const Ran found = run({mine(inputs.tensors, 2), inputs.indices.narrow(0, begin, count),
                                 inputs.grad.narrow(0, begin, count)},
                                world.device(), axis);
          EXPECT_EQ(found.reads, 1);
          const Tensors expected = mine(whole.results, 3);
          for (std::size_t i = 0; i < found.results.size(); ++i) {
            sim::expect_same_bits(found.results[i], expected[i],
                                  "result " + std::to_string(i) + " over " + std::to_string(size));
          }
        });
      }
    }
  }
}

// The copy of the rows for the weights' gradients is gone before the rows' own gradient is made.
TEST(ExpertsOnDevices, CombiningBackMakesOneTensorOfRowsAtATime) {
  comm::use_device(sim::device(0));
  constexpr std::int64_t kTokens = 512;
  const auto there = [](const at::Tensor& tensor) { return tensor.to(sim::device(0)); };
  const Dispatch order = dispatch(there(choice(kTokens)), kExperts);
  const at::Tensor rows = there(sim::drawn(1, {2 * kTokens, 256}, at::kBFloat16));
  const at::Tensor weights = there(sim::drawn(2, {kTokens, 2}, at::kBFloat16));
  rows.requires_grad_(true);
  weights.requires_grad_(true);
  const at::Tensor out = combine(rows, weights, order);
  const at::Tensor grad = at::ones_like(out).detach();
  c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->resetPeakStats(0);
  const std::int64_t before = sim::live_bytes(0);
  out.backward(grad);
  const auto bytes = static_cast<std::int64_t>(rows.nbytes());
  EXPECT_LT(sim::peak_bytes(0) - before, bytes + bytes / 2);
}

// Where the host does not wait, scores that are not finite are reported when the step's values are
// read.
TEST(ExpertsOnDevices, ScoresThatAreNotFiniteAreNotedForWhoReadsAnyway) {
  comm::use_device(sim::device(0));
  const Inputs inputs = inputs_of(4, at::kBFloat16, false);
  const auto there = [](const at::Tensor& tensor) { return tensor.to(sim::device(0)); };
  const auto forward = [&](double score) {
    at::Tensor scores = at::zeros({4, kExperts}, at::kBFloat16);
    scores[2][3] = score;
    RouteOptions options;
    options.experts_per_token = 2;
    Routing routing = route(there(scores), options);
    routing.weights = routing.weights.to(at::kBFloat16);
    experts(there(inputs.tensors[0]), routing, {there(inputs.tensors[2]), there(inputs.tensors[3])},
            {nn::swiglu_halves, Score::kAfterExperts, {}, "layers.3.mlp"});
  };
  const ScoreChecks checks;
  EXPECT_FALSE(checks.noted().flags().defined());
  const sim::Reads reads;
  forward(1.0);
  EXPECT_NO_THROW(checks.noted().check(checks.noted().flags().cpu()));
  forward(std::numeric_limits<double>::infinity());
  EXPECT_EQ(reads.count(), 0);
  EXPECT_REFUSED(kNumeric, checks.noted().check(checks.noted().flags().cpu()), "layers.3.mlp");
}

}  // namespace
}  // namespace tessera::moe::on_devices_test
