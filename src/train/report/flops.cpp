#include "train/report/flops.h"

namespace tessera::train {

double flops_per_token(const ModelSize& size, std::int64_t seq_len) {
  const auto products = 6.0 * static_cast<double>(size.active_parameters);
  const auto attention = 12.0 * static_cast<double>(size.layers) * static_cast<double>(size.heads) *
                         static_cast<double>(size.head_dim) * static_cast<double>(seq_len);
  return products + attention;
}

}  // namespace tessera::train
