// The rate at which a state decays, out of the parameter A_log. Private to the layers with a state.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// -exp(a_log) in `dtype`, fp32 at least. At most -e^80, which leaves nothing of a state after the
/// smallest step that counts: an infinite rate times a step of 0 would be no number.
inline at::Tensor rate_of_state(const at::Tensor& a_log, at::ScalarType dtype) {
  constexpr double kMostLog = 80.0;
  return -a_log.to(dtype).clamp_max(kMostLog).exp();
}

}  // namespace tessera::nn
