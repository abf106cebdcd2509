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
      {"gloo", at::kCPU, [] { return true; }, open_gloo},
      {"nccl", at::kCUDA, nccl_usable, open_nccl},
  };
  return rows;
}

namespace {

/// Null where there is none.
const BackendRow* find_backend(std::string_view name) {
  const auto row = std::ranges::find(backends(), name, &BackendRow::name);
  return row == backends().end() ? nullptr : &*row;
}

}  // namespace

const BackendRow& backend_named(const std::string& name) {
  // Models live on the CPU so far: "auto" is the first.
  if (name == "auto") return backends().front();
  if (const BackendRow* row = find_backend(name)) return *row;
  std::string expected = "auto";
  for (const BackendRow& one : backends()) {
    expected += concat(&one == &backends().back() ? " or " : ", ", one.name);
  }
  throw Error(ErrorKind::kUsage, concat("world: found backend ", name, ", expected ", expected));
}

at::DeviceType device_of(const World& world) {
  const BackendRow* row = find_backend(world.backend());
  return row == nullptr ? at::kCPU : row->device;
}

}  // namespace tessera::comm
