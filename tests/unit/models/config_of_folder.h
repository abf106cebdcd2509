// The config.json of a folder of reference data, also with other values.
#pragma once

#include <nlohmann/json.hpp>

#include "models/keys/bare_infinity.h"
#include "models/model_spec.h"
#include "support/temporary_folder.h"

namespace tessera::models {

/// Reads a file of a folder of reference data, or of an absolute path.
inline std::string file_text(const std::string& folder, const std::string& file) {
  return read_file(std::filesystem::path(TESSERA_TEST_DATA) / folder / file);
}

/// Reads config.json of a folder; a failure where config.hub.json says something else.
inline ModelSpec spec_in_both_spellings(const std::string& folder) {
  const ModelSpec spec = parse_spec(file_text(folder, "config.json")).spec;
  EXPECT_EQ(spec, parse_spec(file_text(folder, "config.hub.json")).spec) << folder;
  return spec;
}

/// In the hub's spelling, in which one folder has a word that is no JSON.
inline nlohmann::json hub_config(const std::string& folder) {
  return nlohmann::json::parse(spell_bare_infinity(file_text(folder, "config.hub.json")));
}

/// In the hub's spelling, with these keys in the place of its own.
inline std::string changed_config(const std::string& folder, const nlohmann::json& keys) {
  nlohmann::json config = hub_config(folder);
  config.update(keys);
  return config.dump();
}

/// The message of its refusal; "" if there was none.
inline std::string config_refusal(const std::string& text) {
  return refusal_of(ErrorKind::kConfig, [&] { parse_spec(text); });
}

/// The config.hub.json of one folder, as the tests of a family ask it.
class ConfigOfFolder {
 public:
  explicit constexpr ConfigOfFolder(const char* folder) : folder_(folder) {}

  /// With these keys in the place of its own.
  ModelSpec spec(const nlohmann::json& keys = nlohmann::json::object()) const {
    return parse_spec(changed_config(folder_, keys)).spec;
  }
  std::string refusal(const nlohmann::json& keys) const {
    return config_refusal(changed_config(folder_, keys));
  }
  nlohmann::json json() const { return hub_config(folder_); }
  /// Reads the config without these keys.
  ModelSpec spec_without(std::initializer_list<const char*> keys) const {
    nlohmann::json config = json();
    for (const char* key : keys) config.erase(key);
    return parse_spec(config.dump()).spec;
  }
  struct Refused {
    const char* key;
    nlohmann::json value;
    const char* says = nullptr;  ///< null: the key
  };
  /// Each value on its own is refused.
  void expect_refused(const std::vector<Refused>& cases) const {
    for (const auto& [key, value, says] : cases) {
      EXPECT_THAT(refusal({{key, value}}), Says(says == nullptr ? key : says)) << value;
    }
  }
  /// Checks that what is written of it with each of these changes is read as the same.
  void expect_kept(const std::vector<nlohmann::json>& changes) const {
    for (const nlohmann::json& keys : changes) {
      const ModelSpec found = spec(keys);
      EXPECT_EQ(parse_spec(config_json(found)).spec, found) << keys;
    }
  }

 private:
  const char* folder_;
};

}  // namespace tessera::models
