// Latent attention against its formula in fp64, written with complex numbers and einsum.
#include "nn/attention/mla.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "nn/parameter.h"
#include "support/test.h"
#include "unit/nn/compare.h"

namespace tessera::nn::mla_test {
namespace {

using Named = std::map<std::string, at::Tensor>;

constexpr std::int64_t kNope = 6;
constexpr std::int64_t kRope = 8;
constexpr double kScale = 0.3;

MlaOptions options(bool q_lora, Bias bias) {
  MlaOptions options{.hidden_size = 20,
                     .heads = 3,
                     .kv_lora_rank = 10,
                     .qk_nope_head_dim = kNope,
                     .qk_rope_head_dim = kRope,
                     .v_head_dim = 5,
                     .bias = bias,
                     .scale = kScale};
  if (q_lora) options.q_lora_rank = 7;
  return options;
}

std::shared_ptr<Rope> rope() {
  return std::make_shared<Rope>(RopeOptions{.theta = 100.0,
                                            .type = RopeType::kYarn,
                                            .factor = 4.0,
                                            .original_max_position_embeddings = 64,
                                            .yarn = {.attention_factor = 1.25}},
                                kRope);
}

std::shared_ptr<Mla> drawn(const MlaOptions& with) {
  auto mla = std::make_shared<Mla>(with, rope());
  materialize(*mla);
  for (const auto& item : mla->named_parameters()) {
    const at::NoGradGuard no_grad;
    item.value().copy_(at::randn(item.value().sizes()) * 0.3);
    if (item.key().find("norm") != std::string::npos) item.value().add_(1.0);
  }
  return mla;
}

at::Tensor normed(const at::Tensor& x, const at::Tensor& weight) {
  return x / (x.square().mean(-1, true) + 1e-6).sqrt() * weight;
}

at::Tensor product(const at::Tensor& x, const Named& p, const std::string& name) {
  const at::Tensor y = at::matmul(x, p.at(name + ".weight").t());
  return p.contains(name + ".bias") ? y + p.at(name + ".bias") : y;
}

/// x [B, T, H, rope] by position, as complex numbers.
at::Tensor turned(const at::Tensor& x) {
  const RopeTable table = rope()->table(x.size(1), at::kFloat, at::kCPU);
  const at::Tensor turn = at::complex(table.cos.to(at::kDouble), table.sin.to(at::kDouble));
  const at::Tensor pairs = at::view_as_complex(x.reshape({x.size(0), x.size(1), x.size(2), -1, 2}));
  return at::view_as_real(pairs * turn.unsqueeze(1)).flatten(3);
}

at::Tensor formula(const at::Tensor& x, const Named& p, std::int64_t heads) {
  const at::Tensor flat =
      p.contains("q_proj.weight")
          ? product(x, p, "q_proj")
          : product(normed(product(x, p, "q_a_proj"), p.at("q_a_layernorm.weight")), p, "q_b_proj");
  const at::Tensor q = flat.unflatten(2, {heads, -1});
  const at::Tensor both = product(x, p, "kv_a_proj_with_mqa");
  const std::int64_t rank = both.size(2) - kRope;
  const at::Tensor latent = normed(both.narrow(2, 0, rank), p.at("kv_a_layernorm.weight"));
  const at::Tensor kv = product(latent, p, "kv_b_proj").unflatten(2, {heads, -1});
  const at::Tensor q_rope = turned(q.narrow(3, kNope, kRope));
  const at::Tensor k_rope = turned(both.narrow(2, rank, kRope).unsqueeze(2)).squeeze(2);
  const at::Tensor scores =
      (at::einsum("bihd,bjhd->bhij", {q.narrow(3, 0, kNope), kv.narrow(3, 0, kNope)}) +
       at::einsum("bihd,bjd->bhij", {q_rope, k_rope})) *
      kScale;
  const at::Tensor later = at::ones({x.size(1), x.size(1)}, at::kBool).triu(1);
  const at::Tensor weights =
      at::softmax(scores.masked_fill(later, -std::numeric_limits<double>::infinity()), 3);
  const at::Tensor values = kv.narrow(3, kNope, kv.size(3) - kNope);
  return product(at::einsum("bhij,bjhd->bihd", {weights, values}).flatten(2), p, "o_proj");
}

struct Results {
  at::Tensor output;
  Named gradients;
};

Results run(const std::shared_ptr<Mla>& mla, const at::Tensor& input, const at::Tensor& grad) {
  const at::Tensor x = input.detach().clone().requires_grad_(true);
  mla->zero_grad();
  const at::Tensor y = mla->forward(x);
  y.backward(grad.to(y.scalar_type()));
  Results results{y.detach(), {{"x", x.grad()}}};
  for (const auto& item : mla->named_parameters()) {
    results.gradients[item.key()] = item.value().grad().clone();
  }
  return results;
}

Results run_formula(const std::shared_ptr<Mla>& mla, const at::Tensor& input,
                    const at::Tensor& grad, std::int64_t heads) {
  Named p;
  for (const auto& item : mla->named_parameters()) {
    p[item.key()] = item.value().detach().to(at::kDouble).clone().requires_grad_(true);
  }
  const at::Tensor x = input.detach().to(at::kDouble).clone().requires_grad_(true);
  const at::Tensor y = formula(x, p, heads);
  y.backward(grad.to(at::kDouble));
  Results results{y.detach(), {{"x", x.grad()}}};
  for (const auto& [name, value] : p) results.gradients[name] = value.grad();
  return results;
}

void expect_equal(const Results& found, const Results& expected, const Bound& bound,
                  const std::string& what) {
  expect_close(found.output, expected.output, bound, what + ": output");
  ASSERT_EQ(found.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    expect_close(found.gradients.at(name), gradient, bound, what + ": gradient of " + name);
  }
}

TEST(Mla, EqualsItsFormulaInOutputAndAllGradients) {
  at::manual_seed(21);
  for (const bool q_lora : {false, true}) {
    for (const Bias bias : {Bias::kNo, Bias::kYes}) {
      const MlaOptions with = options(q_lora, bias);
      const auto mla = drawn(with);
      const at::Tensor x = at::randn({2, 11, 20});
      const at::Tensor grad = at::randn({2, 11, 20});
      const Results exact = run_formula(mla, x, grad, with.heads);
      // A dozen fp32 roundings and sums of some hundred terms.
      expect_equal(run(mla, x, grad), exact, {0.0, 5e-6}, "float");
      mla->to(at::kDouble);
      // fp64 takes the composite form everywhere; the tables are fp32 in both.
      expect_equal(run(mla, x.to(at::kDouble), grad),
                   run_formula(mla, x.to(at::kDouble), grad, with.heads), {0.0, 1e-13}, "double");
    }
  }
}

TEST(Mla, Bfloat16StaysNearTheFormula) {
  at::manual_seed(22);
  const MlaOptions with = options(true, Bias::kNo);
  const auto mla = drawn(with);
  mla->to(at::kBFloat16);
  const at::Tensor x = at::randn({2, 11, 20}).to(at::kBFloat16);
  const at::Tensor grad = at::randn({2, 11, 20}).to(at::kBFloat16);
  // Ten roundings to 2^-8 in a row, with gradients of either sign.
  expect_equal(run(mla, x, grad), run_formula(mla, x, grad, with.heads), {0.0, 10.0 / 256},
               "bfloat16");
}

TEST(Mla, EarlierPositionsDoNotSeeLaterOnes) {
  at::manual_seed(23);
  const auto mla = drawn(options(false, Bias::kNo));
  const at::Tensor x = at::randn({1, 9, 20});
  const at::Tensor before = mla->forward(x).detach().clone();
  x.narrow(1, 6, 3).fill_(4.0);
  const at::Tensor after = mla->forward(x);
  EXPECT_TRUE(before.narrow(1, 0, 6).equal(after.narrow(1, 0, 6)));
  EXPECT_FALSE(before.narrow(1, 6, 3).equal(after.narrow(1, 6, 3)));
}

// Two ranks with half of the heads each add up to the whole: what tensor parallelism rests on.
TEST(Mla, PartsOfTheHeadsAddUp) {
  at::manual_seed(24);
  MlaOptions with = options(true, Bias::kNo);
  with.heads = 4;
  const auto whole = drawn(with);
  const at::Tensor x = at::randn({2, 7, 20});
  at::Tensor sum;
  for (const std::int64_t part : {0, 1}) {
    with.heads = 2;
    const auto half = drawn(with);
    for (const auto& item : half->named_parameters()) {
      const at::NoGradGuard no_grad;
      const at::Tensor from = whole->named_parameters()[item.key()];
      const std::int64_t dim = item.key() == "o_proj.weight" ? 1 : 0;
      const std::int64_t size = item.value().size(dim);
      const std::int64_t begin = from.size(dim) == size ? 0 : part * size;
      item.value().copy_(from.narrow(dim, begin, size));
    }
    const at::Tensor y = half->forward(x);
    sum = sum.defined() ? sum + y : y;
  }
  expect_close(sum.detach(), whole->forward(x).detach(), {0.0, 2e-6}, "sum of halves");
}

TEST(Mla, RunsWithoutRows) {
  const auto mla = drawn(options(true, Bias::kYes));
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    mla->to(dtype);
    const Results results = run(mla, at::zeros({0, 5, 20}, dtype), at::zeros({0, 5, 20}, dtype));
    EXPECT_EQ(results.output.sizes(), at::IntArrayRef({0, 5, 20}));
    for (const auto& [name, gradient] : results.gradients) {
      EXPECT_EQ(gradient.abs().sum().item<double>(), 0.0) << name;
    }
  }
}

}  // namespace
}  // namespace tessera::nn::mla_test
