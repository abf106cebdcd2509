#include "comm/backends/backend.h"

#include <algorithm>

#include "comm/backends/gloo/gloo.h"
#include "comm/backends/nccl/nccl.h"
#include "tessera/error.h"

namespace tessera::comm {

int GroupPlace::self() const {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::string_view purpose_of(std::string_view group_name) {
  return group_name.substr(0, group_name.find(" of ranks "));
}

const std::vector<BackendRow>& backends() {
  static const std::vector<BackendRow> rows{
#define TESSERA_BACKEND(enumerator, folder, name, device, others, threads) \
  {name, device, others, threads, folder##_built_in, folder##_facts, open_##folder},
#define TESSERA_THREAD_BACKEND(folder, name, device, others, threads) \
  {name, device, others, threads, [] { return true; }, [](int) { return DeviceFacts(); }, nullptr},
#include "comm/backends/backends.def"
  };
  return rows;
}

namespace {

/// Returns null where there is none.
const BackendRow* find_backend(std::string_view name) {
  const auto row = std::ranges::find(backends(), name, &BackendRow::name);
  return row == backends().end() ? nullptr : &*row;
}

}  // namespace

void BackendRow::require_carries(at::DeviceType type) const {
  if (carries(type)) return;
  const auto word = [](at::DeviceType one) { return c10::DeviceTypeName(one, true); };
  const auto other = std::ranges::find_if(backends(), [&](const BackendRow& row) {
    return row.connects_processes() == connects_processes() && row.carries(type);
  });
  throw Error(
      ErrorKind::kConfig,
      concat("world: found backend ", name, " with device ", word(type), ", expected device ",
             word(*device), ", whose tensors it carries; set device to ", word(*device),
             other == backends().end() ? "" : concat(", or backend to ", other->name)));
}

const BackendRow& backend_named(const std::string& name, at::DeviceType device) {
  if (name == "auto") {
    for (const auto carries : {&BackendRow::carries_as_they_are, &BackendRow::carries}) {
      const auto carrier = std::ranges::find_if(backends(), [&](const BackendRow& row) {
        return row.connects_processes() && (row.*carries)(device);
      });
      if (carrier != backends().end()) return *carrier;
    }
    backends().front().require_carries(device);
  }
  const BackendRow* row = find_backend(name);
  if (row != nullptr && row->connects_processes()) {
    row->require_carries(device);
    return *row;
  }
  const auto last = std::ranges::find_if_not(backends(), &BackendRow::connects_processes) -
                    backends().begin() - 1;
  std::string expected = "auto";
  for (std::ptrdiff_t i = 0; i <= last; ++i) {
    expected += concat(i == last ? " or " : ", ", backends()[static_cast<std::size_t>(i)].name);
  }
  throw Error(ErrorKind::kUsage, concat("world: found backend ", name, ", expected ", expected));
}

const BackendRow& backend_of(ThreadBackend threads) {
  const auto row = std::ranges::find(backends(), threads, &BackendRow::threads);
  TESSERA_INVARIANT(row != backends().end(), "no backend connects threads so");
  return *row;
}

}  // namespace tessera::comm
