// Names that are no keys: misspelt ones, and those that torchtitan, transformers and axolotl have for
// the same thing. Pure.
//
// A guess that is far off misleads more than none: what is offered is within a few edits, in the
// section that was named, or stands in the table. Next: config_keys.h has the names that are.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::train {

/// What other programs call a key or a section.
struct OtherName {
  std::string_view theirs;  ///< one or several, separated by spaces: "bf16 fp16", "model.name"
  std::string_view here;    ///< the key, or of a section's name the section; empty = there is none
  std::string_view note = {};  ///< how it differs, or what there is in its place
};
/// A name with a section is meant in that one only, one without in any.
std::span<const OtherName> other_keys();
std::span<const OtherName> other_sections();

/// How a key is shown: "optimizer.lr", or --optimizer.lr.
enum class KeysIn : std::uint8_t { kFile, kCommandLine };

/// What to say behind "unknown key NAME": "; the nearest is ..." and the like, or where all names
/// are. `full_name` has its section, or none.
std::string advice_on_key(std::string_view full_name, KeysIn where);
/// The same behind "unknown section NAME".
std::string advice_on_section(std::string_view name);

/// Of a key's name alone, as an option without a section: the key that another program calls so.
const OtherName* find_other_key(std::string_view name);
/// What advice_on_key() says of it.
std::string advice_on(const OtherName& other, KeysIn where);

/// The candidate with the fewest edits, case ignored; none where all are further off than a third of
/// the word, or than 3.
std::optional<std::string> close_name(std::string_view word,
                                      const std::vector<std::string>& candidates);
/// The key of any section whose name alone is that close, with its section.
std::optional<std::string> close_key(std::string_view name);

}  // namespace tessera::train
