// Batches that a .safetensors file holds ready-made, replayed in order.
//
// `input_ids` and `labels` are [S,B,T] (S steps, then from the first again) or [B,T] (one batch),
// labels as Hugging Face has them: position t predicts labels[t+1]. Tensors that nothing reads are
// named once.
//
// Images: `pixel_values` [N,P,3*patch^2] and `image_position_ids` [N,P,2] serve every step of the
// file; `mm_token_type_ids` has the shape of its ids. Image n belongs to the n-th
// run of type 1, row-major over the batch, and travels with its row, so the images of consecutive
// rows lie together. Shapes, and where there are images which are whose, are checked when the file
// is opened; ids and labels where they are read. Next: models/patch_grid.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "train/data/data.h"

namespace tessera::train {

/// Integers [begin, end) of a flattened i64 or i32 tensor, as i64.
at::Tensor read_integers(const SafetensorsFile& file, const TensorInfo& tensor, std::int64_t begin,
                         std::int64_t end);

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

/// Whether `steps/input_ids` is taken where the file has it.
enum class StepsPrefix : std::uint8_t { kPreferred, kIgnored };

class ReplayedBatches final : public BatchSource {
 public:
  ReplayedBatches(const std::string& path, StepsPrefix prefix, const Vocabulary& vocabulary);

  std::int64_t steps() const { return steps_; }
  std::int64_t rows_in_step() const override { return rows_; }
  std::int64_t row_tokens() const override { return columns_; }
  MicroBatch load(std::int64_t step, RowRange rows) const override;
  std::int64_t rows_in_pass() const override { return steps_ * rows_; }
  void check_labels(std::int64_t steps) override;
  std::vector<std::string> opened_from() const override;
  /// From now on micro-batches impose the file's routing. One step only. Errors: kFormat where the
  /// file has none, or another shape.
  void impose(const RoutingWanted& routing);

 private:
  /// Tensors of the file that no verb reads of a model with or without images: one warning.
  void warn_of_others(bool images) const;
  const TensorInfo& find(const std::string& name) const;
  at::Tensor read(const TensorInfo& tensor, std::int64_t step_index, RowRange rows) const;
  void check_shapes();
  /// Which rows were read, in the step of the file, from 0.
  struct Rows {
    std::int64_t step_index = 0;
    RowRange rows;
  };
  /// Errors: kFormat naming the place of an id or a label outside the vocabulary.
  void check_values(const Rows& of, const at::Tensor& ids, const at::Tensor& labels) const;

  SafetensorsFile file_;
  Vocabulary vocabulary_;
  std::optional<ReplayedImages> images_;
  std::optional<RoutingWanted> routing_;
  std::string input_name_;
  std::string label_name_;
  std::int64_t steps_ = 1;    // S
  std::int64_t rows_ = 0;     // B
  std::int64_t columns_ = 0;  // T
};

/// The batches of data.path, one file. Errors: as open_batches.
std::unique_ptr<BatchSource> open_replay(const BatchRequest& request);

}  // namespace tessera::train
