// The lines of a run before its first step: what it is about to do, and what is most likely a
// mistake.
//
// Texts alone, of values that the trainer hands over; who prints them is rank 0. Pure. Next:
// progress.h for what is said while it runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/parallel_dims.h"
#include "tessera/contract.h"
#include "train/config/config.h"

namespace tessera::train {

/// The machine, as far as it matters for how fast a step is.
struct Processor {
  std::string isa;       ///< of the kernels: "avx512"
  bool has_bf16 = true;  ///< instructions that multiply bf16
  int threads = 1;       ///< of a rank
};

struct RunFacts {
  std::vector<GradContract> parameters;
  std::optional<std::int64_t> active;  ///< elements that work for a token, of a model with experts
  ParallelDims dims;
  std::int64_t rows = 0;        ///< of a step
  std::int64_t row_tokens = 0;  ///< that a row predicts
  std::int64_t rows_at_once = 0;
  std::int64_t first_step = 1;
  std::int64_t steps = 0;
  Processor processor;
  std::string device = {};  ///< where it computes: "cuda:0 (NVIDIA H200)"; "" = the CPU
  /// CUDA devices that are visible, where one rank runs since the command named no number; else 0.
  int devices_for_ranks = 0;
};

/// One line each, their values below each other: parameters, layout, tokens, dtypes, steps, and
/// where it computes: the device, of the CPU with its kernels.
std::vector<std::string> banner(const RunFacts& run);
/// A line of it that is said by itself: the run folder's, before what may take minutes.
std::string banner_line(const std::string& name, const std::string& value);

/// "10.7 M", "960", "1.2 B".
std::string short_count(std::int64_t count);

/// Parameters that compute in bfloat16 where its products are emulated; none where they are not.
/// Without them float32 is about 3.4 times as fast.
std::optional<std::string> slow_bf16(const std::vector<GradContract>& parameters,
                                     const Processor& processor);

/// Rows that are longer than what the model was made for.
std::optional<std::string> long_rows(std::int64_t row_tokens, std::int64_t positions,
                                     const ModelConfig& model);

/// The keys of the schedule that the run's steps leave no room for: a warm-up that is longer than
/// the run, a decay that is longer than what the warm-up leaves.
std::vector<std::string> short_run(const Config& config);

/// The keys that are set and that the run's optimizer does not have.
std::optional<std::string> unused_optimizer_keys(const OptimizerConfig& optimizer);

/// The keys of [compile] that are set and that the run's others leave without effect.
std::optional<std::string> unused_compile_keys(const CompileConfig& compile);

/// Describes how the learning rate continues where a run is resumed after step `done` with other
/// steps, schedule or lr than `before`; none where every later step has the rate that it would have
/// had. Both have steps and lr. `left_out` of these steps made no update.
std::optional<std::string> changed_lr(const Config& before, const Config& now, std::int64_t done,
                                      std::int64_t left_out = 0);

}  // namespace tessera::train
