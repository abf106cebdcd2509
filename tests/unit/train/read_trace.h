// A trace file of a run as values: what tests count in it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace tessera::train {

struct Span {
  std::string name;
  double begin = 0;
  double end = 0;
  nlohmann::json arguments;
};
/// By rank and name of the row, in the order of their beginning.
using Rows = std::map<std::pair<int, std::string>, std::vector<Span>>;

inline Rows read_trace(const std::filesystem::path& path) {
  std::ifstream file(path);
  const nlohmann::json trace = nlohmann::json::parse(file);
  std::map<std::pair<int, int>, std::string> names;
  for (const nlohmann::json& event : trace["traceEvents"]) {
    if (event["name"] == "thread_name") {
      names[{event["pid"], event["tid"]}] = event["args"]["name"];
    }
  }
  Rows rows;
  for (const nlohmann::json& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"];
    rows[{event["pid"], names.at({event["pid"], event["tid"]})}].push_back(
        {event["name"], begin, begin + event["dur"].get<double>(), event["args"]});
  }
  return rows;
}

inline std::int64_t sent(const std::vector<Span>& spans) {
  std::int64_t bytes = 0;
  for (const Span& span : spans) bytes += span.arguments["sent_bytes"].get<std::int64_t>();
  return bytes;
}

}  // namespace tessera::train
