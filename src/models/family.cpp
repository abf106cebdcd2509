#include "models/family.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::models {

std::vector<const FamilyTraits*> families() {
  return {
#define TESSERA_FAMILY(enumerator, folder, build) &folder##_traits(),
#include "models/families.def"
  };
}

namespace {

bool is_of(const FamilyTraits& family, std::string_view model_type) {
  return family.model_type == model_type ||
         std::ranges::find(family.other_model_types, model_type) != family.other_model_types.end();
}

std::string known_families() {
  std::string list;
  for (const FamilyTraits* family : families()) {
    list +=
        concat(list.empty() ? "" : ", ", family->architecture, " (model_type ", family->model_type);
    for (const auto type : family->other_model_types) list += concat(" or ", type);
    list += ")";
    if (family->whole) list += concat(", ", family->whole->architecture, " (its text model)");
  }
  return list;
}

}  // namespace

const FamilyTraits& traits(Family family) {
  switch (family) {
#define TESSERA_FAMILY(enumerator, folder, build) \
  case Family::enumerator:                        \
    return folder##_traits();
#include "models/families.def"
  }
  TESSERA_INVARIANT(false, "a family that is not listed");
}

bool is_whole_of(const FamilyTraits& family, const nlohmann::json& config) {
  if (!family.whole) return false;
  const auto type = config.find("model_type");
  if (type != config.end() && *type == std::string(family.whole->model_type)) return true;
  const auto names = config.find("architectures");
  return names != config.end() &&
         *names == nlohmann::json::array({std::string(family.whole->architecture)});
}

const FamilyTraits& family_of(const std::vector<std::string>& architectures,
                              std::string_view model_type) {
  TESSERA_CHECK(architectures.size() <= 1, ErrorKind::kConfig, "config.json architectures: found ",
                architectures.size(), " names, expected one of ", known_families());
  const FamilyTraits* by_type = nullptr;
  const FamilyTraits* by_name = nullptr;
  for (const FamilyTraits* family : families()) {
    if (is_of(*family, model_type)) by_type = family;
    if (!architectures.empty() && family->architecture == architectures[0]) by_name = family;
  }
  TESSERA_CHECK(!architectures.empty() || !model_type.empty(), ErrorKind::kConfig,
                "config.json: found neither architectures nor model_type, expected one of ",
                known_families());
  TESSERA_CHECK(architectures.empty() || by_name != nullptr, ErrorKind::kConfig,
                "config.json architectures: found ",
                printable(architectures.empty() ? std::string_view() : architectures[0]),
                ", expected one of ", known_families());
  TESSERA_CHECK(model_type.empty() || by_type != nullptr, ErrorKind::kConfig,
                "config.json model_type: found ", printable(model_type), ", expected one of ",
                known_families());
  TESSERA_CHECK(by_name == nullptr || by_type == nullptr || by_name == by_type, ErrorKind::kConfig,
                "config.json model_type: found ", printable(model_type), " with architectures ",
                printable(by_name->architecture), ", which is ", by_name->model_type);
  return by_name != nullptr ? *by_name : *by_type;
}

}  // namespace tessera::models
