// generation_config.json: what a published model says about how it wants to be run. Only the tokens
// that end a text are read; nothing else there changes what a token means.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera::models {

/// Its `eos_token_id`, a number or a list; empty where it names none. Errors: kFormat for malformed
/// JSON or another value.
std::vector<std::int64_t> generation_end_tokens(std::string_view text, std::string_view where);

}  // namespace tessera::models
