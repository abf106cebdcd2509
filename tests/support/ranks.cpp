#include "support/ranks.h"

#include "comm/stream.h"

namespace tessera::test {

Ranks::Ranks(int count, ThreadBackend backend, std::chrono::milliseconds timeout)
    : key_{count, place().nccl ? ThreadBackend::kNccl : backend, place().device, timeout},
      side_(place().side) {
  // Work that a single rank has launched stays between its devices.
  if (over_nccl()) kept().erase(key_);
}

void Ranks::run(const std::function<void(World&)>& body) {
  try {
    of(key_).run([&](World& world) {
      try {
        run_on(world, body);
      } catch (...) {
        failed_ranks().one();
        throw;
      }
    });
  } catch (...) {
    if (over_nccl()) kept().erase(key_);
    failed_ranks().over();
    throw;
  }
}

void Ranks::run_on(World& world, const std::function<void(World&)>& body) const {
  device_here() = world.device();
  if (!side_) return body(world);
  // Results that one body leaves to the test or to the next one are read elsewhere.
  const auto outside = comm::Stream::current(world.device());
  const auto side = comm::Stream::make(world.device());
  comm::order(outside, side, comm::EventSite::kIssue);
  {
    const comm::StreamScope here(side);
    body(world);
  }
  comm::order(side, outside, comm::EventSite::kIssue);
}

std::map<Ranks::Key, std::unique_ptr<comm::ThreadRanks>>& Ranks::kept() {
  static std::map<Key, std::unique_ptr<comm::ThreadRanks>> all;
  return all;
}

comm::ThreadRanks& Ranks::of(const Key& key) {
  auto& slot = kept()[key];
  if (!slot) {
    const auto& [count, backend, device, timeout] = key;
    WorldOptions options;
    options.timeout = timeout;
    options.device = device;
    slot = std::make_unique<comm::ThreadRanks>(count, backend, options);
  }
  return *slot;
}

}  // namespace tessera::test
