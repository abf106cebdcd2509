// Ranks as processes that share a model of tests/golden/data, by the words of a command line.
#pragma once

#include <string>
#include <vector>

#include "tessera/error.h"

namespace tessera::cli {

struct ProcessLayout {
  int replicate = 1;
  int shard = 1;
  int tp = 1;
  int ep = 1;
  int etp = 1;
  int cp = 1;
  int ranks() const { return replicate * shard * cp * tp; }
};

inline std::string to_string(const ProcessLayout& layout) {
  return concat("dp_replicate ", layout.replicate, ", dp_shard ", layout.shard, ", tp ", layout.tp,
                ", ep ", layout.ep, ", etp ", layout.etp, ", cp ", layout.cp);
}

/// `words` as so many processes.
inline std::vector<std::string> in_layout(const ProcessLayout& layout,
                                          std::vector<std::string> words) {
  const auto degree = [&](const std::string& axis, int value) {
    words.push_back(concat("--parallelism.", axis, "_degree=", value));
  };
  words.push_back(concat("--nproc=", layout.ranks()));
  degree("data_parallel_replicate", layout.replicate);
  degree("data_parallel_shard", layout.shard);
  degree("tensor_parallel", layout.tp);
  degree("expert_parallel", layout.ep);
  degree("expert_tensor_parallel", layout.etp);
  degree("context_parallel", layout.cp);
  return words;
}

}  // namespace tessera::cli
