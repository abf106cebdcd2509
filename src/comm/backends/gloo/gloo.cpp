#include "comm/backends/gloo/gloo.h"

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <charconv>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/environment.h"
#include "base/interrupt.h"
#include "base/text/printable.h"
#include "comm/backends/gloo/point_to_point.h"
#include "comm/backends/gloo/staged.h"
#include "launch/abort_flag.h"
#include "launch/bounded_calls.h"
#include "launch/failure_watch.h"
#include "launch/hosts.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

// Gloo throws an error at its timeout. Ours follows after this margin, where Gloo throws none.
constexpr std::chrono::milliseconds kGroupMargin{1000};

std::string address_for(const LaunchEnvironment& launch) {
  if (reach(launch) == Reach::kThisHost) return "127.0.0.1";
  std::string address = local_address_towards(launch.master_addr);
  require_network_address(launch, address);
  return address;
}

std::shared_ptr<gloo::transport::Device> make_device(const LaunchEnvironment& launch) {
  using c10d::ProcessGroupGloo;
  const auto interfaces = base::environment_variable("GLOO_SOCKET_IFNAME").value_or("");
  const std::string interface = interfaces.substr(0, interfaces.find(','));
  try {
    if (!interface.empty()) return ProcessGroupGloo::createDeviceForInterface(interface);
    return ProcessGroupGloo::createDeviceForHostname(address_for(launch));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(
        ErrorKind::kComm,
        concat("gloo: cannot listen", interface.empty() ? "" : " on interface ", interface, ": ",
               one_line(error.what()), "; set GLOO_SOCKET_IFNAME to a network interface"));
  }
}

// [Note: Gloo's thread] A rank's thread holds its connection's lock while it writes, and on a
// loopback the kernel delivers the bytes within that write. A Gloo thread that the bytes wake may
// take the writer's core; it then finds that lock held, and asks for it again and again until the
// scheduler's next tick (4 ms at 250 Hz, for messages of 50 us). So Gloo's thread has SCHED_BATCH:
// when it is woken it takes a free core or waits until one is free, and takes none from a running
// thread.

/// Gives SCHED_BATCH to threads that this thread makes meanwhile, unless it has a policy of its
/// own.
class MakesBatchThreads {
 public:
  MakesBatchThreads() {
    if (::sched_getscheduler(0) != SCHED_OTHER) return;
    const sched_param none{};
    is_changed_ = ::sched_setscheduler(0, SCHED_BATCH, &none) == 0;  // else it is slower, not wrong
  }
  ~MakesBatchThreads() {
    const sched_param none{};
    if (is_changed_) ::sched_setscheduler(0, SCHED_OTHER, &none);
  }
  MakesBatchThreads(const MakesBatchThreads&) = delete;
  MakesBatchThreads& operator=(const MakesBatchThreads&) = delete;

 private:
  bool is_changed_ = false;
};

/// Returns the rank with which a key of Gloo ends, the one that writes it; -1: another kind of key.
int rank_in(const std::string& key, int size) {
  const auto begin = key.find_last_not_of("0123456789") + 1;
  int rank = -1;
  const auto* end = key.data() + key.size();
  const auto [stop, error] = std::from_chars(key.data() + begin, end, rank);
  return error == std::errc() && stop == end && rank < size ? rank : -1;
}

/// Ignores SIGPIPE: a write to a connection that a lost rank has closed is to be an error that
/// names the rank, not a signal that ends the process. A handler of the program stays.
void ignore_broken_pipes() {
  struct sigaction now{};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) {
    ::signal(SIGPIPE, SIG_IGN);
  }
}

/// Returns a function that says why what begins now has become futile; "" until then. Its caller
/// waits, so it also runs the interrupt check.
std::function<std::string()> aborted_from_now(std::shared_ptr<const AbortFlag> abort_flag) {
  const std::uint64_t marks = abort_flag->marks();
  return [abort_flag = std::move(abort_flag), marks, timer = base::InterruptTimer()]() mutable {
    abort_flag->ask_interrupt(timer);
    if (abort_flag->is_set()) return abort_flag->why();
    return std::string(abort_flag->marks() == marks ? "" : "it began before a recovery");
  };
}

}  // namespace

bool connects_when_used(std::string_view group_name) {
  const std::string_view purpose = purpose_of(group_name);
  return purpose == "data" || purpose == "user" || purpose.ends_with("control");
}

struct GlooDevice::Impl {
  std::shared_ptr<gloo::transport::Device> device;
};

GlooDevice::GlooDevice(const LaunchEnvironment& launch) : impl_(std::make_unique<Impl>()) {
  ignore_broken_pipes();
  const MakesBatchThreads its_thread;  // [Note: Gloo's thread]
  impl_->device = make_device(launch);
}

GlooDevice::~GlooDevice() = default;

c10::intrusive_ptr<c10d::Backend> GlooDevice::connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      std::chrono::milliseconds timeout,
                                                      const std::function<std::string()>& aborted) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(impl_->device);
  options->threads = 0;  // sends and receives run on the device's thread
  const auto open = [=]() -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  };
  std::optional<c10::intrusive_ptr<c10d::Backend>> group;
  try {
    group = BoundedCalls().run(open, timeout + kGroupMargin, [&] { return !aborted().empty(); });
  } catch (const std::exception& error) {
    if (base::handles_interrupt()) throw;
    throw LostRank(concat("gloo: cannot connect: ", one_line(error.what())));
  }
  if (const std::string why = aborted(); !group && !why.empty()) {
    throw LostRank(concat("gloo: not connected: ", why));
  }
  if (!group) throw LostRank(concat("gloo: not connected within ", in_seconds(timeout)));
  return *group;
}

c10::intrusive_ptr<c10d::Backend> connect_all(const Store& store, GlooDevice& device,
                                              const GroupDoor& door,
                                              std::shared_ptr<const AbortFlag> abort_flag,
                                              std::function<void(int index)> waits_for) {
  const auto waits = [waits_for = std::move(waits_for), size = door.size,
                      self = door.self](const std::string& key) {
    const int rank = rank_in(key, size);
    waits_for(rank == self ? -1 : rank);
  };
  const auto aborted = aborted_from_now(abort_flag);
  return device.connect(store.for_group(door.key, std::move(abort_flag), waits), door.self,
                        door.size, door.timeout, aborted);
}

std::function<PairOpening(int epoch, int peer)> pair_opener(
    std::shared_ptr<const Store> store, std::shared_ptr<GlooDevice> device,
    std::chrono::milliseconds timeout, std::shared_ptr<const AbortFlag> abort_flag, int self,
    std::function<std::string(int epoch)> key_of) {
  return [=](int epoch, int peer) -> PairOpening {
    const std::string key =
        concat(key_of(epoch), " ", std::min(self, peer), "-", std::max(self, peer));
    return [device, of_pair = store->for_group(key, abort_flag), rank = self < peer ? 0 : 1,
            patience = abort_flag->patience.of(timeout), aborted = aborted_from_now(abort_flag)] {
      return device->connect(of_pair, rank, 2, patience, aborted);
    };
  };
}

namespace {

/// Names the ranks that show no sign of life, since Gloo does not say for which rank it waited: ";
/// no sign of life from rank 1". "" where all live.
std::string silence(const GroupPlace& place) {
  std::string text;
  if (place.heartbeats.count() == 0) return text;
  const auto asked = neighbours(place.ranks, place.rank);
  for (const int rank : silent_ranks(*place.store, asked, place.heartbeats)) {
    text += concat(text.empty() ? "; no sign of life from rank " : ", ", rank);
  }
  return text;
}

/// Makes ChannelOptions::open. Ranks come to a group when they have done what is before it.
auto opener(GroupPlace place, std::shared_ptr<GlooDevice> device, bool when_used,
            std::function<std::string(int epoch)> key_of) {
  return [=](int epoch,
             const std::function<void(int)>& waits_for) -> c10::intrusive_ptr<c10d::Backend> {
    const std::string key = key_of(epoch);
    const auto patience = place.options.init_timeout;
    place.store->meet(key, place.rank, place.ranks, patience, *place.abort_flag);
    if (when_used) return {};
    try {
      return connect_all(*place.store, *device,
                         {key, place.self(), static_cast<int>(place.ranks.size()), patience},
                         place.abort_flag, waits_for);
    } catch (const LostRank& error) {
      const std::string why = concat(key, ": ", error.what(), silence(place));
      place.abort_flag->acknowledge();
      throw LostRank(why);
    }
  };
}

class GlooConnections final : public Connections {
 public:
  explicit GlooConnections(const LaunchEnvironment& launch)
      : device_(std::make_shared<GlooDevice>(launch)) {}

  std::shared_ptr<Group> make_group(const GroupPlace& place) override {
    ChannelOptions channel = channel_options(place);
    const bool when_used = connects_when_used(place.name);
    const auto key_of = [name = place.name](int epoch) {
      return concat("group ", name, " (", epoch, ")");
    };
    channel.open = opener(place, device_, when_used, key_of);
    if (when_used) {
      channel.open_pair = pair_opener(place.store, device_, channel.timeout, place.abort_flag,
                                      channel.self, key_of);
    }
    auto group = std::make_shared<PointToPointGroup>(std::move(channel));
    groups_.push_back(group);
    if (!place.device.is_cpu()) return stage(std::move(group), place);
    return group;
  }
  void reset(int epoch) override {
    for (const auto& group : groups_) group->reset(epoch);
  }
  void close() override { groups_.clear(); }

 private:
  const std::shared_ptr<GlooDevice> device_;
  std::vector<std::shared_ptr<PointToPointGroup>> groups_;
};

}  // namespace

std::unique_ptr<Connections> open_gloo(const LaunchEnvironment& launch) {
  return std::make_unique<GlooConnections>(launch);
}

}  // namespace tessera::comm
