// The batches of a dry step: rows of one token, with the images that the data's header says.
//
// A model that sees images steps its tower where data.path is a .safetensors file that has
// pixel_values. Only the header is read, so that how many images and patches there are is known,
// and not whose they are: each row has as many as every other, and all patches are real where the
// row has room for their soft tokens. A row is one document, also where the data packs several, so
// that ranks that share rows reach and send what a causal mask, a window or a chunk asks for: as
// much as packed rows at most. Next: dry_step.h, ../data/data_replay.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/parallel_dims.h"
#include "models/spec_parts.h"
#include "train/config/config.h"
#include "train/data/data.h"
#include "train/hf/model_source.h"

namespace tessera::train {

/// The sizes in the header of a batch file: S, B, T, and N and P of images.
struct DataHeader {
  std::int64_t steps = 1, rows = 0, columns = 0;
  std::int64_t images = 0;   ///< of the rows of one step
  std::int64_t patches = 0;  ///< of an image, padding included
};

/// None where data.path is no .safetensors file, or is not there. Errors: kFormat for a malformed
/// header, for input_ids or pixel_values of another shape than training reads.
std::optional<DataHeader> read_data_header(const Config& config, const ModelSource& source);

/// Checks the rows of .safetensors files of data.path and validation.path that are there, as
/// training does. Errors: as read_data_header(), check_positions() and check_learned_positions().
void check_rows_of_files(const Config& config, const ModelSource& source);

/// training.seq_len and global_batch_size, where they are left out, as the data's header has them:
/// as many rows as a step of the rank with most rows has on all data ranks. Errors: as
/// check_rows_of_files().
Config with_rows_of_data(Config config, const ModelSource& source, const ParallelDims& dims);

/// "2 images of 36 patches in 2 rows, by the header of data.path", or why there are none; empty
/// for a model that sees no images.
std::string images_text(const Config& config, const ModelSource& source);

/// Rows whose labels all count. Tensors are as large as those of ReplayedBatches.
class DryBatches final : public BatchSource {
 public:
  /// `positions` of a row. Errors: as read_data_header(), check_positions() and
  /// check_learned_positions(); kConfig for rows too short for their images, and for rows of more
  /// chunks of attention than are gone through.
  DryBatches(const Config& config, const ModelSource& source, std::int64_t rows,
             std::int64_t positions);
  std::int64_t rows_in_step() const override { return rows_; }
  std::int64_t row_tokens() const override { return positions_; }
  MicroBatch load(std::int64_t step, RowRange rows) const override;
  std::int64_t rows_in_pass() const override { return rows_; }
  void check_labels(std::int64_t /*steps*/) override {}
  std::vector<std::string> opened_from() const override { return {}; }

 private:
  struct InRows {
    DataHeader header;
    models::ImageTokens tokens;
    std::int64_t width = 0, height = 0;  ///< of an image, in soft tokens
    models::Images all = {};             ///< of a step
    at::Tensor token_types = {};         ///< [S, B, T]
  };
  /// Number of the first image of a row.
  std::int64_t first_image(std::int64_t row) const;
  void make_images();

  const std::int64_t rows_, positions_;
  std::optional<InRows> images_;
};

}  // namespace tessera::train
