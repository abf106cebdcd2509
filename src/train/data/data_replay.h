// Batches that a .safetensors file holds ready-made, replayed in order.
//
// `input_ids` and `labels` are [S,B,T] (S steps, then from the first again) or [B,T] (one batch),
// labels as Hugging Face has them: position t predicts labels[t+1]. Tensors that nothing reads are
// named once. Next: data_images.h.
#pragma once

#include <optional>
#include <string>

#include "io/safetensors.h"
#include "train/data/data.h"
#include "train/data/data_images.h"

namespace tessera::train {

/// Whether `steps/input_ids` is taken where the file has it.
enum class StepsPrefix : std::uint8_t { kPreferred, kIgnored };

class ReplayedBatches final : public BatchSource {
 public:
  ReplayedBatches(const std::string& path, StepsPrefix prefix, const Vocabulary& vocabulary);

  std::int64_t steps() const { return steps_; }
  std::int64_t rows_in_step() const override { return rows_; }
  std::int64_t row_tokens() const override { return columns_; }
  MicroBatch load(std::int64_t step, RowRange rows) const override;
  /// From now on micro-batches impose the file's routing. One step only. Errors: kFormat where the
  /// file has none, or another shape.
  void impose(const RoutingWanted& routing);

 private:
  /// Tensors of the file that no verb reads of a model with or without images: one warning.
  void warn_of_others(bool images) const;
  const TensorInfo& find(const std::string& name) const;
  at::Tensor read(const TensorInfo& tensor, std::int64_t step_index, RowRange rows) const;
  void check_shapes();
  void check_values(const Vocabulary& vocabulary) const;

  SafetensorsFile file_;
  std::optional<ReplayedImages> images_;
  std::optional<RoutingWanted> routing_;
  std::string input_name_;
  std::string label_name_;
  std::int64_t steps_ = 1;    // S
  std::int64_t rows_ = 0;     // B
  std::int64_t columns_ = 0;  // T
};

}  // namespace tessera::train
