// The reasons to refuse a dict of entries, by name. All are reported before anything is written.
#pragma once

#include <string>
#include <vector>

#include "base/text/printable.h"
#include "tessera/error.h"
#include "tessera/state_dict.h"

namespace tessera::fsdp {

struct LoadRefusals {
  StateDictDifference difference;
  std::vector<std::string> refusals;

  void add_second_entry(const std::string& name) {
    refusals.push_back(concat(name, ": found two entries, expected one"));
  }
  /// Returns the refused part of the difference. `unexpected_are`: "entries that the model does not
  /// have".
  std::vector<std::string> refused_difference(Strict strict, const char* unexpected_are) const {
    if (strict == Strict::kNo) return {};
    std::vector<std::string> all;
    const auto& [missing, unexpected] = difference;
    if (!missing.empty()) all.push_back(concat("found no entry for ", joined(missing)));
    if (!unexpected.empty()) {
      all.push_back(concat("found ", unexpected_are, ", ", joined(unexpected)));
    }
    return all;
  }
};

}  // namespace tessera::fsdp
