// The reference for a Program: the unsharded model of one rank in fp64, on plain autograd, and
// gradients averaged over the ranks' models. A sharded one that computes in bf16 is compared with
// the unsharded model in bf16 instead (except for the values that an optimizer steps): after twenty
// operations in a row no bound on the distance from fp64 could tell rounding from a mistake.
#pragma once

#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "property/program_module.h"

namespace tessera::test {

/// One result of a forward that the program keeps.
struct ProgramResult {
  at::Tensor leaf;  ///< the input, where it requires grad
  std::vector<at::Tensor> outputs;
};
using ProgramResults = std::map<int, ProgramResult>;

inline constexpr double kProgramLr = 0.05;
inline constexpr double kProgramDecay = 0.01;
inline constexpr double kProgramMomentum = 0.9;

inline std::unique_ptr<torch::optim::Optimizer> torch_optimizer(
    const Program& program, const std::vector<at::Tensor>& parameters) {
  using torch::optim::AdamW;
  using torch::optim::AdamWOptions;
  if (program.optimizer == ProgramOptimizer::kAdamW ||
      program.optimizer == ProgramOptimizer::kTorchAdamW) {
    return std::make_unique<AdamW>(
        parameters,
        AdamWOptions(kProgramLr).betas({0.9, 0.95}).eps(1e-8).weight_decay(kProgramDecay));
  }
  return std::make_unique<torch::optim::SGD>(
      parameters,
      torch::optim::SGDOptions(kProgramLr).momentum(kProgramMomentum).weight_decay(kProgramDecay));
}

inline at::Tensor program_loss(const std::vector<at::Tensor>& terms) {
  at::Tensor loss;
  for (const auto& y : terms) {
    const auto term = at::sin(y.to(at::kDouble)).sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

/// The terms of its loss on this rank.
inline std::vector<at::Tensor> terms_of(const Op& op, const ProgramResults& results, int rank) {
  std::vector<at::Tensor> terms;
  for (std::size_t i = 0; i < op.roots.size(); ++i) {
    if (op.rank == rank && i + 1 == op.roots.size()) continue;
    terms.push_back(
        results.at(op.roots[i].result).outputs.at(static_cast<std::size_t>(op.roots[i].output)));
  }
  return terms;
}

/// The input of a forward; `leaf` is set where the operation asks for it.
inline at::Tensor input_of(const Op& op, const ProgramResults& results, int rank,
                           at::ScalarType dtype, at::Tensor& leaf) {
  auto x = seeded(op.seed * 8 + static_cast<std::uint64_t>(rank), {2, kWidth}).to(dtype);
  if (op.input_grad) x = leaf = x.requires_grad_(true);
  if (op.from < 0) return x;
  const auto before = results.at(op.from).outputs[0].to(dtype);
  return x + (op.detached ? before.detach() : before) * 0.5;
}

/// Returns the side effects of a forward on this rank.
inline ProgramCall call_of(const Op& op, int rank) {
  ProgramCall call;
  const bool here = op.rank < 0 || op.rank == rank;
  if (op.act == Act::kForward && op.rank == rank) call.drops = op.node;
  if (op.act == Act::kThrowInForward && here) call.throws = op.node;
  if (op.act == Act::kChangeArgument) call.changes = op.node;
  call.keeps = op.act == Act::kChangeHeldResult;
  return call;
}

class ProgramTwin {
 public:
  explicit ProgramTwin(const Program& program, int rank, at::ScalarType input = at::kDouble,
                       at::ScalarType compute = at::kDouble)
      : program_(program),
        rank_(rank),
        input_(input),
        compute_(compute),
        tensors_(std::make_shared<ProgramTensors>(program, compute)),
        module_(tensors_),
        magnitudes_(program.parameters.size(), 0.0),
        divide_(program.ranks) {
    tensors_->recomputes = false;
    make_optimizer();
  }

  const at::Tensor& parameter(std::size_t i) const { return tensors_->parameters[i]; }
  const ProgramResults& results() const { return results_; }
  /// The largest that the gradient has been on this rank since it was last none.
  double magnitude(std::size_t i) const { return magnitudes_[i]; }
  double divide() const { return divide_; }

  std::vector<at::Tensor> forward(const Op& op, std::size_t node) {
    tensors_->call = call_of(op, rank_);
    at::Tensor leaf;
    const auto x = input_of(op, results_, rank_, input_, leaf).to(compute_);
    auto outputs = node == 0 ? module_.forward(x)
                             : std::vector<at::Tensor>{module_.plain_cell(node)->forward(x)};
    if (op.act == Act::kForward) results_[op.result] = {leaf, outputs};
    return outputs;
  }
  void backward(const Op& op) {
    torch::autograd::backward({program_loss(terms_of(op, results_, rank_))}, {}, op.retain);
    for (std::size_t i = 0; i < magnitudes_.size(); ++i) {
      const auto& grad = parameter(i).grad();
      if (grad.defined())
        magnitudes_[i] = std::max(magnitudes_[i], grad.abs().max().item<double>());
    }
  }
  at::Tensor gradient_of_input(const Op& op) {
    tensors_->call = {};
    at::Tensor leaf;
    const auto x = input_of(op, results_, rank_, input_, leaf).to(compute_);
    return torch::autograd::grad({program_loss(module_.forward(x))}, {leaf}).at(0);
  }
  void scale(int result) { results_.at(result).outputs[0].mul_(0.5); }
  void forget(int result) { results_.erase(result); }
  void forget_results() { results_.clear(); }
  /// Zeroes the gradients of parameters that have one where they are sharded: what none shows yet
  /// stays.
  void zero_grad(bool to_none, const std::set<std::size_t>& shown) {
    for (const auto i : shown) {
      auto& grad = tensors_->parameters[i].mutable_grad();
      if (to_none) {
        grad.reset();
        magnitudes_[i] = 0;
      } else if (grad.defined()) {
        grad.zero_();
      }
    }
  }
  void halve_gradients() {
    for (const auto& parameter : tensors_->parameters) {
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
    }
  }
  void fail() {
    results_.clear();
    for (std::size_t i = 0; i < magnitudes_.size(); ++i) {
      tensors_->parameters[i].mutable_grad().reset();
      magnitudes_[i] = 0;
    }
  }
  void set_divide(double factor) { divide_ = factor; }
  void set_trainable(std::size_t i, bool trainable) {
    tensors_->parameters[i].set_requires_grad(trainable);
    // Ours keep their state; torch's are made again on both sides.
    if (program_.optimizer == ProgramOptimizer::kTorchSgd ||
        program_.optimizer == ProgramOptimizer::kTorchAdamW)
      make_optimizer();
  }
  /// `gradients`: averaged over the ranks.
  void step(const std::vector<at::Tensor>& gradients) {
    std::vector<at::Tensor> own;
    for (std::size_t i = 0; i < gradients.size(); ++i)
      own.push_back(std::exchange(tensors_->parameters[i].mutable_grad(), gradients[i]));
    optimizer_->step();
    for (std::size_t i = 0; i < gradients.size(); ++i)
      tensors_->parameters[i].mutable_grad() = own[i];
  }
  void follow(std::size_t i, const at::Tensor& value) {
    const at::NoGradGuard no_grad;
    tensors_->parameters[i].copy_(value);
  }

 private:
  void make_optimizer() { optimizer_ = torch_optimizer(program_, tensors_->parameters); }

  const Program& program_;
  int rank_;
  at::ScalarType input_, compute_;
  std::shared_ptr<ProgramTensors> tensors_;
  ProgramModule module_;
  ProgramResults results_;
  std::vector<double> magnitudes_;
  double divide_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace tessera::test
