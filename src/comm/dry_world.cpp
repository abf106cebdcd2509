#include "comm/dry_world.h"

#include <c10/core/AutogradState.h>

#include <optional>
#include <utility>

#include "base/text/printable.h"
#include "comm/host_read.h"
#include "comm/process_world.h"
#include "comm/queue.h"
#include "dry/fake_device.h"
#include "launch/abort_flag.h"
#include "launch/wait_board.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Restores what a thread has of its World when a dry one ends: a run may count steps while it is
/// in progress.
class ThreadOfWorld {
 public:
  ThreadOfWorld()
      : waits_(HostWaits::of_this_thread()),
        backward_has_threads_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) {}
  ~ThreadOfWorld() {
    HostWaits::attach(waits_);
    c10::AutogradState::get_tls_state().set_multithreading_enabled(backward_has_threads_);
  }
  ThreadOfWorld(const ThreadOfWorld&) = delete;
  ThreadOfWorld& operator=(const ThreadOfWorld&) = delete;

 private:
  const std::shared_ptr<HostWaits> waits_;
  const bool backward_has_threads_;
};

class DryWorld final : public World {
 public:
  DryWorld(int rank, int ranks, DryNotes notes, c10::Device device)
      : World(rank, ranks, 0, device, WorldOptions()), connections_(open_dry(std::move(notes))) {
    if (device.is_cpu()) return;
    before_.emplace();
    attach_thread();
  }
  ~DryWorld() override { stop_queue(); }

  std::string backend() const override { return "dry"; }
  void close() override {
    if (closed_.exchange(true)) return;
    queue_->close();
    state_->abort_flag->close();
  }
  void close_failed(const std::string& /*why*/) override { close(); }
  void abort_epoch(std::uint64_t /*epoch*/, const std::string& why) override {
    if (closed_) return;
    state_->abort_flag->mark(one_line(why));
    queue_->abort(one_line(why));
  }
  void recover() override {
    throw Error(ErrorKind::kUsage, "recover: found a dry run, expected ranks that run");
  }

 protected:
  std::shared_ptr<Group> make_group(const std::vector<int>& ranks, const std::string& name,
                                    const at::Device& where) override {
    return connections_->make_group(
        {name, ranks, rank_, where, options_, state_->store, state_->abort_flag, state_->board});
  }

 private:
  std::optional<ThreadOfWorld> before_;
  const WorldOptions options_;
  const std::unique_ptr<Connections> connections_;
};

}  // namespace

std::shared_ptr<World> dry_world(int rank, int ranks, DryNotes notes, KernelsOf kernels) {
  TESSERA_CHECK(ranks >= 1, ErrorKind::kUsage, "dry run: found ", ranks,
                " ranks, expected at least 1");
  TESSERA_CHECK(rank >= 0 && rank < ranks, ErrorKind::kUsage, "dry run: found rank ", rank,
                ", expected 0 to ", ranks - 1);
  const c10::Device device =
      kernels == KernelsOf::kCpu ? c10::Device(c10::kCPU) : dry::fake_device();
  return std::make_shared<DryWorld>(rank, ranks, std::move(notes), device);
}

}  // namespace tessera::comm
