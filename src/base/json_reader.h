// JSON from files that nobody vouches for (config.json, an index, a data description).
//
// On top of nlohmann/json's own checks a duplicate key is an error (two readers could each take
// another one) and nesting is capped, so that no later walk over the value can overflow the stack.
// Size is the caller's to cap (read_text_file). Include this in .cpp files only: nlohmann is slow
// to compile. The safetensors header is not read here but streamed (io/safetensors_header.cpp).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tessera {

inline constexpr int kMaxJsonDepth = 64;

/// The whole text as one JSON value. `where` names the file in messages. Errors: kFormat.
nlohmann::json parse_json(std::string_view text, std::string_view where,
                          int max_depth = kMaxJsonDepth);

/// The same, where the value must be an object.
nlohmann::json parse_json_object(std::string_view text, std::string_view where,
                                 int max_depth = kMaxJsonDepth);

/// What a JSON error says, in one line fit for a message: without the name of its class, and
/// without the place, which callers give as a byte.
std::string complaint_of(const nlohmann::json::exception& error);

}  // namespace tessera
