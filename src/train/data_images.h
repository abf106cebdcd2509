// Images of a batch file: which of them belong to which rows.
//
// `pixel_values` [N,P,3*patch^2] and `image_position_ids` [N,P,2] serve every step of the file;
// `mm_token_type_ids` has the shape of the ids it stands beside. Image n belongs to the n-th run of
// type 1, row-major over the batch, and travels with its row, so the images of consecutive rows lie
// together. Everything is checked when the file is opened. Next: ../models/patch_grid.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "train/data.h"

namespace tessera::train {

/// Integers [begin, end) of a flattened i64 or i32 tensor, as i64.
at::Tensor read_integers(const SafetensorsFile& file, const TensorInfo& tensor, std::int64_t begin,
                         std::int64_t end);

/// Errors: kFormat unless it has integers of 32 or 64 bits.
void require_integers(const SafetensorsFile& file, const TensorInfo& tensor,
                      const std::string& name);
/// Errors: kFormat unless it has the shape of `ids`.
void require_shape_of(const SafetensorsFile& file, const TensorInfo& tensor,
                      const std::string& name, const TensorInfo& ids, const std::string& ids_name);

/// S, B, T of a batch file.
struct BatchSize {
  std::int64_t steps = 1;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

class ReplayedImages {
 public:
  /// none where the file has no pixel_values: text only. `ids` names the tensor of input ids.
  /// Errors: kFormat for tensors that are missing or of another shape, types that do not fit the
  /// ids, runs that do not fit the images; as models::patch_grid.
  static std::optional<ReplayedImages> open(const SafetensorsFile& file,
                                            const models::ImageTokens& tokens,
                                            const BatchSize& size, const std::string& ids);

  /// Adds the images and token types of the rows; `step_index` from 0.
  void load(std::int64_t step_index, RowRange rows, MicroBatch& batch) const;

 private:
  BatchSize size_;
  models::Images images_;
  at::Tensor token_types_;  // [S, B, T]
  /// [S * (B + 1)]: the first image of each row, and behind them N.
  std::vector<std::int64_t> first_image_;
};

}  // namespace tessera::train
