// Patterns over dotted names, for `match` of a precision rule, `freeze` and `no_decay`.
//
// A pattern is one or more dotted components that match consecutive whole components, anywhere in
// the name. `*` (any run) and `?` (any one character) stay within a component; case counts. A
// pattern never matches a substring: "wo" does not match "word_embedding". So "*norm" matches
// "a.input_layernorm.weight" without `.weight`, and "model.vision_tower" everything below it.
// Matching is linear in practice, never exponential.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/error.h"

namespace tessera {

/// Whether the pattern matches the whole of `text`, a component or any plain string.
bool wildcard_match(std::string_view pattern, std::string_view text);

/// Whether a dotted pattern matches a dotted name. A pattern with an empty component matches
/// nothing.
bool dotted_match(std::string_view pattern, std::string_view name);

/// Whether a pattern could match some name: not empty, no empty component.
bool is_dotted_pattern(std::string_view pattern);

/// Returns the message for a pattern that matches nothing: its source (a key, a rule, a table), the
/// pattern in quotes, what it was compared with, and what is expected.
std::string unmatched(std::string_view source, std::string_view quoted,
                      std::string_view found = " that matches no parameter",
                      std::string_view expected = "one that does");
inline std::string in_quotes(std::string_view pattern) { return concat("\"", pattern, "\""); }

/// Whether text is a word, which is compared as it is, or a pattern, in which `*` and `?` match and
/// a swap of neighbours counts as one edit.
enum class Typed { kWord, kPattern };

/// Returns the number of edits (a character changed, inserted or removed) from `typed` to `text`. A
/// difference of upper and lower case counts as none, since it is the most likely mistake.
std::size_t edit_distance(std::string_view typed, std::string_view text, Typed as);

/// Returns the name that has the components closest to a pattern which matches no name, if they are
/// close enough to be meant; the first one among equals. A name without dots has one
/// component, so that this also finds the key that a misspelt key stands for.
std::optional<std::string> closest_name(std::string_view pattern,
                                        const std::vector<std::string>& names);

/// Returns the candidate with the smallest edit distance, case ignored; none where all distances
/// are above a third of the word, or above 3.
std::optional<std::string> close_name(std::string_view word,
                                      const std::vector<std::string>& candidates);

}  // namespace tessera
