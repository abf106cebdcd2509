// Patterns over dotted names: what `match` of a precision rule, `freeze` and `no_decay` are written
// in.
//
// A pattern is one or more dotted components that match consecutive whole components, anywhere in
// the name; `*` (any run) and `?` (any one character) stay within a component; case counts. Never a
// substring: "wo" does not match "word_embedding". So "*norm" matches "a.input_layernorm.weight"
// without saying `.weight`, and "model.vision_tower" everything below it. Linear in practice, never
// exponential.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/error.h"

namespace tessera {

/// One component, or any plain string: `*` and `?` against the whole of `text`.
bool wildcard_match(std::string_view pattern, std::string_view text);

/// Whether a dotted pattern matches a dotted name. A pattern with an empty component matches
/// nothing.
bool dotted_match(std::string_view pattern, std::string_view name);

/// Whether a pattern could match some name: not empty, no empty component.
bool is_dotted_pattern(std::string_view pattern);

/// How all say that a pattern matches nothing: who gave it (a key, a rule, a table), the pattern in
/// quotes, what it was held against, what is expected instead.
std::string unmatched(std::string_view source, std::string_view quoted,
                      std::string_view found = " that matches no parameter",
                      std::string_view expected = "one that does");
inline std::string in_quotes(std::string_view pattern) { return concat("\"", pattern, "\""); }

/// A word is taken as it stands; in a pattern `*` and `?` match, and a swap of neighbours is one
/// slip as any other.
enum class Typed { kWord, kPattern };

/// By how many slips (a character changed, put in or taken out) `typed` misses `text`. Upper and
/// lower case differ by nothing: that is the likeliest slip.
std::size_t edit_distance(std::string_view typed, std::string_view text, Typed as);

/// The name of which some run of components is closest to a pattern that matches none of them, if
/// it is close enough to be meant; the first one among equals. Plain words are dotted names of one
/// component, so this also finds the key that a misspelt key stands for.
std::optional<std::string> closest_name(std::string_view pattern,
                                        const std::vector<std::string>& names);

/// The candidate with the smallest edit distance, case ignored; none where all are beyond a third
/// of the word, or beyond 3.
std::optional<std::string> close_name(std::string_view word,
                                      const std::vector<std::string>& candidates);

}  // namespace tessera
