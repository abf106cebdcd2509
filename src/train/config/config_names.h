// Suggestions for unknown names of keys: misspelt ones, and those of torchtitan, transformers and
// axolotl for the same thing. Pure.
//
// A distant guess misleads more than none: a suggestion is within a few edits, in the section that
// was named, or in the table. Next: config_keys.h has the keys that exist.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::train {

/// Another program's name of a key or a section.
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

/// The end of the message "unknown key NAME": a suggestion, as "; the nearest is ...", or where all
/// names are listed. `full_name` includes its section, if any.
std::string advice_on_key(std::string_view full_name, KeysIn where);
/// The same behind "unknown section NAME".
std::string advice_on_section(std::string_view name);

/// Finds `name`, which has no section, among the keys of other programs; null where none has it.
const OtherName* find_other_key(std::string_view name);
/// The answer of advice_on_key() to another program's name.
std::string advice_on(const OtherName& other, KeysIn where);

/// The key, with its section, whose name alone is that close; from any section.
std::optional<std::string> close_key(std::string_view name);

}  // namespace tessera::train
