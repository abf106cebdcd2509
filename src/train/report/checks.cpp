#include "train/report/checks.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/text/printable.h"
#include "comm/group.h"
#include "tessera/clip.h"
#include "tessera/dtype_watch.h"
#include "tessera/error.h"
#include "tessera/shard.h"

namespace tessera::train {
namespace {

/// Lines that any rank of the group has, each once, in the order of ranks.
std::vector<std::string> lines_of(comm::Group* group, const std::string& mine,
                                  const std::string& what) {
  const auto texts = group == nullptr ? std::vector<std::string>{mine}
                                      : comm::all_gather_bytes(*group, mine, what);
  std::vector<std::string> lines;
  for (const auto& text : texts) {
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
      if (std::ranges::find(lines, line) == lines.end()) lines.push_back(line);
    }
  }
  return lines;
}

}  // namespace

std::vector<std::string> lines_of_ranks(const ShardedBase& model, const std::string& mine,
                                        const std::string& what) {
  std::string of_stage;
  for (const auto& line : lines_of(model.data_group(), mine, what)) of_stage += line + "\n";
  return lines_of(model.stages_group(), of_stage, what);
}

void check_dtypes(const ShardedBase& model, const std::function<void()>& forward) {
  const at::NoGradGuard no_grad;
  std::string mine;
  {
    const DtypeWatch watch(model);
    forward();
    mine = to_string(watch.findings());
  }
  const auto lines = lines_of_ranks(model, mine, "dtypes of results");
  const bool speaks = model.rank() == 0;
  for (const auto& line : lines) {
    if (speaks) log::warn("debug.check_dtypes: ", line);
  }
  if (lines.empty()) {
    if (speaks) log::info("debug.check_dtypes: every result of a forward has its unit's dtype");
    return;
  }
  throw FoundProblems(ErrorKind::kContract,
                      concat("debug.check_dtypes: found ", lines.size(),
                             " operations that leave the dtype of their unit, expected none: ",
                             lines[0], lines.size() > 1 ? "; ..." : "",
                             "; cast its result back, or change the dtype of what is named by a "
                             "[[precision.rule]], or set debug.check_dtypes = false"));
}

void check_placements(const ShardedBase& model) {
  const auto names = check_invariant_gradients(model);
  if (names.empty()) return;
  throw FoundProblems(
      ErrorKind::kContract,
      concat(
          "debug.check_placements: found gradients that differ between ranks of an axis on which "
          "their layers declare them Invariant: ",
          joined(names),
          "; expected the same bits on every rank: a layer sums too little, "
          "or too much, and the ranks' copies of these parameters drift apart"));
}

}  // namespace tessera::train
