// How a model's tensors are divided over the files of a Hugging Face folder, as a value: planned,
// written and read.
//
// One file is model.safetensors; several are model-00001-of-0000N.safetensors with
// model.safetensors.index.json, which says what lies where. Only the index's text is judged here;
// whether the files exist and hold what it says is checked where they are opened (hf_folder.h).
#pragma once

#include <cstdint>
#include <map>
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

/// model.safetensors.index.json as a value: which file holds which tensor.
struct HfIndex {
  std::map<std::string, std::string> weight_map;  ///< tensor name -> file name, without any folder
};

/// Errors: kFormat for malformed JSON, duplicate keys, an empty or missing weight_map, a file name
/// that is not a plain name (it could lead outside the folder). Other keys are not read: the totals
/// under `metadata` are wrong in published folders that tie weights.
HfIndex parse_hf_index(std::string_view text, std::string_view where);

/// "5GB", "500MB", "2KB" (powers of 1000), "1GiB", ... (of 1024), "4096": bytes. Errors: kUsage for
/// anything else and for 0.
std::int64_t parse_byte_size(std::string_view text, std::string_view option);

}  // namespace tessera
