// Reads a config.json per line of standard input and prints one JSON line for each: the spec as we
// write it and the ignored keys, or why it is refused. config_keys_test.py compares the lines.
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
