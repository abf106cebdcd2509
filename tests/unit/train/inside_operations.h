// Tells memory that libtorch takes for itself while it computes an operation from what the operation gives.
#pragma once

#include <functional>

#include "dry/fake_operations.h"
#include "kernels/watch.h"

namespace tessera::train {

/// Tells what is taken while libtorch computes an operation: memory of its own, as oneDNN's for bf16
/// products, and the result.
class InsideOperations final : public kernels::Watcher {
 public:
  InsideOperations() : Watcher(kernels::SeesKernels::kNo) {}
  void run(const c10::OperatorHandle& operation, c10::DispatchKeySet below,
           c10::Stack* stack) override {
    if (!dry::computes_elements(operation)) return operation.redispatchBoxed(below, stack);
    const c10::impl::ExcludeDispatchKeyGuard once(kernels::kWatchKey);
    is_inside_ = true;
    operation.redispatchBoxed(below, stack);
    is_inside_ = false;
    if (after) after();
  }
  bool is_inside() const { return is_inside_; }
  std::function<void()> after;

 private:
  bool is_inside_ = false;
};

}  // namespace tessera::train
