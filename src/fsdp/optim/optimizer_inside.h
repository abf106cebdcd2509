// Optimizer::Inside holds the parameters that an optimizer updates, and their state.
//
// The formulas are in the classes that derive from Optimizer (adamw.h); they see a parameter as an
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
  bool decays = true;                  ///< whether it has weight decay, unless a rule sets it
  double lr_scale = 1.0;               ///< set by a rule
  std::optional<double> weight_decay;  ///< set by a rule
  /// In the order of states(), made at the first update. An optimizer may append further tensors,
  /// which no checkpoint has.
  std::vector<at::Tensor> state;
  at::Tensor master;  ///< the state of a 16-bit shard's Master
  bool has_state = false;
  std::int64_t steps = 0;          ///< number of updates, counted as in PyTorch
  std::uint32_t seen_version = 0;  ///< version of the shard after its last update
};

/// The rates of an item's update; items with equal rates may be updated together.
struct Rates {
  double lr = 0.0;
  double weight_decay = 0.0;
  auto operator<=>(const Rates&) const = default;
};

}  // namespace fsdp

class Optimizer::Inside {
 public:
  using Item = fsdp::OptimizerItem;
  /// Errors: those of Optimizer().
  Inside(const Optimizer& optimizer, const ShardedBase& model, double lr,
         const std::vector<std::string>& no_decay, const std::vector<OptimizerRule>& rules);

  fsdp::Runtime& runtime() const;
  /// `weight_decay`: that of the optimizer.
  fsdp::Rates rates_of(const Item& item, double weight_decay) const;
  /// Returns whether the shard was written to since its last update, and warns where its master is
  /// discarded for that. `version`: the shard's version, where a new one has replaced it.
  bool was_changed(const Item& item);
  bool was_changed(const Item& item, std::uint32_t version);

 private:
  friend class Optimizer;
  friend class TrainableChanger;
  /// A parameter of the handle that the optimizer was made for.
  struct Scoped {
    std::shared_ptr<const void> owner;
    GradContract named;  ///< with all names of the model, for patterns
  };
  Item make_item(const ShardView& view) const;
  Item& find(std::string_view parameter);
  /// Returns the items that have a gradient, with their state made. Errors: those of
  /// Optimizer::step().
  std::vector<Item*> items_to_step();
  void make_state(Item& item) const;
  std::vector<OptimizerState::Kept> kept_of(const Item& item) const;
  // The next three are for set_trainable: trainable.cpp.
  /// Adds new tensors for the state of rebucketed parameters to `carried`, to be filled there.
  void carry_state(const std::vector<fsdp::Rebucketed>& rebucketed,
                   std::vector<fsdp::Carried>& carried);
  /// From now on updates those of its parameters that are trained now.
  void follow(const ShardedBase& outermost);
  std::string summary() const;  ///< a line that ranks compare

  const Optimizer& optimizer_;
  double lr_;
  std::shared_ptr<fsdp::Unit> unit_;
  std::vector<std::string> no_decay_;
  std::vector<OptimizerRule> rules_;
  std::map<const GradContract*, Scoped> scope_;
  std::vector<Item> items_;   // trained parameters, and frozen ones that were trained before
  std::uint64_t layout_ = 0;  // Runtime::layout() of the items' shards
  bool warned_ = false;       // that a master was discarded
  std::shared_ptr<torch::optim::Optimizer> for_schedulers_;  // made at its first use
};

}  // namespace tessera
