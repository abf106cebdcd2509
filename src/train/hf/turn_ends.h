// Finds ends of turns at which generation does not stop. The tokenizer and the chat template give
// the token that ends a turn, config.json and generation_config.json those at which generation
// stops. A base model that was tuned on chats often keeps the end of a text alone, so that
// generation continues after its answers. Pure.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "models/model_spec.h"

namespace tessera::train {

/// The tokens at which generation stops, as transformers reads them.
struct TextEnds {
  std::vector<std::int64_t> ids;
  std::string file;  ///< "generation_config.json" where that names some, else "config.json"
};
/// Reads them from `folder`, a Hugging Face folder or empty. Errors: kIo; kFormat for a malformed
/// generation_config.json.
TextEnds text_ends(const std::filesystem::path& folder, const models::ModelSpec& spec);

struct TurnEnd {
  std::string token;
  std::optional<std::int64_t> id;  ///< none: the tokenizer has no such token
  std::string says;  ///< "eos_token of tokenizer_config.json" (or of special_tokens_map.json), or
                     ///< "the chat template"
};
/// The ends of turns in `folder` at which generation does not stop: the tokenizer's eos_token, and
/// the known end of a turn in its chat template. An eos_token that is no token of the tokenizer is
/// one, where the folder's files list the tokens. Errors: kIo, kFormat for files that cannot be
/// read.
std::vector<TurnEnd> turns_that_go_on(const std::filesystem::path& folder, const TextEnds& ends);

}  // namespace tessera::train
