// Which keys the queries of attention see, and blocks of queries that are computed together: what no
// query of a block sees is never computed, so that cost falls with windows and documents.
//
// A query sees one run of keys: of all rows those up to its own position, of a window its last
// ones; where documents are packed into a row those from its document's first on, where images are
// read both ways those up to its image's last. Short symbols: B rows, T queries, N keys. Next:
// kernels.h, windowed_attention.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "layout/range.h"

namespace tessera::kernels {

inline constexpr std::int64_t kNoWindow = std::numeric_limits<std::int64_t>::max();

/// Query i, the last of N positions' queries being the last one, sees key j where begins[i] <= j,
/// i - window < j and j < ends[i].
struct SeenKeys {
  std::optional<at::Tensor> begins = std::nullopt;  ///< [B, T] i64; none = 0
  std::optional<at::Tensor> ends = std::nullopt;    ///< [B, T] i64; none = i + 1
  std::int64_t window = kNoWindow;
};

struct SeenBlock {
  layout::Range rows, queries;  ///< one row where they differ in what they see
  layout::Range keys;           ///< that any of the queries sees, and some that none does
};

struct SeenSizes {
  std::int64_t rows = 0, queries = 0, keys = 0;
  std::int64_t block = 0;  ///< queries of one
};

/// In the order of rows, then of queries. Where the host cannot read begins and ends (a device's) it
/// goes by positions and window alone.
std::vector<SeenBlock> seen_blocks(const SeenSizes& sizes, const SeenKeys& seen);

/// [B or 1, 1, Q, 1, n] bool, of a block: keys that a query does not see.
at::Tensor hidden_keys(const SeenBlock& block, const SeenSizes& sizes, const SeenKeys& seen,
                       const at::Device& device);

}  // namespace tessera::kernels
