// Property: a region whose body is any small program computes, when it is replayed, what its body
// computes, bit for bit; or it is refused by a reason.
//
// A case follows from its seed: what bodies compute (ATen's operations and kernels of the list, on
// what came in, on parameters and on what was computed before), sizes, strides and dtypes of
// arguments, what needs a gradient, how many micro-batches a sum has, calls without gradients and
// ones of other sizes in between. A body draws its operations again in each call, from the same
// seed, by the sizes and dtypes that it finds. TESSERA_REPLAY_SEED=N runs one case and prints it,
// TESSERA_REPLAY_FROM and TESSERA_REPLAY_CASES others.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <array>
#include <iostream>
#include <random>

#include "dist/replayed.h"
#include "nn/attention/attention.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::test::replay_programs_test {
namespace {

constexpr std::int64_t kMost = 1 << 12;  ///< elements of a value

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}
  std::size_t below(std::size_t count) { return engine_() % count; }
  bool one_in(std::size_t count) { return below(count) == 0; }
  template <class T>
  const T& of(const std::vector<T>& all) {
    return all[below(all.size())];
  }

 private:
  std::mt19937_64 engine_;
};

/// One run of a body.
class BodyRun {
 public:
  BodyRun(std::uint64_t seed, Part& part, const Several& in, bool may_be_random, std::string* text)
      : draw_(seed), part_(part), may_be_random_(may_be_random), text_(text) {
    for (const auto& each : in) {
      if (!each.defined()) continue;
      (at::isFloatingType(each.scalar_type()) ? values_ : ids_).push_back(each);
    }
    inputs_ = values_.size();
    if (draw_.one_in(2)) values_.push_back(part.weight);
    if (draw_.one_in(2)) values_.push_back(part.bias);
    if (draw_.one_in(3)) values_.push_back(part.table);
  }

  Several run() {
    const std::size_t count = 3 + draw_.below(12);
    for (std::size_t i = 0; i < count; ++i) one_operation();
    // The last one comes of most of the others.
    Several results{values_.back()};
    if (draw_.one_in(3)) results.push_back(values_[draw_.below(values_.size())] * 1.0);
    if (draw_.one_in(5)) results.push_back(values_[draw_.below(values_.size())]);
    if (draw_.one_in(6) && !ids_.empty()) results.push_back(ids_[0] + 1);
    return results;
  }

 private:
  using Kind = void (BodyRun::*)();

  void one_operation() {
    static const std::vector<Kind> kinds{
        &BodyRun::unary,   &BodyRun::unary,     &BodyRun::with_number, &BodyRun::of_two,
        &BodyRun::of_two,  &BodyRun::linear,    &BodyRun::linear,      &BodyRun::product,
        &BodyRun::norm,    &BodyRun::gate,      &BodyRun::halves,      &BodyRun::softmax,
        &BodyRun::turned,  &BodyRun::part,      &BodyRun::joined,      &BodyRun::cast,
        &BodyRun::changed, &BodyRun::changed,   &BodyRun::sum,         &BodyRun::expanded,
        &BodyRun::chosen,  &BodyRun::picked,    &BodyRun::attention,   &BodyRun::looked_up,
        &BodyRun::batched, &BodyRun::convolved, &BodyRun::refused};
    const auto before = values_.size();
    (this->*draw_.of(kinds))();
    if (values_.size() > before && values_.back().numel() > kMost) values_.pop_back();
  }

  void add(const char* name, const at::Tensor& value) {
    values_.push_back(value);
    if (text_ == nullptr) return;
    *text_ += concat("  ", name, " -> ", value.scalar_type(), " ");
    for (const auto size : value.sizes()) *text_ += concat(size, ",");
    *text_ += " strides ";
    for (const auto stride : value.strides()) *text_ += concat(stride, ",");
    *text_ += "\n";
  }
  /// More often a late one.
  at::Tensor any() {
    const std::size_t back = std::min(draw_.below(values_.size()), draw_.below(values_.size()));
    return values_[values_.size() - 1 - back];
  }
  at::Tensor wide(const at::Tensor& x) { return x.size(-1) == Part::kWidth ? x : at::Tensor(); }
  at::Tensor some_wide() {
    for (int i = 0; i < 4; ++i) {
      const at::Tensor x = any();
      if (x.dim() > 1 && x.size(-1) == Part::kWidth) return x;
    }
    return values_[0];
  }
  /// Returns a value of the same sizes and dtype as `x`, if there is one.
  at::Tensor like(const at::Tensor& x) {
    for (int i = 0; i < 4; ++i) {
      const at::Tensor y = any();
      if (y.sizes() == x.sizes() && y.scalar_type() == x.scalar_type()) return y;
    }
    return x * 0.5;
  }

  void unary() {
    const at::Tensor x = any();
    switch (draw_.below(10)) {
      case 0:
        return add("sin", x.sin());
      case 1:
        return add("tanh", x.tanh());
      case 2:
        return add("sigmoid", x.sigmoid());
      case 3:
        return add("silu", at::silu(x));
      case 4:
        return add("gelu", at::gelu(x));
      case 5:
        return add("relu", x.relu());
      case 6:
        return add("neg", x.neg());
      case 7:
        return add("sqrt", (x.abs() + 1.0).sqrt());
      case 8:
        return add("exp", x.clamp(-2.0, 2.0).exp());
      default:
        return add("clone", x.clone());
    }
  }
  void with_number() {
    const at::Tensor x = any();
    const double number = 0.25 * static_cast<double>(1 + draw_.below(5));
    switch (draw_.below(4)) {
      case 0:
        return add("x * n", x * number);
      case 1:
        return add("x + n", x + number);
      case 2:
        return add("n - x", number - x);
      default:
        return add("x / n", x / number);
    }
  }
  void of_two() {
    const at::Tensor x = any();
    at::Tensor y = like(x);
    if (draw_.one_in(4)) y = x.mean(-1, /*keepdim=*/true);
    if (draw_.one_in(4) && x.size(-1) == Part::kWidth) y = part_.bias;
    if (draw_.one_in(5)) y = x;
    switch (draw_.below(5)) {
      case 0:
        return add("x + y", x + y);
      case 1:
        return add("x - y", x - y);
      case 2:
        return add("add", at::add(x, y, 0.5));
      case 3:
        return add("maximum", at::maximum(x, y));
      default:
        return add("x * y", x * y.tanh());
    }
  }
  void linear() {
    const at::Tensor x = some_wide();
    switch (draw_.below(4)) {
      case 0:
        return add("at::linear", at::linear(x.to(part_.weight.scalar_type()), part_.weight));
      case 1:
        return add("at::linear, bias",
                   at::linear(x.to(part_.weight.scalar_type()), part_.weight, part_.bias));
      case 2:
        return add("nn::linear", nn::linear(x, part_.weight));
      default:
        return add("nn::linear, bias", nn::linear(x, part_.weight, part_.bias));
    }
  }
  void product() {
    const at::Tensor x = some_wide(), y = some_wide();
    if (x.dim() != 2 || y.dim() != 2 || x.scalar_type() != y.scalar_type()) return unary();
    const at::Tensor scores = at::mm(x, y.t());
    if (draw_.one_in(2)) return add("x y^T", scores * 0.1);
    add("x y^T y", at::mm(scores.tanh(), y) * 0.2);
  }
  void norm() {
    const at::Tensor x = some_wide();
    if (draw_.one_in(4)) return add("layer_norm", at::layer_norm(x, {Part::kWidth}));
    if (draw_.one_in(4)) return add("plain_rms_norm", nn::plain_rms_norm(x, 1e-6));
    if (draw_.one_in(3)) {
      const auto both = nn::add_rms_norm(x, like(x), part_.norm, 1e-6);
      add("add_rms_norm, sum", both.sum);
      return add("add_rms_norm", both.normed);
    }
    add("rms_norm",
        nn::rms_norm(x, part_.norm, 1e-6,
                     draw_.one_in(2) ? nn::NormRounding::kOnce : nn::NormRounding::kBeforeWeight));
  }
  void gate() {
    const at::Tensor x = any(), y = like(x);
    add("swiglu", draw_.one_in(3) ? nn::geglu(x, y) : nn::swiglu(x, y));
  }
  void halves() {
    const at::Tensor x = any();
    if (x.size(-1) % 2 != 0) return unary();
    if (draw_.one_in(2)) return add("clamped_swiglu", nn::clamped_swiglu(x, {}));
    add("swiglu_halves", nn::swiglu_halves(x));
  }
  void softmax() {
    const at::Tensor x = any();
    const auto dim = static_cast<std::int64_t>(draw_.below(static_cast<std::size_t>(x.dim())));
    if (draw_.one_in(3)) return add("log_softmax", at::log_softmax(x, dim) * 0.1);
    add("softmax", at::softmax(x, dim));
  }
  void turned() {
    const at::Tensor x = any();
    switch (draw_.below(5)) {
      case 0:
        return add("transpose", x.transpose(0, -1));
      case 1:
        return add("contiguous", x.transpose(0, -1).contiguous());
      case 2:
        return add("reshape", x.numel() % 4 == 0 ? x.reshape({4, -1}) : x.reshape({1, -1}));
      case 3:
        return add("unsqueeze", x.dim() < 4 ? x.unsqueeze(0) : x.flatten());
      default:
        return add("wide",
                   x.numel() % Part::kWidth == 0 ? x.reshape({-1, Part::kWidth}) : x.flatten());
    }
  }
  void part() {
    const at::Tensor x = any();
    const auto dim = static_cast<std::int64_t>(draw_.below(static_cast<std::size_t>(x.dim())));
    const std::int64_t size = x.size(dim);
    switch (draw_.below(5)) {
      case 0:
        return add("narrow", x.narrow(dim, size / 3, size - size / 3));
      case 1:
        return add("slice", x.slice(dim, 0, size, 2));
      case 2:
        return x.dim() > 1 ? add("select", x.select(dim, size / 2)) : unary();
      case 3: {
        const auto chunks = x.chunk(2, dim);
        add("chunk", chunks[0]);
        return add("chunk, last", chunks.back());
      }
      default:
        return add("diagonal", x.dim() > 1 ? x.diagonal(0, 0, 1) : x.flip(0));
    }
  }
  void joined() {
    const at::Tensor x = any(), y = like(x);
    const auto dim = static_cast<std::int64_t>(draw_.below(static_cast<std::size_t>(x.dim())));
    switch (draw_.below(3)) {
      case 0:
        return add("cat", at::cat({x, y, x.sin()}, dim));
      case 1:
        return add("stack, mean", at::stack({x, y}).mean(0));
      default:
        return add("stack", x.dim() < 4 ? at::stack({x, y}, dim) : at::cat({x, y}, dim));
    }
  }
  void cast() {
    const at::Tensor x = any();
    const bool is_wide = x.scalar_type() == at::kFloat;
    add("to", x.to(is_wide ? at::kBFloat16 : at::kFloat));
  }
  /// Changes a value that was made here: inputs may not be changed.
  void changed() {
    const at::Tensor x = any();
    at::Tensor y = draw_.one_in(2) ? x * 1.0 : x.clone();
    switch (draw_.below(8)) {
      case 0:
        y.add_(0.5);
        break;
      case 1:
        y.mul_(like(y).tanh());
        break;
      case 2:
        y.sigmoid_();
        break;
      case 3:
        y.select(0, 0).mul_(0.5);
        break;
      case 4:
        y.narrow(-1, 0, 1).add_(x.narrow(-1, 0, 1));
        break;
      case 5:
        y = at::zeros_like(x).copy_(x).add_(y, 0.25);
        break;
      case 6:
        y.narrow(0, 0, 1).copy_(x.narrow(0, x.size(0) - 1, 1).tanh());
        break;
      default:
        y.masked_fill_(x > 0.5, 0.5);
        break;
    }
    add("changed", y);
  }
  void sum() {
    const at::Tensor x = any();
    const auto dim = static_cast<std::int64_t>(draw_.below(static_cast<std::size_t>(x.dim())));
    switch (draw_.below(6)) {
      case 0:
        return add("sum", x.sum(dim, true) * 0.2);
      case 1:
        return add("mean", x.dim() > 1 ? x.mean(dim) : x.mean(dim, true));
      case 2:
        return add("amax", x.amax(dim, true));
      case 3:
        return add("cumsum", x.cumsum(dim) * 0.2);
      case 4:
        return add("max", std::get<0>(x.max(dim, true)));
      default:
        return add("norm", (x.pow(2).sum(dim, true) + 1.0).rsqrt());
    }
  }
  void expanded() {
    const at::Tensor x = any();
    auto sizes = x.sizes().vec();
    const auto dim = draw_.below(sizes.size());
    sizes[dim] = 3;
    const at::Tensor one = x.narrow(static_cast<std::int64_t>(dim), 0, 1);
    if (draw_.one_in(3)) return add("repeat", x.repeat(std::vector<std::int64_t>(sizes.size(), 2)));
    add("expand", one.expand(sizes));
  }
  void chosen() {
    const at::Tensor x = any(), y = like(x);
    switch (draw_.below(4)) {
      case 0:
        return add("where", at::where(x > 0.0, x, y));
      case 1:
        return add("masked_fill", x.masked_fill(y > 0.3, 0.1));
      case 2:
        return add("clamp", x.clamp(-0.5, 0.5));
      default:
        return add("lerp", at::lerp(x, y, 0.3));
    }
  }
  void picked() {
    const at::Tensor x = any();
    switch (draw_.below(5)) {
      case 0:
        return add("index_select", x.index_select(0, at::arange(0, x.size(0), 2)));
      case 1:
        return add("gather", x.gather(-1, x.argsort(-1, false)));
      case 2:
        return add("topk", std::get<0>(x.topk(1, -1)));
      case 3:
        return add("sort", std::get<0>(x.sort(-1, false)));
      default:
        return add("detached", x.detach() * 0.5);
    }
  }
  /// Rows as positions of two heads.
  void attention() {
    const at::Tensor x = some_wide();
    if (x.dim() != 2) return unary();
    const at::Tensor heads = x.view({1, x.size(0), 2, 1, Part::kWidth / 2}).transpose(1, 2);
    const at::Tensor q = heads.contiguous(), k = (heads * 0.5).contiguous();
    const at::Tensor mixed = nn::causal_attention(q, k, x.view({1, x.size(0), Part::kWidth}), 0.3);
    add("causal_attention", mixed.view({x.size(0), Part::kWidth}));
  }
  void looked_up() {
    if (ids_.empty()) return unary();
    const at::Tensor ids = ids_[0].remainder(Part::kWidth);
    if (draw_.one_in(2)) return add("at::embedding", at::embedding(part_.weight, ids));
    add("index", part_.weight.index({ids}));
  }
  void batched() {
    const at::Tensor x = some_wide();
    if (x.dim() != 2) return unary();
    const at::Tensor batch = at::stack({x, x.tanh()});
    if (draw_.one_in(2)) {
      return add(
          "baddbmm",
          at::baddbmm(batch, batch,
                      part_.weight.to(x.scalar_type()).expand({2, Part::kWidth, Part::kWidth}), 0.5,
                      0.2));
    }
    add("bmm", at::bmm(batch, batch.transpose(1, 2)) * 0.1);
  }
  void convolved() {
    const at::Tensor x = some_wide();
    if (x.dim() != 2) return unary();
    const at::Tensor factors = part_.bias.narrow(0, 0, 3).to(x.scalar_type()).view({1, 1, 3});
    add("conv1d", at::conv1d(x.unsqueeze(1), factors, {}, 1, 1).squeeze(1));
  }
  /// Does what no region may do; seldom.
  void refused() {
    if (!draw_.one_in(6)) return unary();
    const at::Tensor x = any();
    switch (draw_.below(5)) {
      case 0:
        return add("item", x * (x.detach().mean().item<double>() > 0 ? 0.5 : 0.25));
      case 1:
        return add("dropout", may_be_random_ ? at::dropout(x, 0.25, true) : x.sin());
      case 2:
        return add("nonzero",
                   x.flatten().index_select(0, (x.detach().flatten() < 9.0).nonzero().flatten()));
      case 3:
        return add("masked_select", x.masked_select(x.detach() < 9.0));
      default: {
        const at::NoGradGuard no_grad;
        part_.table.mul_(0.75);
        return add("buffer", part_.table * 1.0);
      }
    }
  }

  Draw draw_;
  Part& part_;
  bool may_be_random_;
  std::string* text_;
  std::vector<at::Tensor> values_, ids_;
  std::size_t inputs_ = 0;
};

struct Case {
  std::uint64_t seed = 0;
  int ranks = 1;
  TwinOptions options;
  std::size_t steps = 5, micro_batches = 1, regions = 1;
  bool with_second = false, second_wants = false, with_ids = false, with_none = false;
  std::size_t layout = 0;  ///< of the second argument
  bool calls_without_gradients = false, other_sizes = false;

  explicit Case(std::uint64_t number) : seed(number) {
    Draw draw(number * 7919);
    ranks = draw.one_in(4) ? 2 : 1;
    options.dtype = draw.one_in(3) ? at::kBFloat16 : at::kFloat;
    options.policy = without_master();
    if (draw.one_in(4)) options.policy.param_dtype = DType::kBFloat16;
    const std::size_t own = draw.below(6);
    const bool freezes = draw.one_in(4);
    options.prepare = [own, freezes](Model& model) {
      for (auto& parameter : model.parameters()) {
        if (own == 0) parameter.set_grad_dtype(std::nullopt);
        if (own == 1) parameter.set_grad_dtype(at::kBFloat16);
        if (own == 2) parameter.set_grad_dtype(at::kFloat);
      }
      if (freezes) model.parts[0]->bias.set_requires_grad(false);
    };
    steps = 5 + draw.below(3);
    micro_batches = 1 + draw.below(3);
    regions = 1 + draw.below(2);
    with_second = draw.one_in(2);
    second_wants = draw.one_in(2);
    with_ids = draw.one_in(3);
    with_none = draw.one_in(4);
    layout = draw.below(3);
    calls_without_gradients = draw.one_in(4);
    other_sizes = draw.one_in(4);
  }

  Several inputs(World& world, std::size_t step, std::size_t micro_batch) const {
    const auto of =
        10000 * seed + 100 * step + 10 * micro_batch + static_cast<std::uint64_t>(world.rank());
    const std::int64_t count = other_sizes && step % 4 == 3 ? 5 : 4;
    Several all{rows(of, count)};
    if (with_second) {
      at::Tensor second = rows(of + 1, count);
      if (layout == 1) second = seeded(of + 1, {Part::kWidth, count}).t();
      if (layout == 2) second = seeded(of + 1, {1, Part::kWidth}).expand({count, Part::kWidth});
      all.push_back(second.set_requires_grad(second_wants));
    }
    if (with_none) all.emplace_back();
    if (with_ids) all.push_back((all[0].detach().select(1, 0).abs() * 20).to(at::kLong));
    return all;
  }

  Model::Run body(std::string* text) const {
    return [*this, text](Model& model, const Several& inputs) {
      Several all = inputs;
      all[0] = all[0] * model.before + model.before;
      for (std::size_t i = 0; i < regions; ++i) {
        Part& part = *model.parts[i];
        const bool says = text != nullptr && model.calls == 1;
        const bool may_be_random = ranks == 1;
        auto results = part.region(all, [=, &part, of = seed + 1000003 * i](const Several& in) {
          return BodyRun(of, part, in, may_be_random, says ? text : nullptr).run();
        });
        if (i + 1 == regions) {
          // A view of a parameter may not leave the unit; nor may anything grow too large.
          for (auto& result : results) {
            result = at::isFloatingType(result.scalar_type())
                         ? result / (result.detach().abs().max() + 1.0)
                         : result.clone();
          }
          return results;
        }
        if (says) *text += "then\n";
        // One argument, which is used there alone.
        all = {results[0].flatten().narrow(0, 0, 1).expand({4, Part::kWidth}) * model.after};
      }
      return Several{};
    };
  }

  std::string describe() const {
    return concat("seed ", seed, ": ", ranks, " ranks, parameters ", options.dtype,
                  options.policy.param_dtype ? ", computes in bf16" : "", ", ", steps, " steps of ",
                  micro_batches, " micro-batches\n");
  }
};

struct Totals {
  std::int64_t replayed = 0, refused = 0;
};

void run(const Case& c, World& world, std::string* text, Totals& totals) {
  at::set_num_threads(1);
  Twins twins(data_mesh(world), c.body(text), c.options);
  for (std::size_t step = 0; step < c.steps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    for (std::size_t i = 0; i < c.micro_batches; ++i) {
      SCOPED_TRACE(concat("micro-batch ", i));
      const auto inputs = c.inputs(world, step, i);
      const auto seeded = [&] {
        if (c.ranks == 1) at::manual_seed(100 * step + i);
      };
      if (c.calls_without_gradients && i == 0) {
        twins.both([&](Sharded<Model>& handle) {
          seeded();
          const at::NoGradGuard no_grad;
          Several left;
          for (const auto& result : handle.forward(inputs)) left.push_back(result.clone());
          return left;
        });
      }
      twins.both([&](Sharded<Model>& handle) {
        seeded();
        handle.set_requires_gradient_sync(i + 1 == c.micro_batches);
        return run_one(handle, inputs);
      });
    }
    twins.update();
  }
  if (world.rank() != 0) return;
  totals.replayed += twins.calls().replayed > 0 ? 1 : 0;
  totals.refused += reasons(twins.calls()).empty() ? 0 : 1;
  if (text == nullptr) return;
  *text += concat(twins.calls().replayed, " calls replayed\n");
  for (const auto& why : reasons(twins.calls())) *text += concat("eager: ", why, "\n");
}

bool holds(std::uint64_t seed, Totals& totals, bool prints = false) {
  const Case c(seed);
  std::string text = c.describe();
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const auto failures = test->result()->total_part_count();
  try {
    ranks(c.ranks).run(
        [&](World& world) { run(c, world, world.rank() == 0 ? &text : nullptr, totals); });
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  const bool is_well = test->result()->total_part_count() == failures;
  if (!is_well) std::cerr << "again with TESSERA_REPLAY_SEED=" << seed << "\n";
  if (!is_well || prints) std::cerr << text;
  return is_well;
}

TEST(ReplayPrograms, GiveTheBitsOfTheirBodies) {
  Totals totals;
  if (const auto seed = environment_number("TESSERA_REPLAY_SEED", 0); seed != 0) {
    holds(seed, totals, /*prints=*/true);
    return;
  }
  const auto from = environment_number("TESSERA_REPLAY_FROM", 1);
  const auto cases = environment_number("TESSERA_REPLAY_CASES", 60);
  int failed = 0;
  for (auto seed = from; seed < from + cases && failed < 5; ++seed) {
    failed += holds(seed, totals) ? 0 : 1;
  }
  if (cases < 50 || failed > 0) return;
  EXPECT_GT(totals.replayed, static_cast<std::int64_t>(cases / 2)) << "little was replayed";
  EXPECT_GT(totals.refused, static_cast<std::int64_t>(cases / 50)) << "nothing was refused";
}

}  // namespace
}  // namespace tessera::test::replay_programs_test
