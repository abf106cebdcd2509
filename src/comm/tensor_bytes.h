// A tensor's memory as bytes, for what moves them without looking at them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace tessera::comm {

inline std::byte* at_byte(const at::Tensor& tensor, std::int64_t offset) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + offset;
}

inline std::int64_t nbytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes());
}

/// Where rank `peer`'s stretch begins among stretches of `counts`.
inline std::int64_t stretch_begin(const std::vector<std::int64_t>& counts, int peer) {
  return std::accumulate(counts.begin(), counts.begin() + peer, std::int64_t{0});
}

}  // namespace tessera::comm
