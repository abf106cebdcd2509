// The recorded schedules of schedules.json: orders, simulations and peaks of PyTorch 2.13 and of
// DeepSeek's DualPipeV, made outside of this project.
#pragma once

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "pipeline/kinds.h"

namespace tessera::testing {

struct Recorded {
  std::string schedule;
  pipeline::Shape shape;
  std::vector<std::vector<std::string>> order;    ///< of each rank
  std::vector<std::vector<std::string>> lowered;  ///< empty where it was not recorded
  nlohmann::json sim;
  std::vector<int> peak_chunks;

  std::string name() const {
    return schedule + "_" + std::to_string(shape.ranks) + "_" + std::to_string(shape.micro_batches);
  }
};

inline std::vector<std::vector<std::string>> lists_of(const nlohmann::json& by_rank) {
  std::vector<std::vector<std::string>> lists;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    lists.push_back(by_rank.at(std::to_string(rank)).get<std::vector<std::string>>());
  }
  return lists;
}

inline std::vector<Recorded> recorded_schedules() {
  std::ifstream file(TESSERA_SCHEDULES);
  const nlohmann::json whole = nlohmann::json::parse(file);
  std::vector<Recorded> cases;
  for (const auto& one : whole.at("cases")) {
    Recorded recorded;
    recorded.schedule = one.at("schedule");
    const int ranks = one.at("pp");
    recorded.shape = {ranks, one.at("stages").get<int>() / ranks, one.at("microbatches")};
    recorded.order = lists_of(one.at("order"));
    if (one.contains("lowered")) recorded.lowered = lists_of(one.at("lowered"));
    recorded.sim = one.at("sim");
    for (int rank = 0; rank < ranks; ++rank) {
      recorded.peak_chunks.push_back(one.at("peak_chunks").at(std::to_string(rank)));
    }
    cases.push_back(std::move(recorded));
  }
  return cases;
}

}  // namespace tessera::testing
