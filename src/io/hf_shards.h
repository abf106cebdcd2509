// How a model's tensors are divided over the files of a Hugging Face folder, as a value.
//
// One file is model.safetensors; several are model-00001-of-0000N.safetensors with
// model.safetensors.index.json, which says what lies where. Reading them back: hf_folder.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors_writer.h"

namespace tessera {

struct HfShard {
  std::string file;
  std::vector<TensorSpec> tensors;
};

/// Units: bytes of tensor data.
std::int64_t size_bytes(const TensorSpec& tensor);

/// Filled one after the other in the order of `tensors`; a tensor larger than `max_bytes` has a
/// file of its own. At least one file.
std::vector<HfShard> plan_shards(const std::vector<TensorSpec>& tensors, std::int64_t max_bytes);

/// model.safetensors.index.json of these files.
std::string index_json(const std::vector<HfShard>& shards);

/// "5GB", "500MB", "2KB" (powers of 1000), "1GiB", ... (of 1024), "4096": bytes. Errors: kUsage for
/// anything else and for 0.
std::int64_t parse_byte_size(std::string_view text, std::string_view option);

}  // namespace tessera
