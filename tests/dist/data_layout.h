// Layouts of data parallelism that a test runs on, and what its cases are called.
#pragma once

#include <string>

#include "support/ranks.h"
#include "tessera/error.h"

namespace tessera::test {

struct DataLayout {
  int ranks, replicas;
  ThreadBackend backend = ThreadBackend::kInProcess;
  bool operator==(const DataLayout&) const = default;
};

inline Ranks ranks(const DataLayout& layout) { return ranks(layout.ranks, layout.backend); }

inline void PrintTo(const DataLayout& layout, std::ostream* out) {
  *out << layout.ranks << " ranks, " << layout.replicas << " replicas, "
       << (layout.backend == ThreadBackend::kGloo ? "Gloo" : "in process");
}

/// The layouts under which a property must hold: one to three ranks, and both axes alone and
/// together, over both backends.
inline auto every_data_layout() {
  constexpr auto kGloo = ThreadBackend::kGloo;
  return ::testing::Values(DataLayout{1, 1}, DataLayout{2, 1}, DataLayout{3, 1}, DataLayout{2, 2},
                           DataLayout{4, 2}, DataLayout{2, 1, kGloo}, DataLayout{3, 1, kGloo},
                           DataLayout{2, 2, kGloo}, DataLayout{4, 2, kGloo});
}

inline std::string name_of(const ::testing::TestParamInfo<DataLayout>& info) {
  return concat(info.param.ranks, "ranks", info.param.replicas, "replicas",
                info.param.backend == ThreadBackend::kGloo ? "Gloo" : "InProcess");
}

}  // namespace tessera::test
