// A small model in stages that uses all that a border can carry: activations of changing shapes,
// one that a later stage leaves out, counts without a gradient, totals that travel back; and the
// same run in one process, one micro-batch after the other, as one graph.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/ranks.h"
#include "tessera/pipeline.h"

namespace tessera::test {

enum class Numbers : std::uint8_t {
  kReal,   ///< rounded at every step: sums depend on their order
  kWhole,  ///< exact: they do not
};

struct Toy {
  int stages = 2;
  Numbers numbers = Numbers::kReal;
  int frozen = 0;  ///< stages at the front without a trainable parameter
  std::uint64_t seed = 1;
  bool totals = true;          ///< counts travel, their totals come back
  std::int64_t more_rows = 0;  ///< than usual
  /// Called in the midst of each: "F", "B" (inside autograd), "roots", "back".
  std::function<void(const std::string& what, int stage, std::int64_t micro_batch)> midst = {};
};

class ToyStage : public pipeline::Stage {
 public:
  using Tensors = pipeline::Tensors;
  static constexpr std::int64_t kWidth = 4;

  ToyStage(const Toy& toy, int stage) : toy_(toy), stage_(stage) {
    const auto seed = toy.seed * 100 + static_cast<std::uint64_t>(stage);
    if (toy.numbers == Numbers::kReal) {
      weight = seeded(seed, {kWidth, kWidth});
      bias = seeded(seed + 50, {kWidth});
    } else {
      // One 1 or -1 a row: values neither grow nor are rounded.
      weight = at::roll(here(at::eye(kWidth)), static_cast<std::int64_t>(seed % 3), 0) *
               (seed % 2 == 0 ? 1.0 : -1.0);
      bias = at::sign(seeded(seed + 50, {kWidth}));
    }
    weight.requires_grad_(!frozen(stage));
    bias.requires_grad_(!frozen(stage));
  }

  /// 0 rows, too.
  std::int64_t rows(std::int64_t micro_batch) const {
    return toy_.more_rows + (micro_batch + 1) % 4;
  }

  pipeline::Boundary border_after(int stage, std::int64_t micro_batch) const {
    const bool has_gradient = !frozen(stage);
    const std::vector<pipeline::BoundaryTensor> totals{{{kWidth}, at::kLong, false}};
    return {{{{rows(micro_batch), kWidth}, at::kFloat, has_gradient},
             {{kWidth}, at::kLong, false},
             {{rows(micro_batch), kWidth}, at::kFloat, has_gradient}},
            toy_.totals ? totals : std::vector<pipeline::BoundaryTensor>{}};
  }
  pipeline::Boundary input(std::int64_t micro_batch) const override {
    return border_after(stage_ - 1, micro_batch);
  }
  pipeline::Boundary output(std::int64_t micro_batch) const override {
    return border_after(stage_, micro_batch);
  }

  Tensors forward(std::int64_t micro_batch, const Tensors& inputs) override {
    auto given = inputs;
    if (stage_ == 0) {
      const auto data = values(static_cast<std::uint64_t>(micro_batch) + 1000, rows(micro_batch));
      given = {data, here(at::zeros({kWidth}, at::kLong)), data * 3.0};
    }
    midst("F", micro_batch);
    auto h = at::linear(given[0], weight, bias);
    if (toy_.midst && h.requires_grad()) {
      h.register_hook([this, micro_batch](const at::Tensor&) { midst("B", micro_batch); });
    }
    if (toy_.numbers == Numbers::kReal) h = at::tanh(h);
    const auto counts = given[1] + here(at::arange(kWidth)) * (stage_ + micro_batch);
    // Stages with an odd number leave out what came, so that no gradient comes to it.
    const auto side = stage_ % 2 == 0 ? given[2] * 0.5 + h : h * 2.0;
    shares_[micro_batch] = h.sum(0);
    if (stage_ + 1 < toy_.stages) return {h, counts, side};
    totals_[micro_batch] = counts;
    const auto weights = values(static_cast<std::uint64_t>(micro_batch) + 2000, rows(micro_batch));
    return {(h * weights).sum() + side.sum()};
  }

  Roots roots(std::int64_t micro_batch, const Tensors& results, const Tensors& back) override {
    midst("roots", micro_batch);
    auto roots = Stage::roots(micro_batch, results, back);
    if (!toy_.totals) return roots;
    if (!back.empty()) totals_[micro_batch] = back.front();
    const auto share = shares_.extract(micro_batch).mapped();
    roots.tensors.push_back(share);
    roots.gradients.push_back(totals_.at(micro_batch).to(at::kFloat) *
                              (toy_.numbers == Numbers::kReal ? 0.013 : 1.0));
    return roots;
  }
  Tensors back(std::int64_t micro_batch) override {
    midst("back", micro_batch);
    return {totals_.extract(micro_batch).mapped()};
  }

  at::Tensor weight, bias;

 private:
  void midst(const char* what, std::int64_t micro_batch) const {
    if (toy_.midst) toy_.midst(what, stage_, micro_batch);
  }
  bool frozen(int stage) const { return stage < toy_.frozen; }
  at::Tensor values(std::uint64_t seed, std::int64_t count) const {
    const auto drawn = seeded(toy_.seed * 10000 + seed, {count, kWidth});
    return toy_.numbers == Numbers::kReal ? drawn : at::sign(drawn);
  }

  Toy toy_;
  int stage_;
  std::map<std::int64_t, at::Tensor> shares_;  ///< with their graphs
  std::map<std::int64_t, at::Tensor> totals_;
};

/// The results of a step: losses in the order of micro-batches, gradients by parameter.
struct Left {
  std::vector<at::Tensor> losses;
  std::map<std::string, at::Tensor> gradients;
};

inline void add_gradients(Left& left, int stage, const ToyStage& of) {
  left.gradients["weight " + std::to_string(stage)] = of.weight.grad();
  left.gradients["bias " + std::to_string(stage)] = of.bias.grad();
}

inline Left run_in_one_process(const Toy& toy, int micro_batches) {
  std::vector<std::unique_ptr<ToyStage>> stages;
  for (int i = 0; i < toy.stages; ++i) stages.push_back(std::make_unique<ToyStage>(toy, i));
  Left left;
  for (int k = 0; k < micro_batches; ++k) {
    pipeline::Tensors carried;
    at::Tensor totals;
    for (const auto& stage : stages) {
      if (stage == stages.back()) totals = carried.empty() ? at::Tensor() : carried[1];
      carried = stage->forward(k, carried);
    }
    left.losses.push_back(carried.front().detach());
    totals = stages.back()->back(k).front();
    torch::autograd::variable_list tensors;
    torch::autograd::variable_list gradients;
    for (const auto& stage : stages) {
      const bool is_last = stage == stages.back();
      auto roots = stage->roots(k, is_last ? carried : pipeline::Tensors{}, {totals});
      for (std::size_t i = 0; i < roots.tensors.size(); ++i) {
        if (!roots.tensors[i].requires_grad()) continue;
        tensors.push_back(roots.tensors[i]);
        gradients.push_back(roots.gradients[i]);
      }
    }
    torch::autograd::backward(tensors, gradients);
  }
  for (int i = 0; i < toy.stages; ++i) add_gradients(left, i, *stages[static_cast<std::size_t>(i)]);
  return left;
}

}  // namespace tessera::test
