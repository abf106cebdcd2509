// Ranks that are threads, on simulated devices or on the CPU.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/test_hooks.h"
#include "comm/group.h"
#include "comm/stream.h"
#include "launch/abort_flag.h"
#include "sim/sim.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::sim {

/// Where ranks are, and how their program runs there.
struct Where {
  int ranks = 2;
  std::string device = "cpu";  ///< WorldOptions::device
  bool side = false;           ///< not on the device's default stream
  bool late = false;           ///< test_hooks::deliver_at_wait
  ThreadBackend backend = ThreadBackend::kInProcess;
};

inline std::string shown(const Where& where) {
  return concat(where.ranks, " ranks on ", where.device, where.side ? ", side streams" : "",
                where.late ? ", delivered at wait" : "",
                where.backend == ThreadBackend::kGloo ? ", over Gloo" : "");
}

inline void on_ranks(const Where& where, const std::function<void(World&)>& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  WorldOptions options;
  options.device = where.device;
  options.timeout = timeout;
  std::optional<test_hooks::Set<decltype(test_hooks::deliver_at_wait)>> late;
  if (where.late) late.emplace(test_hooks::deliver_at_wait, [] { return true; });
  launch_threads(
      where.ranks, where.backend,
      [&](World& world) {
        const RankScope rank(world.rank());
        const comm::StreamScope here(where.side ? comm::Stream::make(world.device())
                                                : comm::Stream());
        body(world);
      },
      options);
}

/// The first race that `body` has on any rank; empty where there is none.
inline std::string race_on_ranks(const Where& where, const std::function<void(World&)>& body) {
  try {
    on_ranks(where, body);
  } catch (const Race&) {
  } catch (const comm::LostRank&) {  // a rank whose peer had the race
  }
  settle();
  const std::vector<std::string> races = take_races();
  return races.empty() ? "" : races.front();
}

/// While it lives, one half of the order at that site is left out.
inline auto without(comm::EventSite site, comm::EventEnd end) {
  return test_hooks::Set(
      test_hooks::leaves_out_event,
      [=](comm::EventSite which, comm::EventEnd half) { return which == site && half == end; });
}

}  // namespace tessera::sim
