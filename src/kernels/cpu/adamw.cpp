#include <ATen/ops/_fused_adamw.h>

#include "kernels/implementations.h"

namespace tessera::kernels::cpu {

// PyTorch's fused kernel: one pass over all that an update reads and writes.
void adamw(at::TensorList parameters, at::TensorList grads, at::TensorList first,
           at::TensorList second, at::TensorList steps, double lr, double beta1, double beta2,
           double weight_decay, double eps) {
  at::_fused_adamw_(parameters, grads, first, second, /*max_exp_avg_sqs=*/{}, steps, lr, beta1,
                    beta2, weight_decay, eps, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace tessera::kernels::cpu
