// `tessera gradients --diff`: two ways to compute the gradients of one batch, compared, and where
// the wrong one begins.
//
// Both are run on threads of this process as their configurations have them. Where they part, each
// is run in float32 and on one rank, so that a wrong layout is told apart from rounding and the
// first transition, unit and parameter are named. Files are compared alone. Next: compare_runs.h,
// ../../check/gradient_diff.h.
#pragma once

#include <filesystem>
#include <string>

#include "check/gradient_diff.h"
#include "train/config/config.h"

namespace tessera::train {

/// One side: a configuration whose model.path is set.
struct DiffSide {
  std::string name;  ///< in messages
  Config config;
};

/// `batch`: .safetensors with input_ids and labels. Errors: as run_gradients; kUsage for rows that
/// the data ranks do not divide; kConfig for lora.dropout; kFormat for two models that have other
/// parameters.
check::GradientDiff diff_runs(const DiffSide& a, const DiffSide& b, const std::string& batch);

/// Files that `tessera gradients` wrote. Errors: kIo; kFormat for what is no such file, for one
/// without a gradient, and for two models that have other parameters.
check::GradientDiff diff_files(const std::string& a, const std::string& b);

}  // namespace tessera::train
