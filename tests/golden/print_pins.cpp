// Every family's table of parameters that stay in fp32, as JSON: what pins_test.py compares.
#include <iostream>
#include <nlohmann/json.hpp>

#include "models/family.h"

int main() {
  nlohmann::ordered_json families = nlohmann::ordered_json::array();
  for (const auto* family : tessera::models::families()) {
    families.push_back({{"architecture", family->architecture},
                        {"strict", family->pins.strict},
                        {"under_float16", family->pins.under_float16}});
  }
  std::cout << families.dump(2) << '\n';
}
