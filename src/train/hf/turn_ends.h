// Whether whoever generates with a model stops where its chats end a turn: the tokenizer and the chat
// template say with which token one ends, config.json and generation_config.json where generation
// stops. A base model that was tuned on chats often keeps the end of a text alone, and goes on behind
// its answers. Pure.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "models/model_spec.h"

namespace tessera::train {

/// Where generation stops, as transformers has it.
struct TextEnds {
  std::vector<std::int64_t> ids;
  std::string file;  ///< "generation_config.json" where that names some, else "config.json"
};
/// `folder` is a Hugging Face folder, or empty. Errors: kIo; kFormat for a generation_config.json that
/// is none.
TextEnds text_ends(const std::filesystem::path& folder, const models::ModelSpec& spec);

struct TurnEnd {
  std::string token;
  std::int64_t id = 0;
  std::string says;  ///< "eos_token of tokenizer_config.json" or "the chat template"
};
/// The ends of turns in `folder` that generation does not stop at: the tokenizer's eos_token, and what
/// its chat template ends turns with where that is a known name. Errors: kIo, kFormat for files that
/// cannot be read.
std::vector<TurnEnd> turns_that_go_on(const std::filesystem::path& folder, const TextEnds& ends);

}  // namespace tessera::train
