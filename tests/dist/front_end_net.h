// A model whose units a front end of another language calls (front_end.h), with checkpoints around
// any part of it.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dist/body.h"
#include "dist/front_end.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/test.h"

namespace tessera::test::front_end_net {

inline constexpr std::int64_t kWidth = 5;

/// x + b relu(a x), in the dtype of its weights.
class Layer : public torch::nn::Module {
 public:
  Layer(std::uint64_t seed, at::ScalarType dtype)
      : a(register_parameter("a", seeded(seed, {kWidth + 1, kWidth}, dtype))),
        b(register_parameter("b", seeded(seed + 1, {kWidth, kWidth + 1}, dtype))) {}
  at::Tensor forward(const at::Tensor& input) {
    const auto x = input.to(a.scalar_type());
    if (is_plain) return x + at::linear(at::relu(at::linear(x, a)), b);
    return x + product(at::relu(product(x, a)), b);
  }
  void tie_first(const Layer& other) { a = parameters_["a"] = other.a; }
  at::Tensor a, b;
  bool is_plain = true;
};

/// Where the checkpoints of a model are.
enum class Around : std::uint8_t {
  kNone,
  kInside,       ///< in each unit, around what it computes
  kEach,         ///< around each unit
  kAll,          ///< around all units together
  kAllAndMore,   ///< the same, and around what the root computes behind them
  kRoot,         ///< around the root
  kRootAndMore,  ///< the same, and around what follows it
  kNested,       ///< around all, and around each inside it
  kReentrant,    ///< around each unit, a reentrant one
};
inline constexpr Around kEverywhere[] = {Around::kInside,     Around::kEach, Around::kAll,
                                         Around::kAllAndMore, Around::kRoot, Around::kRootAndMore,
                                         Around::kNested};

/// Three layers, each of which may be a unit, and a last weight.
class Net : public torch::nn::Module {
 public:
  explicit Net(std::uint64_t seed, at::ScalarType middle = at::kFloat)
      : last(register_parameter("last", seeded(seed, {kWidth, kWidth}))) {
    for (std::uint64_t i = 0; i < 3; ++i) {
      layers.push_back(register_module(
          concat("layer", i),
          std::make_shared<Layer>(seed + 10 * (i + 1), i == 1 ? middle : at::kFloat)));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    if (around == Around::kAllAndMore) {
      return non_reentrant([this](const Several& in) { return Several{more(in[0])}; }, {x},
                           stops)[0];
    }
    if (around != Around::kAll && around != Around::kNested) return more(x);
    const auto y =
        non_reentrant([this](const Several& in) { return Several{all(in[0])}; }, {x}, stops)[0];
    return behind(y);
  }

  std::vector<std::shared_ptr<Layer>> layers;
  std::vector<std::shared_ptr<FrontEnd>> units;  ///< by layer; empty: plain
  at::Tensor last;
  Around around = Around::kNone;
  Stops stops = Stops::kEarly;
  std::vector<std::size_t> first = {0, 1, 2}, second = {0, 1, 2};  ///< layers of each run
  int without_grad = -1;  ///< a layer that runs without grad mode

 private:
  at::Tensor call_layer(std::size_t i, const at::Tensor& x) {
    const at::AutoGradMode grad(at::GradMode::is_enabled() && static_cast<int>(i) != without_grad);
    return units.empty() ? layers[i]->forward(x) : (*units[i])(x);
  }
  at::Tensor layer(std::size_t i, const at::Tensor& x) {
    const UnitBody run = [this, i](const Several& in) { return Several{call_layer(i, in[0])}; };
    if (around == Around::kReentrant) return reentrant(run, x);
    const bool repeats = around == Around::kEach || around == Around::kNested;
    return repeats ? non_reentrant(run, {x}, stops)[0] : call_layer(i, x);
  }
  at::Tensor all(const at::Tensor& x) {
    const bool again = FrontEnd::Call::kind_here() == FrontEnd::CallKind::kRecomputed;
    auto y = x;
    for (const auto i : again ? second : first) y = layer(i, y);
    return y;
  }
  at::Tensor behind(const at::Tensor& y) {
    const auto wide = y.to(last.scalar_type());
    return units.empty() ? at::linear(wide, last) : product(wide, last);
  }
  at::Tensor more(const at::Tensor& x) { return behind(all(x)); }
};

/// A net whose layers are units inside a root, all called by the front end.
struct ShardedNet {
  explicit ShardedNet(World& world, std::shared_ptr<Net> shown, const PrecisionPolicy& policy = {},
                      const ShardOptions& inner = {}, const ShardOptions& outer = {})
      : net(std::move(shown)) {
    const auto mesh = data_mesh(world);
    auto options = outer;
    for (const auto& layer : net->layers) {
      layer->is_plain = false;
      net->units.push_back(std::make_shared<FrontEnd>(
          layer,
          [this, layer](const Several& in) -> Several {
            const UnitBody body = [layer](const Several& all) -> Several {
              return {layer->forward(all[0])};
            };
            return net->around == Around::kInside ? non_reentrant(body, in, net->stops) : body(in);
          },
          mesh, policy, inner));
      options.inner.push_back(net->units.back());
    }
    root = std::make_shared<FrontEnd>(
        net, [this](const Several& in) -> Several { return {net->forward(in[0])}; }, mesh, policy,
        options);
  }
  ShardedNet(const ShardedNet&) = delete;
  ShardedNet& operator=(const ShardedNet&) = delete;
  ~ShardedNet() { net->units.clear(); }

  at::Tensor operator()(const at::Tensor& x) const {
    const bool and_more = net->around == Around::kRootAndMore;
    if (net->around != Around::kRoot && !and_more) return (*root)(x);
    return non_reentrant(
        [handle = root, and_more](const Several& in) -> Several {
          const auto y = (*handle)(in[0]);
          // The same values, which are saved.
          return {and_more ? product(y, here(at::eye(kWidth)).to(y.scalar_type())) : y};
        },
        {x}, net->stops)[0];
  }
  void run_and_back(const at::Tensor& x) const { backward(squares((*this)(x))); }
  std::int64_t gathers() const { return root->unit()->runtime().gathers_issued(); }
  bool is_gathered(std::size_t i) const { return net->units[i]->unit()->gathered(); }

  std::shared_ptr<Net> net;
  std::shared_ptr<FrontEnd> root;
};

/// Those that the sharded model has: a tied one is there under its first name alone.
inline void expect_gradients(const ShardedBase& handle, const Tensors& expected,
                             const std::string& what) {
  for (const auto& [name, found] : whole_gradients(handle)) {
    ASSERT_EQ(expected.count(name), 1U) << what << " " << name;
    const auto& wanted = expected.at(name);  // in the parameter's dtype
    EXPECT_TRUE(same_bits(found.to(wanted.scalar_type()), wanted)) << what << " " << name;
  }
}

inline Tensors plain_net_gradients(World& world, const std::shared_ptr<Net>& plain, int step = 0) {
  return gradients_of_squares(*plain, world.size(), step, kWidth);
}

inline std::string as_text(Around around) {
  return concat("checkpoint ", static_cast<int>(around));
}

}  // namespace tessera::test::front_end_net
