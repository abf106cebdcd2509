#include "golden/same_runs.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "support/place.h"
#include "tessera/error.h"

namespace tessera::golden {
namespace {

/// A line of metrics.jsonl without what is measured and what tells how it was computed.
nlohmann::json computed(const std::string& line) {
  auto json = nlohmann::json::parse(line);
  for (const char* key :
       {"step_ms", "tps", "tps_global", "tflops", "peak_rss_mib", "peak_device_mib",
        "peak_device_reserved_mib", "mfu", "replayed_calls", "recorded_calls", "eager_calls",
        "eager_reason", "exchange_ms", "exchange_hidden_ms"}) {
    json.erase(key);
  }
  return json;
}

}  // namespace

void expect_same(const TrainingRun& found, const TrainingRun& expected, std::int64_t step) {
  EXPECT_EQ(found.losses, expected.losses);
  const auto same = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  EXPECT_TRUE(std::ranges::equal(found.norms, expected.norms, same));
  EXPECT_EQ(found.lines.size(), expected.lines.size());
  for (std::size_t i = 0; i < std::min(found.lines.size(), expected.lines.size()); ++i) {
    EXPECT_EQ(computed(found.lines[i]), computed(expected.lines[i]));
  }
  for (const auto& [name, value] : expected.parameters.at(step)) {
    EXPECT_TRUE(at::equal(value, found.parameters.at(step).at(name))) << name;
  }
}

void expect_replayed(const TrainingRun& run) {
  for (std::size_t rank = 0; rank < run.regions.size(); ++rank) {
    const ReplayCalls& calls = run.regions[rank];
    std::string why;
    for (const auto& [reason, count] : calls.eager) why += concat(count, " ", reason, "; ");
    SCOPED_TRACE(concat("rank ", rank, ": ", calls.recorded, " recorded, ", why));
    if (test::place().device != "cpu") {
      EXPECT_EQ(calls.replayed, 0);
    } else {
      EXPECT_GT(calls.replayed, 0);
    }
  }
}

void balance_experts(train::Config& config, const models::ModelSpec& spec, unsigned number) {
  if (!spec.moe) return;
  if (number % 2 == 1 || config.lora.rank > 0) {  // of adapters the bias is refused
    config.model.aux_loss_coef = 0.1;
  } else {
    config.model.load_balance_coeff = 0.05;
  }
}

}  // namespace tessera::golden
