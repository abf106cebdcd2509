// The words of an enumeration, listed once next to it: the names of its values in files, options
// and messages.
//
//   constexpr auto words_of(Keep) {
//     return std::to_array<Word<Keep>>({{"not", Keep::kNot}, {"backward", Keep::kBackward}});
//   }
//
// Pure.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <type_traits>

namespace tessera {

template <class E>
struct Word {
  std::string_view word;
  E value;
};

template <class E>
concept HasWords = std::is_enum_v<E> && requires { words_of(E{}); };

/// Returns the word of a value; empty for a value that has none.
template <HasWords E>
constexpr std::string_view word_of(E value) {
  for (const auto& one : words_of(value)) {
    if (one.value == value) return one.word;
  }
  return "";
}

template <HasWords E>
constexpr std::optional<E> from_word(std::string_view word) {
  for (const auto& one : words_of(E{})) {
    if (one.word == word) return one.value;
  }
  return std::nullopt;
}

}  // namespace tessera
