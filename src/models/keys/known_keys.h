// Keys of a config.json that no family reads: which of them change nothing about a model, and at
// which value others do not.
//
// Published folders carry what tools wrote for themselves, and what a family of another kind would
// read. A key is of one of three classes. Known to be inert, by its name, by a pattern, or by a value
// that means "off": ignored; those that transformers does not write into every config are said once.
// Known to matter: read by the family, or refused here at any value but the one that means nothing.
// Unknown: left to the caller, who refuses it. Pure. Next: ../spec_keys.h, ../config_reader.h.
#pragma once

#include <string>
#include <vector>

#include "models/config_reader.h"
#include "models/model_spec.h"

namespace tessera::models {

/// Keys that no family took, with the path in front.
struct LeftKeys {
  std::vector<std::string> unknown;  ///< as "key = value"
  std::vector<std::string> ignored;  ///< names of those that change nothing, to be said
};

/// Sorts what nobody took of one object, once all readers of it are done. `spec`: the model, where
/// the object describes it, as some keys repeat what others say. Errors: kConfig for a key that is
/// known to matter.
void settle_left_keys(ConfigReader& keys, const ModelSpec* spec, LeftKeys& left);

}  // namespace tessera::models
