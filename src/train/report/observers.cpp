#include "train/report/observers.h"

#include <c10/core/Event.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/trace.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "comm/stream.h"
#include "io/atomic_file.h"
#include "launch/hosts.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

std::int64_t nanoseconds(TraceClock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

/// A moment that all ranks agree on, by their own clocks: rank 0's end of a barrier. A rank with
/// another clock takes its own end of the barrier, which is later or earlier by a message's way.
TraceClock::time_point agreed_moment(World& world) {
  comm::barrier(world.control(), "clocks of a trace");
  const auto mine = TraceClock::now();
  const std::string name = comm::running_kernel();  // they share the steady clock
  const auto all = comm::all_gather_bytes(world.control(), concat(nanoseconds(mine), " ", name),
                                          "clocks of a trace");
  const std::string& first = all.front();
  const std::size_t space = first.find(' ');
  if (name.empty() || first.substr(space + 1) != name) return mine;
  return TraceClock::time_point(std::chrono::nanoseconds(std::stoll(first.substr(0, space))));
}

/// Moments of the stream on which the thread computes.
class StreamMoments final : public DeviceMoments {
 public:
  /// The host waits until the device has nothing left: from then on both clocks run together.
  explicit StreamMoments(at::Device device) : device_(device), first_(made()) {
    wait();
    first_.record(stream());
    wait();
    begin_ = TraceClock::now();
  }

  void mark(TraceClock::time_point host) override {
    marks_.emplace(host, made()).first->second.record(stream());
  }
  TraceClock::time_point found(TraceClock::time_point host) const override {
    const auto mark = marks_.find(host);
    if (mark == marks_.end() || !mark->second.query()) return host;
    const std::chrono::duration<double, std::milli> later(first_.elapsedTime(mark->second));
    return begin_ + std::chrono::duration_cast<TraceClock::duration>(later);
  }
  /// Until the device is through with the thread's stream.
  void wait() const {
    comm::Event end;
    end.record(comm::Stream::current(device_), comm::EventSite::kHostRead);
    comm::wait_on_host(end, "trace of a step");
  }

 private:
  c10::Event made() const { return {device_.type(), c10::EventFlag::BACKEND_DEFAULT}; }
  c10::Stream stream() const { return comm::Stream::current(device_).get(); }

  at::Device device_;
  c10::Event first_;
  TraceClock::time_point begin_;
  std::map<TraceClock::time_point, c10::Event> marks_;
};

void write(const std::filesystem::path& path, const std::string& text) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  TESSERA_CHECK(!error, ErrorKind::kIo, path.parent_path().string(), ": cannot be made (",
                error.message(), ")");
  write_atomically(path, text);
}

}  // namespace

TracedStep traced_step(const World& world) {
  std::unique_ptr<StreamMoments> device;
  if (!world.device().is_cpu()) device = std::make_unique<StreamMoments>(world.device());
  auto through = [moments = device.get()] {
    if (moments != nullptr) moments->wait();
  };
  return {std::make_shared<Trace>(std::move(device)), std::move(through)};
}

StepTrace::StepTrace(std::vector<std::int64_t> steps, std::filesystem::path folder, World& world)
    : steps_(std::move(steps)), folder_(std::move(folder)), world_(world) {}

bool StepTrace::is_chosen(std::int64_t step) const {
  return std::find(steps_.begin(), steps_.end(), step) != steps_.end();
}

void StepTrace::begin_step(std::int64_t step) {
  if (!is_chosen(step)) return;
  origin_ = agreed_moment(world_);
  auto traced = traced_step(world_);
  trace_ = std::move(traced.trace);
  through_ = std::move(traced.through);
  here_.emplace(trace_);
  begin_ = trace_->now();
}

void StepTrace::end_step(std::int64_t step) {
  if (trace_ == nullptr) return;
  trace_->add({TraceRow::kCompute, concat("step ", step), begin_, trace_->now()});
  here_.reset();
  through_();
  const auto events = chrome_events(trace_->take(), world_.rank(), origin_);
  trace_.reset();
  const auto all = comm::all_gather_bytes(world_.control(), events, "trace");
  if (world_.rank() != 0) return;
  const auto path = folder_ / concat("step-", step, ".json");
  write(path, chrome_trace(all));
  log::info("trace of step ", step, ": ", path.string(), " (open it at ui.perfetto.dev)");
}

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
  if (profiling == Profiling::kYes) profile_ = std::make_unique<StepProfile>(world.device());
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
  if (events_) events_->append(metrics.step, without_nan(named_values(metrics)));
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
