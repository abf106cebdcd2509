// Thread ranks that all cases of this binary share: connections are made once.
#pragma once

#include "comm/group.h"
#include "comm/thread_ranks.h"
#include "support/test.h"

namespace tessera::comm {

inline ThreadRanks& pool(ThreadBackend backend, int ranks) {
  static std::map<std::pair<ThreadBackend, int>, std::unique_ptr<ThreadRanks>> pools;
  auto& one = pools[{backend, ranks}];
  if (!one) one = std::make_unique<ThreadRanks>(ranks, backend);
  return *one;
}

inline Batch batch_of(Op op, const std::string& unit = "unit", std::uint32_t id = 0) {
  Batch batch;
  batch.label.unit = unit;
  batch.label.unit_id = id;
  batch.label.kind = std::holds_alternative<AllGather>(op)       ? Kind::kAllGather
                     : std::holds_alternative<ReduceScatter>(op) ? Kind::kReduceScatter
                     : std::holds_alternative<AllToAll>(op)      ? Kind::kAllToAll
                     : std::holds_alternative<Broadcast>(op)     ? Kind::kBroadcast
                     : std::holds_alternative<Combine>(op)       ? Kind::kAnyOf
                                                                 : Kind::kAllReduce;
  batch.ops.push_back(std::move(op));
  return batch;
}

/// The message of the kComm error that `act` throws.
inline std::string comm_error_of(const std::function<void()>& act,
                                 std::source_location caller = std::source_location::current()) {
  return error_of(ErrorKind::kComm, act, caller);
}

inline std::string name_of(ThreadBackend backend) {
  return backend == ThreadBackend::kGloo ? "Gloo" : "InProcess";
}

}  // namespace tessera::comm
