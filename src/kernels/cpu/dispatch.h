// Dispatch from tensors to the typed kernel tables.
//
// There are kernels for fp32 and bf16 on the CPU; everything else uses the functions of ../aten.
// Next: tables.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "kernels/cpu/tables.h"

namespace tessera::kernels::cpu {

inline bool has_kernels(const at::Tensor& activation) {
  return activation.device().is_cpu() && activation.layout() == at::kStrided &&
         (activation.scalar_type() == at::kFloat || activation.scalar_type() == at::kBFloat16);
}

/// Whether there are kernels for the tensors; an undefined norm's weight counts as none.
inline bool has_kernels(const at::Tensor& activation, const at::Tensor& weight) {
  return has_kernels(activation) &&
         (!weight.defined() ||
          (weight.device().is_cpu() && (weight.scalar_type() == activation.scalar_type() ||
                                        weight.scalar_type() == at::kFloat)));
}

/// Returns the tensor as kernels read it; an undefined one for none.
inline at::Tensor contiguous_or_none(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor->contiguous() : at::Tensor();
}

template <class T>
const T* data(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const T*>(tensor.const_data_ptr()) : nullptr;
}
template <class T>
T* mutable_data(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

template <class ActivationType, class WeightType>
struct Types {
  using T = ActivationType;
  using W = WeightType;
};

/// Calls use(Types<T, W>{}, kernels) for the two dtypes.
template <class Use>
void with_kernels(at::ScalarType activation, at::ScalarType weight, Use&& use) {
  const Isa& isa = best_isa();
  if (activation == at::kFloat) {
    use(Types<float, float>{}, isa.fp32);
  } else if (weight == at::kFloat) {
    use(Types<BFloat16, float>{}, isa.bf16_wide_weights);
  } else {
    use(Types<BFloat16, BFloat16>{}, isa.bf16);
  }
}
template <class Use>
void with_kernels(at::ScalarType activation, Use&& use) {
  with_kernels(activation, activation, std::forward<Use>(use));
}

/// Returns how many rows justify a thread, which may have to be woken (base/threads/product.h).
inline std::int64_t rows_a_thread(std::int64_t columns) {
  constexpr std::int64_t kElements = 65536;
  return columns >= kElements ? 1 : kElements / (columns > 0 ? columns : 1);
}

}  // namespace tessera::kernels::cpu
