#include "check/finding.h"

#include <iterator>
#include <utility>

#include "tessera/error.h"

namespace tessera::check {

std::string_view to_string(FindingKind kind) {
  switch (kind) {
    case FindingKind::kContract:
      return "contract";
    case FindingKind::kTransition:
      return "transition";
    case FindingKind::kForward:
      return "forward";
    case FindingKind::kBackward:
      return "backward";
    case FindingKind::kGradient:
      return "gradient";
    case FindingKind::kInvariance:
      return "invariance";
    case FindingKind::kNumber:
      return "number";
    case FindingKind::kDtype:
      return "dtype";
    case FindingKind::kOrder:
      return "order";
    case FindingKind::kMemory:
      return "memory";
    case FindingKind::kRefused:
      return "refused";
  }
  return "";
}

std::string to_string(const Finding& finding) {
  std::vector<std::string> place;
  if (!finding.parameter.empty()) place.push_back(finding.parameter);
  if (!finding.operation.empty()) place.push_back(finding.operation);
  if (!finding.unit.empty()) place.push_back("in unit " + finding.unit);
  if (!finding.axis.empty()) place.push_back("over " + finding.axis);
  std::string text(to_string(finding.kind));
  for (std::size_t i = 0; i < place.size(); ++i) text += concat(i == 0 ? ": " : ", ", place[i]);
  text += concat(": found ", finding.found);
  if (!finding.expected.empty()) text += concat(", expected ", finding.expected);
  if (!finding.mend.empty()) text += concat("; ", finding.mend);
  return text;
}

void append(std::vector<Finding>& to, std::vector<Finding> from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

}  // namespace tessera::check
