// The report of a step: one JSON object in metrics.jsonl and one line on stdout; and the
// floating-point operations of training on one token, the usual estimate. Pure.
//
// Only rank 0 writes; the values are agreed over ranks before they come here. Everything else that
// the program says is a log line (base/log.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/appended_file.h"
#include "io/tensorboard.h"
#include "tessera/compile.h"

namespace tessera::train {

/// How uneven the experts of a layer were loaded in a step.
struct ExpertLoad {
  std::int64_t layer = 0;
  double max_over_mean = 0;  ///< tokens of the busiest expert over those of an average one
};

/// The part of one of several sources in a step.
struct SourceMetrics {
  double share = 0;  ///< of all rows so far
  /// The mean loss of its labels in this step; NaN where it has none.
  double loss = 0;
};

struct StepMetrics {
  /// From 1; step 0 is the validation before the first one, and has val_loss alone.
  std::int64_t step = 0;
  double loss = 0;       ///< before the update, nats; NaN in a step without an unmasked target
  double grad_norm = 0;  ///< before clipping; not finite in a step that a scaler left out
  double lr = 0;
  double step_ms = 0;  ///< the slowest rank's whole step
  /// Tokens a second and rank; NaN in a step without an unmasked target, as the two that follow and
  /// mfu.
  double tps = 0;
  double tps_global = 0;    ///< of all ranks
  double tflops = 0;        ///< a rank
  double peak_rss_mib = 0;  ///< the largest of all ranks
  /// Since the steps began, the largest of all ranks: what tensors of a device held at once, and
  /// what libtorch's allocator took of it, free blocks that it keeps included; none on the CPU.
  std::optional<double> peak_device_mib = std::nullopt;
  std::optional<double> peak_device_reserved_mib = std::nullopt;
  /// tflops over those that the device can do; NaN for an unknown device, none on the CPU.
  std::optional<double> mfu = std::nullopt;
  std::optional<double> val_loss = std::nullopt;
  /// How many steps had no unmasked target so far and were skipped, this one included; none before
  /// the first of them.
  std::optional<std::int64_t> steps_without_labels = std::nullopt;
  std::vector<SourceMetrics> sources = {};        ///< by their order; empty where there is one
  std::optional<double> loss_scale;               ///< of this step's gradients
  std::optional<std::int64_t> skipped_steps;      ///< so far, this one included
  std::optional<double> aux_loss = std::nullopt;  ///< of routers, before its weight
  std::vector<ExpertLoad> expert_loads = {};      ///< one a layer with experts
  /// How long exchanges of activations over tp and ep were under way in this step, on the rank that
  /// writes, and the part of that in which it did not stand waiting for one. None on a device, and
  /// where there are none.
  std::optional<double> exchange_ms = std::nullopt;
  std::optional<double> exchange_hidden_ms = std::nullopt;
  /// Calls of regions in this step, on the rank that writes; none where nothing is replayed.
  std::optional<ReplayCalls> regions = std::nullopt;
};

/// NaN where a step has none of it: TensorBoard's charts have no place for it.
std::vector<Scalar> without_nan(std::vector<Scalar> values);

/// 12345.6 -> "12,346", as torchtitan prints tokens a second.
std::string with_thousands(double value);

/// Every number under its name, without the step: the keys of metrics.jsonl, the tags of
/// TensorBoard.
std::vector<Scalar> named_values(const StepMetrics& metrics);

/// One JSON object without a newline, keys in the order above, and why calls were eager; a value
/// that is not finite is null.
std::string to_json_line(const StepMetrics& metrics);

/// The most columns of a step's line on stdout; metrics.jsonl has what does not fit.
inline constexpr std::size_t kStepLineColumns = 100;
/// A "-" stands for what a step without an unmasked target does not have:
/// "step:  1  loss:  8.0510  grad_norm:  1.5012  memory: 0.61GiB  tps: 12,345  lr: 1.00e-03".
std::string to_step_line(const StepMetrics& metrics);

/// metrics.jsonl of a run.
class MetricsFile {
 public:
  /// Creates `folder` and an empty metrics.jsonl in it; where `done` steps lie behind, one with
  /// their lines only (what was reported after the checkpoint is done again). Errors: kIo, also
  /// where the file is a link.
  explicit MetricsFile(const std::filesystem::path& folder, std::int64_t done = 0);
  /// `steps_without_labels` of the last line that was kept; 0 where it has none.
  std::int64_t steps_without_labels() const { return steps_without_labels_; }
  /// Appends one line and hands it to the system. Errors: kIo.
  void append(const StepMetrics& metrics);

 private:
  std::optional<AppendedFile> file_;
  std::int64_t steps_without_labels_ = 0;
};

struct ModelSize {
  std::int64_t active_parameters = 0;  ///< non-embedding, those that one token uses
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
};

/// 6 x active parameters (forward and backward of every product) + 12 x layers x heads x head_dim x
/// seq (attention scores and values). Source: Chowdhery and others, PaLM, appendix B.
double flops_per_token(const ModelSize& size, std::int64_t seq_len);

}  // namespace tessera::train
