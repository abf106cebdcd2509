// Report: what `tessera check` says of a run, as a value: findings, what it takes and sends, how
// long a step is.
//
// Pure. Text and page are made from it alone. Next: finding.h, ../train/check/check_run.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "check/finding.h"

namespace tessera::check {

struct NamedBytes {
  std::string what = {};  ///< "parameters"
  std::int64_t bytes = 0;
};

/// Bytes that a rank sends in a step.
struct SentBytes {
  std::string axis = {};  ///< "dp", "tp", "ep", "pp"
  std::string what = {};  ///< "gathers of parameters"
  std::int64_t bytes = 0;
};

/// One forward or backward of a unit in the second step: what the rank holds in addition to its
/// pool.
struct HeldInPass {
  std::string unit = {};
  bool is_forward = true;
  std::int64_t before = 0;
  std::int64_t most = 0;
  std::int64_t after = 0;
};

/// A rank of one place of the pipeline; there is one place where there is no pipeline.
struct Place {
  int pp = 0;
  int rank = 0;
  std::vector<NamedBytes> held = {};  ///< independent of the batch, then "activations"
  std::int64_t peak = 0;              ///< the most of a step, all counted
  std::vector<HeldInPass> passes = {};
  std::vector<SentBytes> sent = {};
};

/// A forecast by the rates of a machine, in milliseconds.
struct StepTime {
  std::string by = {};  ///< "h100", "--flops and --bandwidth"
  double step_ms = 0.0;
  double compute_ms = 0.0;
  double again_ms = 0.0;              ///< part of compute_ms that recomputes activations
  double waited_ms = 0.0;             ///< for gathers and reductions
  double rest_ms = 0.0;               ///< other messages, as if none of them were hidden
  std::optional<double> bubble = {};  ///< the share of a step in which ranks of a pipeline wait
};

struct Report {
  std::string model = {};   ///< its path or configuration
  std::string layout = {};  ///< to_string(MeshShapes)
  int world = 1;
  std::vector<Finding> findings = {};
  /// Lines on what is right and worth knowing: sums that round early because the policy says so.
  std::vector<std::string> notes = {};
  std::vector<std::string> compared = {};  ///< what was looked at, a line each
  std::vector<Place> places = {};
  bool knows_tokens = true;  ///< training.seq_len is known: activations and messages are counted
  std::optional<std::int64_t> memory = {};  ///< that a rank has
  std::string memory_from = {};             ///< "--device-memory"
  std::optional<StepTime> time = {};
  std::string schedule = {};  ///< SVG of a pipeline's step; empty: there is none
};

/// Said of memory where a row's length is not known.
inline constexpr const char* kWithoutActivations = ", without activations (set training.seq_len)";

/// Findings first, totals, then tables; lines of at most 100 columns but for names.
std::string to_string(const Report& report);

}  // namespace tessera::check
