#include "train/planned_steps.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.h"
#include "io/atomic_file.h"
#include "capture/measured_profile.h"
#include "comm/group.h"
#include "fsdp/handle.h"
#include "tessera/error.h"
#include "train/report/observers.h"

namespace tessera::train {
namespace {

// Of those before it the first one records, the second one fills pools and caches.
constexpr int kMeasured = 3;

}  // namespace

PlannedSteps::PlannedSteps(CompileOptions options, const ShardedBase& model, World& world,
                           std::filesystem::path folder)
    : options_(std::move(options)), model_(model), world_(world), folder_(std::move(folder)) {
  is_chosen_ = options_.mode == CompileMode::kOff || !options_.plan.empty();
  if (is_chosen_) compile(model_, options_);
}

PlannedSteps::~PlannedSteps() = default;

void PlannedSteps::begin_step() {
  // A step that somebody else looks at is not measured: the next one is.
  if (is_chosen_ || ++steps_ < kMeasured || current_trace() != nullptr) return;
  auto traced = traced_step(world_);
  trace_ = std::move(traced.trace);
  through_ = std::move(traced.through);
  here_.emplace(trace_);
}

void PlannedSteps::end_step(std::int64_t step) {
  if (trace_ == nullptr) return;
  here_.reset();
  through_();
  choose(trace_->take(), step);
  trace_.reset();
  is_chosen_ = true;
}

void PlannedSteps::choose(const std::vector<TraceSpan>& spans, std::int64_t step) {
  const auto mine =
      capture::measured_profile(spans, fsdp::plan_units(model_), options_.micro_batches);
  std::vector<capture::PlanProfile> ranks;
  for (const auto& text :
       comm::all_gather_bytes(world_.control(), to_json(mine), "profile of a step")) {
    ranks.push_back(capture::parse_profile(text, "profile of a rank"));
  }
  options_.profile = to_json(most_of(ranks));
  compile(model_, options_);
  if (world_.rank() != 0) return;
  const auto path = folder_ / "profile.json";
  write_atomically(path, options_.profile);
  log::info("plan: step ", step + 1, " follows one that was chosen by what step ", step,
            " took: ", path.string());
}

}  // namespace tessera::train
