#include "train/family_pins.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera::train {
namespace {

void apply(const std::vector<std::string>& patterns,
           std::optional<std::string> ParameterMeta::* member, std::string_view list,
           const models::FamilyTraits& family, std::vector<ParameterMeta>& parameters) {
  for (const std::string& pattern : patterns) {
    bool any = false;
    for (ParameterMeta& meta : parameters) {
      if (!matches_name(pattern, meta.name)) continue;
      any = true;
      if (!(meta.*member)) meta.*member = pattern;
    }
    TESSERA_CHECK(any, ErrorKind::kContract, "model family ", family.model_type,
                  ": found the pattern \"", pattern, "\" in its ", list, ", which matches none of ",
                  parameters.size(),
                  " parameters, expected at least one; this table of Tessera's is wrong, please "
                  "report it");
  }
}

}  // namespace

void apply_pins(const models::FamilyTraits& family, std::vector<ParameterMeta>& parameters) {
  apply(family.pins.strict, &ParameterMeta::strict_pin, "_keep_in_fp32_modules_strict", family,
        parameters);
  const auto is_router = [&](const ParameterMeta& meta) {
    return std::ranges::any_of(family.pins.routers, [&](const std::string& pattern) {
      return matches_name(pattern, meta.name);
    });
  };
  if (std::ranges::any_of(parameters, is_router)) {
    apply(family.pins.routers, &ParameterMeta::strict_pin, "_keep_in_fp32_modules_strict", family,
          parameters);
  }
  apply(family.pins.under_float16, &ParameterMeta::pin16, "_keep_in_fp32_modules", family,
        parameters);
}

}  // namespace tessera::train
