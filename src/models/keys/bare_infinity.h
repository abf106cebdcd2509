// The one word in published config.json that is no JSON: Nemotron-H's hub folders say
// "time_step_limit": [0.0, Infinity].
//
// It is read only there: as Infinity in the list that a key of this name has at the top of the
// file. Any other bare word stays as it is, for the reader of JSON to refuse. Pure. Next:
// ../nemotron_h/nemotron_h.cpp.
#pragma once

#include <string>
#include <string_view>

namespace tessera::models {

/// The text of a config.json with such a word spelled as transformers writes it: {"__float__":
/// "Infinity"}. Text that is no JSON otherwise stays so.
std::string spell_bare_infinity(std::string_view json);

}  // namespace tessera::models
