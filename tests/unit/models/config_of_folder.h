// The config.json of a folder of reference data, also with other values.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "models/model_spec.h"
#include "tessera/error.h"

namespace tessera::models {

inline std::string config_text(const std::string& folder, const std::string& file) {
  std::ifstream opened(std::filesystem::path(TESSERA_TEST_DATA) / folder / file, std::ios::binary);
  return {std::istreambuf_iterator<char>(opened), {}};
}

/// In the hub's spelling, with these keys in the place of its own.
inline std::string changed_config(const std::string& folder, const nlohmann::json& keys) {
  nlohmann::json config = nlohmann::json::parse(config_text(folder, "config.hub.json"));
  config.update(keys);
  return config.dump();
}

/// The message of its refusal; "" if there was none.
inline std::string refusal_of(const std::string& text) {
  try {
    parse_spec(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig) << error.what();
    return error.what();
  }
  return "";
}

}  // namespace tessera::models
