#include "golden/faults.h"

#include <ostream>

#include "tessera/error.h"

namespace tessera::golden {
namespace {

std::string text(CaughtBy by) {
  switch (by) {
    case CaughtBy::kSharding:
      return "contract";
    case CaughtBy::kInvariance:
      return "invariant gradients";
    case CaughtBy::kGradients:
      return "gradients";
    case CaughtBy::kNorm:
      return "gradient norm";
    case CaughtBy::kNothing:
      return "harmless";
  }
  return "";
}

std::string short_text(const Degrees& d) {
  std::string result = concat("tp ", d.tp);
  if (d.shard > 1) result += concat(", dp_shard ", d.shard);
  if (d.ep > 1) result += concat(", ep ", d.ep);
  if (d.etp > 1) result += concat(", etp ", d.etp);
  if (d.tp > 1) result += d.sequence ? ", sequence shards" : ", whole sequence";
  if (d.router == models::RouterTokens::kAll) result += ", router on all";
  return result;
}

}  // namespace

std::string table_row(const Fault& fault) {
  return concat("| ", fault.what, " | ", fault.seen, " | ", short_text(fault.degrees), " | ",
                text(fault.caught_by), " | ",
                fault.named.empty() ? "" : concat("`", fault.named, "`"), " |");
}

std::ostream& operator<<(std::ostream& out, const Fault& fault) { return out << table_row(fault); }

void with_auxiliary_loss(train::Config& config) { config.model.aux_loss_coef = 0.7; }

const std::vector<Fault>& all_faults() {
  static const std::vector<Fault> all = [] {
    std::vector<Fault> faults = faults_of_declarations();
    for (auto part : {faults_of_transitions(), faults_of_sums()}) {
      faults.insert(faults.end(), part.begin(), part.end());
    }
    return faults;
  }();
  return all;
}

}  // namespace tessera::golden
