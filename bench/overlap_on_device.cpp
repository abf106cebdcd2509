// One rank of two, alone on a device: what pipeline.overlap hides of exchanges that take their time
// there. For bench/overlap_on_device.py, which says how.
//
//   build/release/bench/overlap_on_device DEVICE DELAY_MS WARM_UP CONFIG.toml
//
// One card has no second NCCL rank. So the other rank does not exist: what comes from it is what this
// one has sent, as in a dry World, but with values, on the group's stream, and every all-to-all (of
// experts' ranks) is behind a copy to pinned memory that takes DELAY_MS, which no kernel computes.
// DEVICE is cuda, cuda:N or cpu (nothing takes longer there). Prints a line of JSON: step times in ms
// behind the first WARM_UP steps, the losses, and the most bytes of the device's memory in these steps.
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "comm/backends/dry/dry.h"
#include "comm/device.h"
#include "comm/host_read.h"
#include "comm/process_world.h"
#include "comm/queue.h"
#include "tessera/error.h"
#include "train/config/config.h"
#include "train/config/config_resolve.h"
#include "train/trainer.h"

namespace tessera {
namespace {

using comm::Event;
using comm::EventSite;
using comm::Stream;

/// Something that keeps a stream busy for a while and leaves the device's kernels alone: a copy to the
/// host.
class Delay {
 public:
  Delay(at::Device device, double ms) {
    if (device.is_cpu() || ms <= 0) return;
    // What does not measure time (the simulated device) is not asked for it.
    constexpr std::int64_t kProbe = std::int64_t{64} << 20, kUntimed = 1 << 16;
    allocate(device, device.is_cuda() ? kProbe : kUntimed);
    if (!device.is_cuda()) return;
    launch_and_wait(device, 1);
    constexpr int kTimes = 8;
    const double ms_of_probe = launch_and_wait(device, kTimes) / kTimes;
    allocate(device, std::llround(static_cast<double>(kProbe) * ms / ms_of_probe));
  }

  /// Behind what was launched on the current stream.
  void launch() const {
    if (!from_.defined()) return;
    const c10::AutoGradMode no_grad(false);
    at::Tensor to = to_;
    to.copy_(from_, /*non_blocking=*/true);
  }

 private:
  void allocate(at::Device device, std::int64_t bytes) {
    const at::TensorOptions options(at::kByte);
    from_ = at::empty({bytes}, options.device(device));
    to_ = at::empty({bytes}, options.pinned_memory(true));
  }
  double launch_and_wait(at::Device device, int times) const {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i) launch();
    Event end;
    end.record(Stream::current(device), EventSite::kHostRead);
    comm::wait_on_host(end, "a delay");
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
        .count();
  }

  at::Tensor from_, to_;
};

class LoopWork final : public comm::Work {
 public:
  LoopWork(std::unique_ptr<comm::Work> alike, Event end, at::Device device)
      : alike_(std::move(alike)), end_(std::move(end)), device_(device) {}
  ~LoopWork() override {
    try {
      end_.block(Stream::current(device_), EventSite::kWorkEnd);
    } catch (...) {
      // A device that no longer answers.
    }
  }
  void wait() override {
    end_.block(Stream::current(device_), EventSite::kWorkEnd);
    alike_->wait();  // lets go of the tensors
  }

 private:
  const std::unique_ptr<comm::Work> alike_;
  const Event end_;
  const at::Device device_;
};

/// A dry group whose collectives are launched on a stream.
class LoopGroup final : public comm::Group {
 public:
  LoopGroup(std::shared_ptr<comm::Group> alike, at::Device device,
            std::shared_ptr<const Delay> delay)
      : alike_(std::move(alike)), device_(device), delay_(std::move(delay)) {}
  int rank() const override { return alike_->rank(); }
  int size() const override { return alike_->size(); }
  const std::string& name() const override { return alike_->name(); }
  bool is_dry() const override { return true; }
  comm::P2P& p2p() override { return alike_->p2p(); }

 private:
  std::unique_ptr<comm::Work> start(comm::Batch batch) override {
    if (batch.label.kind == comm::Kind::kAllToAll) delay_->launch();
    auto alike = alike_->issue(std::move(batch));
    Event end;
    end.record(stream(), EventSite::kWorkEnd);
    return std::make_unique<LoopWork>(std::move(alike), std::move(end), device_);
  }

  const std::shared_ptr<comm::Group> alike_;
  const at::Device device_;
  const std::shared_ptr<const Delay> delay_;
};

class LoopWorld final : public World {
 public:
  static constexpr int kRanks = 2;

  LoopWorld(const WorldOptions& options, double delay_ms)
      : World(0, kRanks, 0, options), connections_(comm::open_dry({})) {
    attach_thread();
    delay_ = std::make_shared<Delay>(device(), delay_ms);
  }
  ~LoopWorld() override { stop_queue(); }

  std::string backend() const override { return "loop"; }
  void close() override {
    if (closed_.exchange(true)) return;
    queue_->close();
    state_->abort_flag->close();
  }
  void close_failed(const std::string& /*why*/) override { close(); }
  void abort_epoch(std::uint64_t /*epoch*/, const std::string& why) override {
    if (closed_) return;
    state_->abort_flag->mark(why);
    queue_->abort(why);
  }
  void recover() override {
    throw Error(ErrorKind::kUsage, "recover: found one rank that stands for two");
  }

 protected:
  std::shared_ptr<comm::Group> make_group(const std::vector<int>& ranks, const std::string& name,
                                          const at::Device& where) override {
    return std::make_shared<LoopGroup>(
        connections_->make_group({name, ranks, rank_, where, options_, state_->store,
                                  state_->abort_flag, state_->board}),
        where, delay_);
  }

 private:
  const WorldOptions options_;
  const std::unique_ptr<comm::Connections> connections_;
  std::shared_ptr<const Delay> delay_;
};

void measure(const std::shared_ptr<World>& world, const std::string& path, int warm_up) {
  const auto read = train::load_config(path);
  const auto config = train::resolved_for_run(read, read.job.dump_folder.value());
  nlohmann::json found{{"step_ms", nlohmann::json::array()}, {"loss", nlohmann::json::array()}};
  train::TrainingHooks hooks;
  hooks.after_step = [&](const train::StepMetrics& metrics, const ShardedBase&) {
    found["loss"].push_back(metrics.loss);
    if (metrics.step > warm_up) found["step_ms"].push_back(metrics.step_ms);
    const bool is_cpu = world->device().is_cpu();
    if (!is_cpu && metrics.step == warm_up) comm::begin_memory_peaks(world->device());
    found["peak_bytes"] = is_cpu ? 0 : comm::memory_of(world->device()).peak;
  };
  train::run_training(config, *world, hooks);
  std::puts(found.dump().c_str());
}

}  // namespace
}  // namespace tessera

int main(int count, char** arguments) {
  if (count != 5) {
    std::fputs("overlap_on_device: expected DEVICE DELAY_MS WARM_UP CONFIG.toml\n", stderr);
    return 2;
  }
  try {
    tessera::WorldOptions options;
    options.device = arguments[1];
    if (options.device != "cpu") tessera::comm::prepare_growing_segments();
    const auto world = std::make_shared<tessera::LoopWorld>(options, std::atof(arguments[2]));
    tessera::measure(world, arguments[4], std::atoi(arguments[3]));
    world->close();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "overlap_on_device: %s\n", error.what());
    return 1;
  }
  return 0;
}
