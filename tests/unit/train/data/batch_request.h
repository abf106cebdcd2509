// Tests of batches share this: a request for a file's rows, and tensors of ids as values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <vector>

#include "train/data/data.h"

namespace tessera::train {

using Ids = std::vector<std::int64_t>;

inline Ids values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous().view({-1});
  const auto* data = flat.const_data_ptr<std::int64_t>();
  return {data, data + flat.numel()};
}

/// The file's rows, of this length where one is given, for a model of 300 ids that reads bytes.
inline BatchRequest request_for(const std::filesystem::path& path, std::int64_t seq_len = 0) {
  BatchRequest request;
  request.path = {path.string()};
  request.vocabulary = {.size = 300, .reads_bytes = true};
  if (seq_len > 0) request.training.seq_len = seq_len;
  return request;
}

}  // namespace tessera::train
