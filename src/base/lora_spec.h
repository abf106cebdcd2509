// Low-rank adapters as values: what a configuration asks for, and what a model then has. All
// libraries use these two records: modules are made from the second, and a checkpoint keeps it.
//
// Pure. Next: ../models/adapters.h, which makes the second from the first.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/error.h"

namespace tessera {

struct LoraRequest {
  std::int64_t rank = 0;             ///< 0 = no adapters
  std::optional<double> alpha = {};  ///< none = rank
  /// Patterns: linear layers by the end of their names.
  std::vector<std::string> targets = {};
  double dropout = 0.0;
  bool operator==(const LoraRequest&) const = default;
};

/// Errors: kConfig for a rank without targets.
inline void check_targets(const LoraRequest& request) {
  TESSERA_CHECK(request.rank == 0 || !request.targets.empty(), ErrorKind::kConfig,
                "lora.targets: found nothing, expected the linear layers that get an adapter, as "
                "[\"q_proj\", \"v_proj\"]");
}

struct LoraSpec {
  std::int64_t rank = 0;  ///< 0 = no adapters
  double alpha = 0.0;
  double dropout = 0.0;
  std::vector<std::string> layers = {};  ///< names of the linear layers, in the model's order

  explicit operator bool() const { return rank > 0; }
  double scale() const { return alpha / static_cast<double>(rank); }
  bool operator==(const LoraSpec&) const = default;
};

}  // namespace tessera
