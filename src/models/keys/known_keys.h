// Keys of a config.json that no family reads: those that change nothing about a model, and the
// values at which others change nothing.
//
// Published folders carry keys that tools wrote for themselves, and keys that another kind of
// family would read. A key is of one of three classes. Known to be inert, by its name, by a
// pattern, or by a value that means "off": ignored, and logged once unless transformers writes it
// into every config. Null, false, an empty list and an empty object mean "off" for every key but
// those by which false would take something away; a 0 may matter, and is "off" for known keys only.
// Known to matter: read by the family, or refused here at any value but the one that means nothing.
// Unknown: left to the caller, which refuses it. Pure. Next: ../spec_keys.h,
// config_reader.h.
#pragma once

#include <string>
#include <vector>

#include "models/keys/config_reader.h"
#include "models/model_spec.h"

namespace tessera::models {

/// Keys that no family used, with the path in front.
struct LeftKeys {
  std::vector<std::string> unknown;  ///< as "key = value"
  std::vector<std::string> ignored;  ///< names of those that change nothing, to be logged
};

/// Sorts the unused keys of one object, after all its readers. `spec`: the model, where the object
/// describes it, as some keys repeat what others say. Errors: kConfig for a key that is known to
/// matter.
void settle_left_keys(ConfigReader& keys, const ModelSpec* spec, LeftKeys& left);

/// Sorts the unused keys of a record of rope, after the reader of its kind. Those that transformers
/// reads for other kinds change nothing.
void settle_left_rope_keys(ConfigReader& keys, LeftKeys& left);

}  // namespace tessera::models
