// SeenKeys: which keys the queries of attention see. seen_blocks() divides the queries into blocks
// that are computed together: what no query of a block sees is never computed, so cost falls with
// windows and documents.
//
// A query sees one run of keys: those up to its own position; with a window the last ones of these;
// where documents are packed into a row those from its document's first on; where images are read
// both ways those up to its image's last. Short symbols: B rows, T queries, N keys. Next:
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

/// Where rows are packed the keys of products begin at multiples of this, so that documents of any
/// length make few sizes of products: oneDNN makes a program for each size.
inline constexpr std::int64_t kFirstKeys = 32;

/// Query i, counted as a position among the keys, sees key j where begins[i] <= j, i - window < j
/// and j < ends[i].
struct SeenKeys {
  std::optional<at::Tensor> begins = std::nullopt;  ///< [B, T] i64; none = 0
  std::optional<at::Tensor> ends = std::nullopt;    ///< [B, T] i64; none = i + 1
  std::int64_t window = kNoWindow;
};

struct SeenBlock {
  layout::Range rows, queries;  ///< one row where rows differ in what they see
  layout::Range keys;           ///< those that any of the queries sees, and some that none does
};

struct SeenSizes {
  std::int64_t rows = 0, queries = 0, keys = 0;
  std::int64_t first = 0;  ///< position of the first query among the keys
  std::int64_t block = 0;  ///< number of queries in a block
};

/// Returns blocks in the order of rows, then of queries. Where the host cannot read begins and ends
/// (on a device) it uses only positions and window.
std::vector<SeenBlock> seen_blocks(const SeenSizes& sizes, const SeenKeys& seen);

/// Returns the keys that a query of the block does not see, [B or 1, 1, Q, 1, n] bool.
at::Tensor hidden_keys(const SeenBlock& block, const SeenSizes& sizes, const SeenKeys& seen,
                       const at::Device& device);

}  // namespace tessera::kernels
