// Whether a folder holds what its source does: both are read again, tensor by tensor in small
// parts, and compared bit by bit. What convert wrote, or has written once. Next: hf_export.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/dtype.h"
#include "train/hf/hf_export.h"

namespace tessera::train {

enum class Comparison : std::uint8_t {
  kEqual,  ///< the same bits in the same dtype
  kCast,   ///< in another dtype, each element rounded once (or widened) to it
  /// Another value, another shape, another dtype than was asked for, or missing on either side.
  kChanged,
};

struct ComparedTensor {
  std::string name;
  Comparison comparison = Comparison::kEqual;
  /// "bfloat16"; "float32 to bfloat16"; of a changed one what was found and expected.
  std::string says;
};

/// The tensors of the plan in its order, then those of `folder` that the plan does not have.
/// Errors: as HfFolder::open for `folder`; those of plan.read.
std::vector<ComparedTensor> compare_export(const ExportPlan& plan,
                                           const std::filesystem::path& folder);

std::string_view to_string(Comparison comparison);

}  // namespace tessera::train
