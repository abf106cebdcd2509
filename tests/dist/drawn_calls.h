// Programs of users' collectives, of which one rank has a different one: the errors of the library,
// and that all ranks can continue. Without GoogleTest, for programs too: a failed check throws.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "tessera/group.h"
#include "tessera/mesh.h"
#include "tessera/world.h"

namespace tessera::test {

struct DrawnCall {
  enum class What : std::uint8_t { kSum, kMax, kMean, kGather, kBroadcast, kBarrier };
  What what = What::kSum;
  std::vector<std::int64_t> sizes = {2, 3};
  at::ScalarType dtype = at::kFloat;
  int source = 0;
  std::string name = "loss";
  bool is_refused = false;  ///< by this rank alone: its tensor is not contiguous
  bool operator==(const DrawnCall&) const = default;

  void make(const Group& group) const {
    at::Tensor x = at::ones(sizes, dtype);
    if (is_refused) x = at::ones({4, 2}).t();
    switch (what) {
      case What::kSum:
        return group.all_reduce(x, ReduceOp::kSum, name);
      case What::kMax:
        return group.all_reduce(x, ReduceOp::kMax, name);
      case What::kMean:
        return static_cast<void>(group.mean(x.to(at::kDouble), name));
      case What::kGather:
        return static_cast<void>(group.all_gather(x, name));
      case What::kBroadcast:
        return group.broadcast(x, source, name);
      case What::kBarrier:
        return group.barrier(name);
    }
  }
};

/// Draws the same on all ranks.
class DrawnCalls {
 public:
  explicit DrawnCalls(unsigned seed) : random_(seed) {}

  int below(int end) { return static_cast<int>(random_() % static_cast<unsigned>(end)); }

  std::vector<DrawnCall> program() {
    std::vector<DrawnCall> calls(static_cast<std::size_t>(1 + below(3)));
    for (DrawnCall& call : calls) call = one();
    return calls;
  }

  /// Draws a different program: a call left out, twice, at another place, of something else, or
  /// refused.
  std::vector<DrawnCall> changed(const std::vector<DrawnCall>& calls) {
    for (;;) {
      auto other = calls;
      const auto at = other.begin() + below(static_cast<int>(calls.size()));
      switch (below(6)) {
        case 0:
          other.erase(at);
          break;
        case 1:
          other.insert(at, *at);
          break;
        case 2:
          std::iter_swap(at, other.begin());
          break;
        case 3:
          at->is_refused = at->what != DrawnCall::What::kBarrier;
          break;
        default:
          change(*at);
      }
      if (other != calls) return other;
    }
  }

 private:
  DrawnCall one() {
    constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kInt, at::kDouble};
    DrawnCall call;
    call.what = static_cast<DrawnCall::What>(below(6));
    if (call.what == DrawnCall::What::kBarrier) return call;
    call.sizes = {1 + below(3), 1 + below(3)};
    if (call.what == DrawnCall::What::kBroadcast) call.source = below(2);
    if (call.what != DrawnCall::What::kMean) call.dtype = kDtypes[below(3)];
    return call;
  }

  void change(DrawnCall& call) {
    switch (below(4)) {
      case 0:
        call.name += " of another one";
        break;
      case 1:
        std::swap(call.sizes[0], call.sizes[1]);
        break;
      case 2:
        if (call.what == DrawnCall::What::kBroadcast) call.source = 1 - call.source;
        break;
      default:
        call = one();
    }
    if (call.what == DrawnCall::What::kBarrier) {  // of which only the name counts
      call = {.what = call.what, .name = call.name};
    }
  }

  std::mt19937 random_;
};

/// Returns the error that ended the calls of this rank.
inline std::string told_by(World& world, const Group& group, const std::vector<DrawnCall>& calls) {
  try {
    for (const DrawnCall& call : calls) {
      try {
        call.make(group);
      } catch (const Error& error) {
        // A refused call sends nothing: this rank continues, and the others miss the call.
        if (!call.is_refused || error.kind() != ErrorKind::kUsage) throw;
      }
    }
    world.group().barrier("end of a program");
  } catch (const Error& error) {
    TESSERA_INVARIANT(
        error.kind() == ErrorKind::kComm && world.aborted(),
        "found an error of another kind, expected kComm and an aborted World: ", error.what());
    return error.what();
  }
  return "";
}

/// Runs drawn programs, of which one rank has a different one: every rank gets an error of kComm
/// that names the calls, recovers, and runs `after_recovery`. With four ranks each group is a pair.
inline void catch_disagreements(World& world, unsigned seed, int programs,
                                const std::function<void(World&)>& after_recovery) {
  const bool pairs = world.size() == 4;
  const Group group =
      pairs ? world.mesh(MeshShape::dense(1, 2, 2, 1, 1)).group("dp_shard") : world.group();
  DrawnCalls draw(seed);
  for (int i = 0; i < programs; ++i) {
    const auto calls = draw.program();
    const auto other = draw.changed(calls);
    const bool is_other = world.rank() == draw.below(world.size());
    group.barrier("begin of a program");  // a group is opened by all of its ranks, for longer
    const std::string told = told_by(world, group, is_other ? other : calls);
    TESSERA_INVARIANT(told.find("ranks disagree") != std::string::npos ||
                          told.find("ranks wait for each other") != std::string::npos,
                      "program ", i, ": found '", told, "', expected what the ranks have called");
    world.recover();
    after_recovery(world);
  }
}

}  // namespace tessera::test
