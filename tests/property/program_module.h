// The model of a Program: the same code sharded and plain.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "nn/linear.h"
#include "property/program.h"
#include "support/ranks.h"
#include "tessera/recompute.h"
#include "tessera/shard.h"

namespace tessera::test {

/// The side effects of one forward; a recomputation repeats them.
struct ProgramCall {
  int drops = -1;      ///< this rank has no use for the result of this node
  int throws = -1;     ///< in this node
  int changes = -1;    ///< the argument of this node
  bool keeps = false;  ///< the module keeps its first result
};

/// One rank's tensors of a program.
struct ProgramTensors {
  ProgramTensors(const Program& of, at::ScalarType dtype) : program(of) {
    for (std::size_t i = 0; i < of.parameters.size(); ++i) {
      const auto seed = of.seed * 100 + i;
      const bool matrix = of.parameters[i].kind == ParameterKind::kMatrix ||
                          of.parameters[i].kind == ParameterKind::kLinear;
      const auto value = matrix ? seeded(seed, {kWidth, kWidth}) : seeded(seed, {kWidth});
      parameters.push_back(value.to(dtype));
    }
  }
  const Program& program;
  std::vector<at::Tensor> parameters;
  ProgramCall call;
  bool recomputes = true;  ///< else checkpoint() is a plain call
};

class ProgramCell : public torch::nn::Module {
 public:
  ProgramCell(std::shared_ptr<ProgramTensors> tensors, std::size_t number)
      : tensors_(std::move(tensors)), number_(number) {
    for (const auto p : node().parameters) {
      register_parameter(concat("p", p), tensors_->parameters[p],
                         tensors_->program.parameters[p].trainable);
    }
    for (const auto& child : node().children) {
      plain.push_back(register_module(concat("n", child.node),
                                      std::make_shared<ProgramCell>(tensors_, child.node)));
      handles.emplace_back();
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto results = run(x);
    return results[1].defined() ? results[0] + results[1] * 0.5 : results[0];
  }

  /// The second is undefined where no child gives it.
  std::vector<at::Tensor> run(const at::Tensor& x) {
    auto y = checkpointed(node().inside, [this](const at::Tensor& in) { return body(in); }, x);
    at::Tensor second;
    for (std::size_t i = 0; i < node().children.size(); ++i) {
      const auto& child = node().children[i];
      auto z = child.detached ? y.detach() : y;
      for (int repeat = 0; repeat < child.repeats; ++repeat) {
        z = checkpointed(
            child.outside,
            [this, i](const at::Tensor& in) {
              return handles[i] ? handles[i]->forward(in) : plain[i]->forward(in);
            },
            z);
      }
      if (tensors_->call.drops == static_cast<int>(child.node)) continue;
      z = z.to(y.scalar_type());
      if (child.is_second) {
        second = z * 0.75;
      } else {
        y = child.residual || child.detached ? y + z * 0.5 : z;
      }
    }
    return {y, second};
  }

  std::vector<std::shared_ptr<ProgramCell>> plain;
  std::vector<std::shared_ptr<Sharded<ProgramCell>>> handles;

 private:
  const ProgramNode& node() const { return tensors_->program.nodes[number_]; }

  template <class Function>
  at::Tensor checkpointed(RecomputeMode mode, const Function& function, const at::Tensor& x) {
    if (mode == RecomputeMode::kNone || !tensors_->recomputes) return function(x);
    const auto again = [this, function, call = tensors_->call](const auto& inputs) {
      const auto now = std::exchange(tensors_->call, call);
      const auto y = function(inputs[0]);
      tensors_->call = now;
      return y;
    };
    return checkpoint(again, {x}, mode);
  }

  at::Tensor body(const at::Tensor& input) {
    const auto is_this = [this](int which) { return which == static_cast<int>(number_); };
    if (is_this(tensors_->call.throws)) throw std::runtime_error("the user's forward went wrong");
    auto x = input;
    if (is_this(tensors_->call.changes)) x.mul_(0.5);
    for (const auto p : node().parameters) {
      const auto& w = tensors_->parameters[p];
      const auto like = x.to(w.scalar_type());
      switch (tensors_->program.parameters[p].kind) {
        case ParameterKind::kScale:
          x = (like * (w * 0.25 + 1.0)).to(x.scalar_type());
          break;
        case ParameterKind::kBias:
          x = x + w.to(x.scalar_type()) * 0.5;
          break;
        case ParameterKind::kMatrix:
          x = x + at::tanh(at::matmul(like, w.t())).to(x.scalar_type()) * 0.5;
          break;
        case ParameterKind::kLinear:
          x = x + at::tanh(nn::linear(like, w)).to(x.scalar_type()) * 0.5;
          break;
      }
      if (node().in_place) x = x.sin().mul_(1.25);
    }
    return x;
  }

  std::shared_ptr<ProgramTensors> tensors_;
  std::size_t number_;
};

/// The outermost module: what its node gives, the second result where there is one.
class ProgramModule : public torch::nn::Module {
 public:
  explicit ProgramModule(const std::shared_ptr<ProgramTensors>& of)
      : tensors(of), cell(register_module("cell", std::make_shared<ProgramCell>(of, 0))) {}

  std::vector<at::Tensor> forward(const at::Tensor& x) {
    auto results = cell->run(x);
    results[0] = results[0] * 0.75;
    if (!results[1].defined()) results.pop_back();
    kept = tensors->call.keeps ? results[0] : at::Tensor();
    return results;
  }

  /// Inner units first, once all modules are there.
  void shard_below(const Mesh& mesh, const PrecisionPolicy& policy,
                   const std::vector<ShardOptions>& options) {
    shard_below(*cell, 0, mesh, policy, options);
  }

  /// By unit, as in Program::units(): that of the model is null.
  std::vector<std::shared_ptr<Sharded<ProgramCell>>> handles() const {
    std::map<std::size_t, std::shared_ptr<Sharded<ProgramCell>>> by_node;
    collect(*cell, 0, by_node);
    std::vector<std::shared_ptr<Sharded<ProgramCell>>> all;
    for (const auto unit : tensors->program.units()) all.push_back(by_node[unit]);
    return all;
  }
  std::shared_ptr<ProgramCell> plain_cell(std::size_t number) const {
    return find(cell, 0, number);
  }

  std::shared_ptr<ProgramTensors> tensors;
  std::shared_ptr<ProgramCell> cell;
  at::Tensor kept;

 private:
  void shard_below(ProgramCell& at, std::size_t number, const Mesh& mesh,
                   const PrecisionPolicy& policy, const std::vector<ShardOptions>& options) {
    const auto& children = tensors->program.nodes[number].children;
    for (std::size_t i = 0; i < children.size(); ++i) {
      const auto next = children[i].node;
      shard_below(*at.plain[i], next, mesh, policy, options);
      if (!children[i].unit) continue;
      at.handles[i] = std::make_shared<Sharded<ProgramCell>>(
          fully_shard(at.plain[i], mesh, policy, options[next]));
      at.replace_module(concat("n", next), at.handles[i]);
    }
  }
  void collect(const ProgramCell& at, std::size_t number,
               std::map<std::size_t, std::shared_ptr<Sharded<ProgramCell>>>& by_node) const {
    const auto& children = tensors->program.nodes[number].children;
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (at.handles[i]) by_node[children[i].node] = at.handles[i];
      collect(*at.plain[i], children[i].node, by_node);
    }
  }
  std::shared_ptr<ProgramCell> find(const std::shared_ptr<ProgramCell>& at, std::size_t number,
                                    std::size_t wanted) const {
    if (number == wanted) return at;
    const auto& children = tensors->program.nodes[number].children;
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (auto found = find(at->plain[i], children[i].node, wanted)) return found;
    }
    return nullptr;
  }
};

}  // namespace tessera::test
