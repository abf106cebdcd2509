#include "grad/weight_grad_store.h"

#include <c10/core/GradMode.h>

#include <string>
#include <utility>

namespace tessera::grad {

void WeightGradStore::put(SlotId slot, Product product) {
  const std::string& parameter = sink_.contract(slot).name;
  std::string layer = parameter.substr(0, parameter.rfind('.'));
  owed_.push_back({sink_.promise(slot, std::move(layer), micro_batch_), std::move(product)});
}

void WeightGradStore::run() {
  const at::NoGradGuard no_grad;
  while (!owed_.empty()) {
    // Its inputs are given back before the next product is formed.
    const Owed owed = std::move(owed_.front());
    owed_.pop_front();
    sink_.redeem(owed.ticket, owed.product());
  }
  micro_batch_ = -1;
}

void WeightGradStore::drop() {
  owed_.clear();
  micro_batch_ = -1;
}

}  // namespace tessera::grad
