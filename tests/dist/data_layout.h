// Layouts of data parallelism that a test runs on, and what its cases are called.
#pragma once

#include <string>

#include "dist/ranks.h"
#include "tessera/error.h"

namespace tessera::test {

struct DataLayout {
  int ranks, replicas;
  ThreadBackend backend = ThreadBackend::kInProcess;
};

inline std::string name_of(const ::testing::TestParamInfo<DataLayout>& info) {
  return concat(info.param.ranks, "ranks", info.param.replicas, "replicas",
                info.param.backend == ThreadBackend::kGloo ? "Gloo" : "InProcess");
}

}  // namespace tessera::test
