#include "comm/backends/backend.h"

#include <algorithm>

#include "comm/backends/gloo/gloo.h"
#include "comm/backends/nccl/nccl.h"
#include "tessera/error.h"

namespace tessera::comm {

int GroupPlace::self() const {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

const std::vector<BackendRow>& backends() {
  static const std::vector<BackendRow> rows{
      {"gloo", [] { return true; }, open_gloo},
      {"nccl", nccl_usable, open_nccl},
  };
  return rows;
}

const BackendRow& backend_named(const std::string& name) {
  // Models live on the CPU so far: "auto" is the first.
  if (name == "auto") return backends().front();
  const auto row =
      std::ranges::find_if(backends(), [&](const BackendRow& one) { return one.name == name; });
  if (row != backends().end()) return *row;
  std::string expected = "auto";
  for (const BackendRow& one : backends()) {
    expected += concat(&one == &backends().back() ? " or " : ", ", one.name);
  }
  throw Error(ErrorKind::kUsage, concat("world: found backend ", name, ", expected ", expected));
}

}  // namespace tessera::comm
