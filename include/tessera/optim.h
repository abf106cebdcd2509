// Optimizers over the shards of a handle: AdamW and SGD with PyTorch's formulas, element by element
// on the ranges that this rank owns.
//
// torch::optim's work on handle.parameters() too; these refuse to step while a backward is owed,
// skip parameters that no rank used, and decide decay by name, since a shard has lost its dims.
// Next: clip.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/shard.h"

namespace tessera {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  ///< decoupled, on every trainable parameter but those of `no_decay`
  std::vector<std::string> no_decay;  ///< patterns as PrecisionRule::match
};

struct SgdOptions {
  double lr = 1e-2;
  double momentum = 0.0;
  double weight_decay = 0.0;  ///< added to the gradient, as PyTorch's SGD
  std::vector<std::string> no_decay;
};

/// What an optimizer keeps of one parameter, for a checkpoint.
struct OptimizerState {
  ShardView view;
  std::int64_t steps = 0;  ///< updates so far, the same on every rank
  /// Over the elements of the shard, in the order of moment_names(); empty before the first update.
  std::vector<at::Tensor> moments;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Updates every shard that has a gradient. Not collective. Errors: kUsage while a recorded
  /// forward waits for its backward; kContract for a gradient whose dtype is not the shard's.
  void step();
  void set_lr(double lr) { lr_ = lr; }
  double lr() const { return lr_; }

  /// What PyTorch calls the tensors kept of each parameter: "exp_avg", "exp_avg_sq".
  virtual std::vector<std::string> moment_names() const = 0;
  /// Of every trainable parameter, in the model's order; the moments are the optimizer's own
  /// tensors.
  std::vector<OptimizerState> state() const;
  /// Goes on as after `steps` updates of a parameter. Errors: kUsage for an unknown name.
  void set_steps(std::string_view parameter, std::int64_t steps);
  /// The moments of a parameter for the caller to fill, made where there are none yet. Errors: the
  /// same.
  std::vector<at::Tensor> make_moments(std::string_view parameter);

 protected:
  Optimizer(const ShardedBase& model, double lr, const std::vector<std::string>& no_decay);
  struct Item {
    ShardView view;
    bool decays = true;
    std::vector<at::Tensor> state;  ///< the moments first: [owned] each, dtype of the shard
    std::int64_t steps = 0;         ///< updates so far, as PyTorch counts
  };
  virtual void update(const std::vector<Item*>& items) = 0;
  /// Fills `state` with zeros.
  virtual void make_state(Item& item) const = 0;

  double lr_;

 private:
  Item& find(std::string_view parameter);
  std::vector<at::Tensor> moments_of(const Item& item) const;

  std::shared_ptr<fsdp::Unit> unit_;
  std::vector<Item> items_;
};

std::unique_ptr<Optimizer> make_adamw(const ShardedBase& model, const AdamWOptions& options);
std::unique_ptr<Optimizer> make_sgd(const ShardedBase& model, const SgdOptions& options);

}  // namespace tessera
