#include "grad/weight_gradient.h"

#include <utility>

#include "base/trace.h"
#include "grad/leaf.h"

namespace tessera::grad {

at::Tensor weight_gradient(const at::Tensor& parameter, Product product, WeightGradient when) {
  const auto leaf = find_leaf(parameter);
  if (!leaf || leaf->sink == nullptr) return product.formed();
  const auto put = [&](WeightGradStore& store) {
    store.put(leaf->slot, std::move(product), comm::Stream::current(parameter.device()));
    return at::Tensor();
  };
  auto* deferred = leaf->sink->store();
  if (deferred != nullptr && when != WeightGradient::kAtOnce) return put(*deferred);
  if (!arrives_alone(*leaf)) return product.formed();
  auto* under_exchange = leaf->sink->under_exchange();
  if (under_exchange != nullptr && when == WeightGradient::kUnderExchange) {
    return put(*under_exchange);
  }
  if (leaf->sink->write(leaf->slot, product, Source::kEager)) return {};
  if (parameter.is_cpu()) return product.formed();
  // On a device, which has less memory, it is added at once and freed before the node continues.
  leaf->sink->accept(leaf->slot, product.formed(), Source::kEager);
  return {};
}

void form_under_exchange(const at::Tensor& parameter) {
  const auto leaf = find_leaf(parameter);
  auto* store = leaf && leaf->sink != nullptr ? leaf->sink->under_exchange() : nullptr;
  if (store == nullptr || store->size() == 0) return;
  const TraceScope traced(TraceRow::kCompute, "weight gradients under an exchange");
  store->form_all();
}

}  // namespace tessera::grad
