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
  std::vector<std::string> no_decay{};  ///< patterns as PrecisionRule::match
};

struct SgdOptions {
  double lr = 1e-2;
  double momentum = 0.0;
  double weight_decay = 0.0;  ///< added to the gradient, as PyTorch's SGD
  std::vector<std::string> no_decay{};
};

/// What an optimizer keeps of one parameter, for a checkpoint.
struct OptimizerState {
  struct Kept {
    std::string name;   ///< as PyTorch calls it: "exp_avg"
    at::Tensor values;  ///< over the elements of the shard; the optimizer's own tensor
  };
  ShardView view;
  std::int64_t steps = 0;  ///< updates so far, the same on every rank
  std::vector<Kept> kept;  ///< empty before the first update
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Updates every shard that has a gradient. Not collective. Errors: kUsage while a recorded
  /// forward waits for its backward; kContract for a gradient whose dtype is neither the shard's
  /// nor float32 for a 16-bit shard (PrecisionPolicy::final_dtype).
  void step();
  void set_lr(double lr) { lr_ = lr; }
  double lr() const { return lr_; }

  /// "AdamW", "SGD".
  virtual std::string name() const = 0;
  /// Every name that OptimizerState::Kept may have.
  virtual std::vector<std::string> kept_names() const = 0;
  /// Of every trainable parameter, in the model's order.
  std::vector<OptimizerState> state() const;
  /// Goes on as after `steps` updates of a parameter. Errors: kUsage for an unknown name.
  void set_steps(std::string_view parameter, std::int64_t steps);
  /// What it keeps of a parameter, made where there is nothing yet, for the caller to fill. Errors:
  /// the same.
  std::vector<OptimizerState::Kept> make_kept(std::string_view parameter);

 protected:
  Optimizer(const ShardedBase& model, double lr, const std::vector<std::string>& no_decay);
  struct Item {
    ShardView view;
    bool decays = true;
    std::vector<at::Tensor> state;  ///< what the optimizer keeps, made at the first update
    std::int64_t steps = 0;         ///< updates so far, as PyTorch counts
  };
  virtual void update(const std::vector<Item*>& items) = 0;
  /// Makes `state` where there is none.
  virtual void make_state(Item& item) const = 0;
  virtual std::vector<OptimizerState::Kept> kept_of(const Item& item) const = 0;

  double lr_;

 private:
  Item& find(std::string_view parameter);

  std::shared_ptr<fsdp::Unit> unit_;
  std::vector<Item> items_;
};

/// Everything is formed in float32, in float64 for float64 shards: the moments, and for shards in
/// bfloat16 or float16 a master copy, which is stepped and then rounded into the shard (so that
/// updates below a 16-bit step add up, where torch.optim on such a parameter loses them). The
/// master is taken from the shard at the first step; elements that somebody else has written since
/// the last one are taken over. State, bytes an element of the shard: 8 in float32, 12 in 16 bits,
/// 16 in float64.
std::unique_ptr<Optimizer> make_adamw(const ShardedBase& model, const AdamWOptions& options);
/// Steps the shard in its own dtype, as PyTorch does: on a 16-bit shard updates below half a step
/// of it are lost. Momentum has the dtype of the gradient.
std::unique_ptr<Optimizer> make_sgd(const ShardedBase& model, const SgdOptions& options);

}  // namespace tessera
