// AdamW as a class, for optimizers that update some parameters in another way (muon.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/optim/optimizer_inside.h"
#include "fsdp/optim/optimizer_shards.h"
#include "tessera/optim.h"

namespace tessera::fsdp {

class AdamW : public Optimizer {
 public:
  /// `lr_scale`: a factor of every learning rate. Errors: kUsage for numbers that AdamW does not
  /// allow.
  AdamW(const ShardedBase& model, const AdamWOptions& options, double lr_scale = 1.0);
  std::string name() const override;
  std::vector<KeptTensor> states() const override { return {{"exp_avg"}, {"exp_avg_sq"}}; }

 protected:
  using Item = OptimizerItem;
  void update(const std::vector<Item*>& items) override;
  MasterOfShard& master() { return master_; }

 private:
  enum State : std::size_t { kFirst, kSecond, kSteps };  // states(), then the kernel's count
  struct Lists {
    std::vector<at::Tensor> parameters, grads, first, second, steps;
  };
  at::Tensor steps_of(Item& item, const at::Tensor& parameter);
  void add(Lists& lists, Item& item, const Stepped& part);
  void step_fused(Lists& lists, const Rates& rates) const;

  AdamWOptions options_;
  double lr_scale_;
  std::map<std::int64_t, at::Tensor> on_device_;  // by number of updates, in the present update
  MasterOfShard master_;
};

}  // namespace tessera::fsdp
