// model.safetensors.index.json as a value: which file holds which tensor.
//
// Only the text is judged here; whether the files exist and hold what the index says is checked
// where they are opened (hf_folder.h).
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace tessera {

struct HfIndex {
  std::map<std::string, std::string> weight_map;  ///< tensor name -> file name, without any folder
};

/// Errors: kFormat for malformed JSON, duplicate keys, an empty or missing weight_map, a file name
/// that is not a plain name (it could lead outside the folder). Other keys are not read: the totals
/// under `metadata` are wrong in published folders that tie weights.
HfIndex parse_hf_index(std::string_view text, std::string_view where);

}  // namespace tessera
