#include "models/family.h"

#include <array>

#include "base/printable.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

std::array<const FamilyTraits*, 6> all_families() {
  return {&qwen3_traits(),     &llama_traits(),   &gemma4_traits(),
          &qwen3_moe_traits(), &gpt_oss_traits(), &deepseek_v2_traits()};
}

std::string known_families() {
  std::string list;
  for (const FamilyTraits* family : all_families()) {
    list += concat(list.empty() ? "" : ", ", family->architecture, " (model_type ",
                   family->model_type, ")");
  }
  return list;
}

}  // namespace

const FamilyTraits& traits(Family family) {
  for (const FamilyTraits* each : all_families()) {
    if (each->family == family) return *each;
  }
  TESSERA_INVARIANT(false, "a family that is not listed");
}

std::vector<const FamilyTraits*> families() {
  const auto all = all_families();
  return {all.begin(), all.end()};
}

const FamilyTraits& family_of(const std::vector<std::string>& architectures,
                              std::string_view model_type) {
  TESSERA_CHECK(architectures.size() <= 1, ErrorKind::kConfig, "config.json architectures: found ",
                architectures.size(), " names, expected one of ", known_families());
  const FamilyTraits* by_type = nullptr;
  const FamilyTraits* by_name = nullptr;
  for (const FamilyTraits* family : all_families()) {
    if (family->model_type == model_type) by_type = family;
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
                "config.json model_type: found ", printable(model_type), " beside architectures ",
                printable(by_name->architecture), ", which is ", by_name->model_type);
  return by_name != nullptr ? *by_name : *by_type;
}

}  // namespace tessera::models
