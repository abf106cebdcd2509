#include "comm/process_world.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <exception>
#include <numeric>

#include "base/environment.h"
#include "comm/failure_report.h"
#include "comm/nccl.h"
#include "comm/point_to_point.h"
#include "comm/queue.h"
#include "comm/world_state.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

// A rank that is done waits for the others to be done too, but not for one that gives no sign of
// life for this long.
constexpr std::chrono::seconds kGoodbye{30};

/// "auto" is Gloo as long as models live on the CPU.
bool takes_nccl(const std::string& backend) { return backend == "nccl"; }

/// libtorch warns with a stack trace for every connection that closes; our own errors say which
/// rank it was.
void silence_store_warnings() {
  if (base::environment_variable("TORCH_CPP_LOG_LEVEL")) return;
  FLAGS_caffe2_log_level = std::max(FLAGS_caffe2_log_level, static_cast<int>(c10::GLOG_ERROR));
}

}  // namespace

ProcessWorld::ProcessWorld(const LaunchEnvironment& launch, const WorldOptions& options)
    : World(launch.rank, launch.world_size, launch.local_rank),
      launch_(launch),
      options_(options),
      exceptions_before_(std::uncaught_exceptions()),
      everyone_(static_cast<std::size_t>(launch.world_size)) {
  std::iota(everyone_.begin(), everyone_.end(), 0);
  silence_store_warnings();
  if (takes_nccl(options.backend)) {
    require_nccl();
  } else {
    device_ = std::make_shared<GlooDevice>(launch.hosts);
  }
  store_ = Store::connect(launch, options.init_timeout);
  store_->meet("hello", rank_, everyone_, options.init_timeout, *state_->poison);
  WatchOptions watch;
  watch.rank = rank_;
  watch.blocked_after = options.blocked_after;
  // Who raises the timeout to look at a rank in a debugger is not to be cut off here.
  watch.silent_after = std::max(watch.silent_after, options.timeout / 20);
  watch_ = std::make_unique<FailureWatch>(store_->second_connection(), state_->board, watch,
                                          watch_actions());
}

FailureWatch::Actions ProcessWorld::watch_actions() {
  FailureWatch::Actions actions;
  actions.failed = [this](const std::string& why) { leave_after(rank_, why); };
  actions.lost = [this](const std::string& why) {
    announce_failure(concat("rank ", rank_, ": ", why));
    leave_after(rank_, why);
  };
  actions.disagree = [this](const std::string& why) {
    report_failure(this, Error(ErrorKind::kComm, why), 1);
  };
  actions.poisoned = [this](const std::string& why, int epoch) { poison_here(why, epoch); };
  return actions;
}

ProcessWorld::~ProcessWorld() {
  const bool failed = poisoned() || std::uncaught_exceptions() > exceptions_before_;
  if (failed) {
    watch_->stop();  // it would end this process by what is announced here
    if (!poisoned()) announce_failure(concat("rank ", rank_, ": left by an exception"));
    poison_here("left by an exception", epoch_);
  }
  stop_queue();
  if (!failed) leave_together();
  watch_->stop();
}

bool ProcessWorld::missing_are_alive(const std::string& key, std::map<int, std::string>& beats) {
  for (const int rank : everyone_) {
    if (store_->find(concat(key, "/", rank))) continue;
    const std::string beat = store_->find(store_key::pulse(rank)).value_or("");
    if (std::exchange(beats[rank], beat) == beat) return false;
  }
  return true;
}

void ProcessWorld::wait_for_the_last(const std::string& key) {
  std::map<int, std::string> beats;
  for (;;) {
    try {
      return store_->meet(key, rank_, everyone_, kGoodbye, *state_->poison);
    } catch (const PeerLost&) {
      if (poisoned() || !missing_are_alive(key, beats)) throw;
    }
  }
}

void ProcessWorld::leave_together() {
  // A connection that closes while a peer still reads from it looks like a lost rank, and so does
  // the store when rank 0 takes it away.
  try {
    wait_for_the_last("goodbye");
    watch_->stop();
    gloo_groups_.clear();
    state_->made.clear();
    if (rank_ == 0) {
      store_->meet("gone", rank_, everyone_, kGoodbye, *state_->poison);
    } else {
      store_->set(concat("gone/", rank_), "gone");
    }
  } catch (const Error&) {
    // Whoever is missing has failed and says so itself.
  }
}

std::shared_ptr<Group> ProcessWorld::make_group(const std::vector<int>& ranks,
                                                const std::string& name) {
  ChannelOptions channel;
  channel.name = name;
  channel.members = ranks;
  channel.self = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
  channel.timeout = options_.timeout;
  channel.compare_entries =
      options_.compare_entries || base::environment_switch("TESSERA_COMPARE_ENTRIES");
  channel.poison = state_->poison;
  channel.board = state_->board;
  if (!device_) {
    store_->meet(concat("group ", name), rank_, ranks, options_.init_timeout, *state_->poison);
    return make_nccl_group(channel, store_->for_group(concat("nccl/", name)), local_rank_);
  }
  channel.open = [store = store_, device = device_, timeout = options_.timeout,
                  patience = options_.init_timeout, poison = state_->poison, rank = rank_, ranks,
                  name, self = channel.self](int epoch) {
    const std::string key = concat("group ", name, " (", epoch, ")");
    store->meet(key, rank, ranks, patience, *poison);
    return device->connect(store->for_group(key), self, static_cast<int>(ranks.size()), timeout);
  };
  auto group = std::make_shared<PointToPointGroup>(std::move(channel));
  gloo_groups_.push_back(group);
  return group;
}

void ProcessWorld::poison_here(const std::string& why, int epoch) {
  const std::lock_guard lock(epoch_mutex_);
  if (epoch != epoch_) return;  // recovered in the meantime
  state_->poison->mark(why);
  queue_->poison(why);
  state_->board->abort_all();
}

void ProcessWorld::poison(const std::string& why) {
  const std::string text = concat("rank ", rank_, ": ", why);
  const int epoch = epoch_;
  poison_here(why, epoch);
  try {
    store_->set_if_absent(store_key::poison(epoch), text);
  } catch (const Error&) {
    // The store is gone: the watch says so.
  }
}

void ProcessWorld::recover() {
  TESSERA_CHECK(device_ != nullptr, ErrorKind::kUsage,
                "recover: not with NCCL; start the run anew");
  const Poison never;  // our own poison is set
  const int next = epoch_ + 1;
  queue_->drain();
  store_->meet(concat("recover/", next), rank_, everyone_, options_.timeout, never);
  const std::lock_guard lock(epoch_mutex_);
  epoch_ = next;
  watch_->set_epoch(next);
  for (const auto& group : gloo_groups_) group->reset(next);
  queue_->recover();
  ++recoveries_;
  state_->poison->clear();
}

bool ProcessWorld::serves_store() const { return rank_ == 0 && !launch_.agent_store; }

std::optional<std::string> ProcessWorld::announce_failure(const std::string& why) noexcept {
  try {
    return store_->set_if_absent(store_key::kFailure, why);
  } catch (...) {
    return std::nullopt;
  }
}

std::optional<std::string> ProcessWorld::known_failure() noexcept {
  try {
    return store_->find(store_key::kFailure);
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace tessera::comm
