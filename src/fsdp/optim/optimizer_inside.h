// Optimizer::Inside holds the parameters that an optimizer steps, and their state.
//
// Formulas are in the classes that derive from Optimizer (adamw.h); they see what they step as
// OptimizerItem. Next: optimizer_shards.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/optim.h"

namespace tessera {
namespace fsdp {

struct Carried;
struct Rebucketed;

/// A parameter of an optimizer.
struct OptimizerItem {
  ShardView view;
  bool decays = true;                  ///< where no rule says by how much
  double lr_scale = 1.0;               ///< by a rule
  std::optional<double> weight_decay;  ///< by a rule
  /// In the order of states(), made at the first update; what an optimizer puts behind them is its
  /// own and in no checkpoint.
  std::vector<at::Tensor> state;
  at::Tensor master;  ///< what the contract's Master keeps beside a 16-bit shard
  bool has_state = false;
  std::int64_t steps = 0;          ///< updates so far, as PyTorch counts
  std::uint32_t seen_version = 0;  ///< of the shard, when it was last stepped
};

/// The numbers that an item is stepped with; items with the same may be stepped together.
struct Rates {
  double lr = 0.0;
  double weight_decay = 0.0;
  auto operator<=>(const Rates&) const = default;
};

}  // namespace fsdp

class Optimizer::Inside {
 public:
  using Item = fsdp::OptimizerItem;
  /// Errors: as Optimizer().
  Inside(const Optimizer& optimizer, const ShardedBase& model, double lr,
         const std::vector<std::string>& no_decay, const std::vector<OptimizerRule>& rules);

  fsdp::Runtime& runtime() const;
  /// `weight_decay`: the optimizer's.
  fsdp::Rates rates_of(const Item& item, double weight_decay) const;
  /// Returns whether the shard was written since it was last stepped, and warns where bits beside
  /// it are given up then. `version`: of the shard, where a new one has taken its place.
  bool was_changed(const Item& item);
  bool was_changed(const Item& item, std::uint32_t version);

 private:
  friend class Optimizer;
  friend class TrainableChanger;
  /// A parameter of the handle that it was made for.
  struct Scoped {
    std::shared_ptr<const void> owner;
    GradContract named;  ///< with all names of the model, which patterns are compared with
  };
  Item make_item(const ShardView& view) const;
  Item& find(std::string_view parameter);
  /// Those that have a gradient, with their state. Errors: as Optimizer::step().
  std::vector<Item*> items_to_step();
  void make_state(Item& item) const;
  std::vector<OptimizerState::Kept> kept_of(const Item& item) const;
  // set_trainable: trainable.cpp.
  /// New tensors for what is kept of rebucketed parameters, yet to be filled: added to `carried`.
  void carry_state(const std::vector<fsdp::Rebucketed>& rebucketed,
                   std::vector<fsdp::Carried>& carried);
  /// Steps what is trained now of the parameters that it was made for.
  void follow(const ShardedBase& outermost);
  std::string summary() const;  ///< a line for comparing ranks

  const Optimizer& optimizer_;
  double lr_;
  std::shared_ptr<fsdp::Unit> unit_;
  std::vector<std::string> no_decay_;
  std::vector<OptimizerRule> rules_;
  std::map<const GradContract*, Scoped> scope_;
  std::vector<Item> items_;   // trained parameters, and frozen ones that were trained before
  std::uint64_t layout_ = 0;  // of the runtime, that the items' shards have
  bool warned_ = false;       // of a master that was given up
  std::shared_ptr<torch::optim::Optimizer> for_schedulers_;  // made when first asked for
};

}  // namespace tessera
