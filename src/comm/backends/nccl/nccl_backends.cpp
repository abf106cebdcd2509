#include "comm/backends/nccl/nccl_backends.h"

#include <c10/core/GradMode.h>

#include <thread>
#include <utility>

#include "base/interrupt.h"
#include "base/log.h"
#include "base/text/printable.h"
#include "comm/device.h"
#include "launch/bounded_calls.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

// The failure watch names a collective that does not end. c10d's watchdog does not serve: it counts
// from the launch, though other work may be before it on the device, and knows of no start-up.
constexpr std::chrono::hours kNever{24 * 365};

}  // namespace

std::string error_of(c10d::ProcessGroupNCCL& backend) {
  if (backend.getError() == c10d::ErrorType::SUCCESS) return "";
  return "NCCL reports an error of its connections; a rank of it is lost, or the network fails";
}

NcclBackend NcclBackends::make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                               at::Device device, StreamUse own) {
  const bool is_of_higher_priority = own == StreamUse::kOtherRanks;
  auto options = c10d::ProcessGroupNCCL::Options::create(is_of_higher_priority);
  options->timeout = kNever;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
  backend->setBoundDeviceId(device);
  device_ = device;
  return made_.emplace_back(std::move(backend));
}

void NcclBackends::close(std::chrono::milliseconds patience) {
  if (made_.empty()) return;
  const auto call = [all = std::exchange(made_, {}), device = *device_] {
    use_device(device);
    for (const NcclBackend& backend : all) {
      try {
        backend->shutdown();
      } catch (const std::exception& error) {
        log::warn("nccl: a communicator did not end: ", one_line(error.what()));
      }
    }
    return true;
  };
  if (BoundedCalls().run(call, patience)) return;
  log::warn("nccl: communicators did not end within ", in_seconds(patience),
            ", for which all their ranks are needed; they end with the process");
}

void connect_in_time(const NcclPlace& place, const std::string& what,
                     std::function<void()> connect) {
  const AbortFlag& aborted = *place.channel.abort_flag;
  const auto call = [device = place.device, flag = place.channel.abort_flag,
                     connects = std::move(connect)] {
    use_device(device);
    const c10::AutoGradMode no_grad(false);
    connects();
    Event end;
    end.record(Stream::current(device), EventSite::kWorkEnd);
    while (!end.done() && !flag->is_set())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return true;
  };
  meet_on_board(*place.channel.board, [&] {
    try {
      base::InterruptTimer timer;
      const auto in_vain = [&] {
        aborted.ask_interrupt(timer);
        return aborted.is_set();
      };
      if (BoundedCalls().run(call, place.init_timeout, in_vain)) return;
    } catch (const std::exception& error) {
      if (base::handles_interrupt()) throw;
      aborted.acknowledge();
      throw LostRank(concat(what, ": ", one_line(error.what())));
    }
    aborted.check();
    const std::string works = aborted.patience.works_of(place.channel.members);
    throw LostRank(
        concat(what, ": waited ", in_seconds(place.init_timeout), " for NCCL to connect its ranks",
               works.empty() ? "; one of them is stalled, or cannot be reached" : works));
  });
}

}  // namespace tessera::comm
