#include "train/planned_steps.h"

#include <torch/version.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "capture/measured_profile.h"
#include "capture/planner.h"
#include "capture/region_blocks.h"
#include "capture/replay/regions.h"
#include "capture/simulate_plan.h"
#include "comm/device.h"
#include "comm/group.h"
#include "fsdp/handle.h"
#include "io/atomic_file.h"
#include "launch/hosts.h"
#include "tessera/error.h"
#include "train/batch_memory.h"
#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/dry/plan_memory.h"
#include "train/expert_balance.h"
#include "train/plan_of_run.h"
#include "train/plan_of_step.h"
#include "train/report/observers.h"

namespace tessera::train {
namespace {

// The first step records, the second one fills pools and caches.
constexpr int kFirstMeasured = 3;
// The median counts: timings are noisy, and on a busy machine they differ by more than plans do.
constexpr std::size_t kMeasured = 3;
// Regions that are still recorded then are by each step, as bodies of many shapes are.
constexpr int kRecordedBefore = 20;

double bytes_of(at::Device device) {
  if (device.is_cpu()) return ram_bytes();
  const auto bytes = comm::memory_size(device);
  TESSERA_CHECK(bytes, ErrorKind::kConfig, "compile.memory_budget: found a share of the memory of ",
                device.str(), ", whose size libtorch does not say, expected bytes");
  return static_cast<double>(*bytes);
}

/// The same text on all ranks that have the same memory. Over NCCL each has a device of its own,
/// which launchers may show to all of them as cuda:0.
std::string memory_of(const World& world) {
  const std::string kernel = comm::running_kernel();
  if (world.device().is_cpu()) return kernel;
  return concat(kernel, " ", world.device().str(),
                world.backend() == "nccl" ? concat(" of rank ", world.rank()) : "");
}

}  // namespace

MachineMemory least_memory(World& world) {
  const auto all = comm::all_gather_bytes(
      world.control(),
      concat(static_cast<std::int64_t>(bytes_of(world.device())), " ", memory_of(world)),
      "memory of ranks");
  MachineMemory least;
  const auto where = [](const std::string& text) { return text.substr(text.find(' ')); };
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto ranks = static_cast<int>(std::ranges::count(all, where(all[i]), where));
    const double memory = std::stod(all[i]);
    if (i > 0 && memory / ranks >= least.memory / least.local_ranks) continue;
    least = {memory, ranks, world.device().is_cpu() ? "a host" : "a device"};
  }
  return least;
}

KernelsOf computes_on(const Config& config) {
  const bool has_cuda = config.device == DeviceName::kCuda ||
                        (config.device == DeviceName::kAuto && comm::cuda_devices() > 0);
  return has_cuda ? KernelsOf::kGpu : KernelsOf::kCpu;
}

MachineMemory memory_here(const Config& config, int ranks, const AskedMemory& asked) {
  if (asked.device_bytes) return {static_cast<double>(*asked.device_bytes), 1, "a device"};
  const auto& budget = config.compile.memory_budget;
  if (config.compile.mode == CompileChoice::kOff || !budget || budget->share == 0.0) return {};
  if (computes_on(config) == KernelsOf::kCpu) {
    return {ram_bytes(), std::min(ranks, asked.ranks_per_host.value_or(ranks))};
  }
  TESSERA_CHECK(comm::cuda_devices() > 0, ErrorKind::kConfig,
                "compile.memory_budget: found a share of the memory of cuda, of which no device is "
                "here, expected bytes; give them as a size (\"72GiB\"), or what a device has to "
                "--device-memory");
  return {bytes_of(at::Device(at::kCUDA, 0)), 1, "a device"};
}

BucketsOn buckets_here(const Config& config) {
  return computes_on(config) == KernelsOf::kGpu ? BucketsOn::kDevice : BucketsOn::kHost;
}

CompileOptions planned_options(const Config& config, const ModelSource& source,
                               const ParallelDims& dims, const ModelContract& contract,
                               std::int64_t micro_batches, World& world) {
  const auto& section = config.compile;
  if (section.mode == CompileChoice::kOff) return {};
  const auto where = world.device().is_cpu() ? BucketsOn::kHost : BucketsOn::kDevice;
  const auto buckets = plan_model(source.description, contract.parameters, mesh_shape(dims), where);
  const RunOfPlan run{.config = config,
                      .spec = source.spec,
                      .description = source.description,
                      .dims = dims,
                      .contract = contract,
                      .plan = buckets,
                      .aux_loss_coef = aux_loss_coef(config.model.aux_loss_coef, source.spec)};
  const bool of_memory = section.memory_budget && section.memory_budget->share > 0.0;
  // Nothing is recomputed to keep within no budget.
  const bool needs_memory = section.memory_budget || section.passes;
  const auto memory = needs_memory ? plan_memory(config, source, dims) : PlanMemory();
  auto options = compile_options(run, memory, of_memory ? least_memory(world) : MachineMemory());
  options.micro_batches = micro_batches;
  const auto planning = planning_of(options);
  if (planning.given) {
    auto expected = made_for(run, TORCH_VERSION);
    expected.micro_batches = micro_batches;
    require_made_for(*planning.given, expected, planning.plan_from);
  }
  static_cast<void>(first_plan(run, planning));  // refused before the first step
  return options;
}

PlannedSteps::PlannedSteps(CompileOptions options, const ShardedBase& model, World& world,
                           std::filesystem::path folder)
    : options_(std::move(options)), model_(model), world_(world), folder_(std::move(folder)) {
  is_chosen_ = !options_.plan.empty();
  compile(model_, options_);  // by assumed costs, until there are measured ones
}

PlannedSteps::~PlannedSteps() = default;

void PlannedSteps::begin_step() {
  // A step that somebody else looks at is not measured: the next one is.
  if (is_chosen_ || ++steps_ < kFirstMeasured || current_trace() != nullptr) return;
  auto traced = traced_step(world_);
  trace_ = std::move(traced.trace);
  through_ = std::move(traced.through);
  before_ = replay_calls(model_);
  here_.emplace(trace_);
  capture::take_region_blocks(model_);  // of this step only
  begin_ = trace_->now();
}

void PlannedSteps::end_step(std::int64_t step) {
  if (trace_ == nullptr) return;
  trace_->add({TraceRow::kCompute, concat("step ", step), begin_, trace_->now()});
  here_.reset();
  through_();
  measure(trace_->take());
  trace_.reset();
  is_chosen_ = measured_.size() == kMeasured;
  if (is_chosen_) choose(step);
}

void PlannedSteps::leave_out_step() {
  if (!is_chosen_) --steps_;
  if (trace_ == nullptr) return;
  here_.reset();
  through_();
  trace_.reset();
}

void PlannedSteps::measure(const std::vector<TraceSpan>& spans) {
  const auto recomputed = fsdp::followed_recompute(model_);
  auto mine = capture::measured_profile(spans, fsdp::plan_units(model_), options_.micro_batches,
                                        recomputed);
  capture::add_blocks(mine, capture::take_region_blocks(model_), recomputed);
  const bool counts = (replay_calls(model_) - before_).recorded == 0 || steps_ >= kRecordedBefore;
  std::vector<capture::PlanProfile> ranks;
  for (const auto& text :
       comm::all_gather_bytes(world_.control(), counts ? to_json(mine) : "", "profile of a step")) {
    if (text.empty()) return;
    ranks.push_back(capture::parse_profile(text, "profile of a rank"));
  }
  auto slowest = slowest_of(ranks);
  const auto plan = fsdp::followed_plan(model_);
  const bool is_simulated = plan != nullptr && plan->stages.size() == 1;
  measured_.push_back(is_simulated
                          ? capture::as_waited(std::move(slowest), *plan, options_.micro_batches)
                          : std::move(slowest));
}

void PlannedSteps::choose(std::int64_t step) {
  const auto middle = measured_.begin() + kMeasured / 2;
  std::ranges::nth_element(measured_, middle, {}, capture::computed_ms);
  options_.profile = to_json(*middle);
  compile(model_, options_);
  if (world_.rank() != 0) return;
  const auto path = folder_ / "profile.json";
  write_atomically(path, options_.profile);
  log::info("plan: step ", step + 1, " follows one that was chosen by what the ", kMeasured,
            " steps to step ", step, " took: ", path.string());
}

}  // namespace tessera::train
