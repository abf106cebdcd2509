// Reads a config.json per line of standard input and prints one JSON line for each: the spec as we
// write it, the ignored keys and the rope's table of the first positions, or why it is refused.
// config_keys_test.py compares the lines.
#include <ATen/ATen.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "nn/rope.h"
#include "tessera/error.h"

namespace {

nlohmann::json rows(const at::Tensor& table) {
  auto rows = nlohmann::json::array();
  for (std::int64_t i = 0; i < table.size(0); ++i) {
    const at::Tensor row = table[i].contiguous();
    rows.push_back(std::vector<float>(row.data_ptr<float>(), row.data_ptr<float>() + row.numel()));
  }
  return rows;
}

}  // namespace

int main() {
  constexpr std::int64_t kPositions = 5;
  for (std::string line; std::getline(std::cin, line);) {
    nlohmann::ordered_json answer;
    try {
      const auto parsed =
          tessera::models::parse_spec(line, {.purpose = tessera::models::Purpose::kInference});
      answer["config"] = nlohmann::ordered_json::parse(tessera::models::config_json(parsed.spec));
      answer["ignored"] = parsed.ignored_keys;
      const auto table = tessera::nn::Rope(parsed.spec.rope, parsed.spec.head_dim)
                             .table(kPositions, at::kFloat, at::kCPU);
      answer["cos"] = rows(table.cos);
      answer["sin"] = rows(table.sin);
    } catch (const tessera::Error& error) {
      answer["refused"] = error.what();
    }
    std::cout << answer.dump() << '\n';
  }
}
