#include "train/observers.h"

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "base/terminal_line.h"
#include "io/atomic_file.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

// Steps before that fill caches and pools.
constexpr std::int64_t kWarmUpSteps = 3;

}  // namespace

Observers::Observers(const Config& config, World& world, std::int64_t first_step,
                     Profiling profiling)
    : config_(config),
      traces_(config.metrics.trace_steps, fs::path(config.metrics.folder) / "trace", world),
      profile_from_(std::min(first_step + kWarmUpSteps, *config.training.steps)) {
  if (world.rank() != 0) return;
  if (config.metrics.enable_tensorboard) {
    events_.emplace(fs::path(config.metrics.folder) / "tb", first_step);
  }
  if (profiling == Profiling::kYes) profile_ = std::make_unique<StepProfile>();
  progress_.emplace(first_step, *config.training.steps);
}

void Observers::begin_step(std::int64_t step) {
  traces_.begin_step(step);
  if (profile_ && step >= profile_from_) profile_->begin_step();
}

void Observers::end_step(std::int64_t step) {
  if (profile_ && step >= profile_from_) profile_->end_step();
  traces_.end_step(step);
}

void Observers::report(const StepMetrics& metrics) {
  if (events_) events_->append(metrics.step, named_values(metrics));
  if (progress_) progress_->show(metrics);
}

void Observers::finish() {
  terminal_line::clear();
  if (!profile_) return;
  std::cerr << profile_->to_table();
  const auto path = fs::path(*config_.job.dump_folder) / "profile.json";
  write_atomically(path, profile_->to_json() + "\n");
}

}  // namespace tessera::train
