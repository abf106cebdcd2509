#include "launch/refusal.h"

#include <signal.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <vector>

#include "base/environment.h"
#include "base/printable.h"
#include "launch/hosts.h"
#include "launch/peer_watch.h"
#include "launch/poison.h"
#include "launch/store.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// For finding the other ranks: they have just been started, and read the same files.
std::chrono::milliseconds patience_for(const LaunchEnvironment& launch) {
  return WatchTimes{watch_poll(launch.world_size)}.meeting();
}

/// None when nobody serves the store, or what answers is none.
std::shared_ptr<Store> reach_others(const LaunchEnvironment& launch) {
  try {
    return Store::connect(launch, patience_for(launch), patience_for(launch));
  } catch (const Error&) {
    return nullptr;
  }
}

/// What the failure key says after this rank has tried to write it.
FailureRecord announce(Store& store, const FailureRecord& record) {
  try {
    const auto standing = store.set_if_absent(store_key::kFailure, encode(record));
    return decode_failure(standing).value_or(record);
  } catch (const Error&) {
    return record;
  }
}

/// Rank 0 keeps the store up until the others have read what it says.
void wait_for_readers(const LaunchEnvironment& launch, Store& store) {
  constexpr const char* kKey = "refused";
  try {
    if (launch.rank != 0) {
      store.arrive(kKey, launch.rank, launch.world_size);
    } else if (!launch.agent_store) {
      std::vector<int> everyone(static_cast<std::size_t>(launch.world_size));
      std::iota(everyone.begin(), everyone.end(), 0);
      store.meet(kKey, launch.rank, everyone, patience_for(launch), Poison());
    }
  } catch (const Error&) {
    // Whoever did not come was not refused, or says so itself.
  }
}

}  // namespace

bool says_the_same(const FailureRecord& standing, const FailureRecord& record) {
  return standing.rank != record.rank && standing.message == record.message;
}

void refuse_once(const LaunchEnvironment& launch, const FailureRecord& record,
                 const std::function<void()>& print) {
  finish_report();
  const auto store = launch.world_size > 1 ? reach_others(launch) : nullptr;
  if (!store) return print();
  if (!says_the_same(announce(*store, record), record)) print();
  wait_for_readers(launch, *store);
}

void refuse_once(const std::exception& error, int code, const std::function<void()>& print) {
  if (code != kRefusedCode) return print();
  LaunchEnvironment launch;
  try {
    launch = read_launch_environment(base::environment());
    find_first_host(launch, patience_for(launch));
  } catch (const Error&) {
    return print();  // no address at which others could be asked
  }
  refuse_once(launch,
              {FailureClass::kPrimary, monotonic_ns(), launch.rank, code, one_line(error.what())},
              print);
}

void finish_report() { ::signal(SIGTERM, SIG_IGN); }

}  // namespace tessera::comm
