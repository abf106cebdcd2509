// A config.json a line of standard input -> what we read of it a line, as JSON: what is written of the
// spec and which keys are ignored, or why it is refused. What config_keys_test.py compares.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "models/model_spec.h"
#include "tessera/error.h"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    nlohmann::ordered_json answer;
    try {
      const auto parsed =
          tessera::models::parse_spec(line, {.purpose = tessera::models::Purpose::kInference});
      answer["config"] = nlohmann::ordered_json::parse(tessera::models::config_json(parsed.spec));
      answer["ignored"] = parsed.ignored_keys;
    } catch (const tessera::Error& error) {
      answer["refused"] = error.what();
    }
    std::cout << answer.dump() << '\n';
  }
}
