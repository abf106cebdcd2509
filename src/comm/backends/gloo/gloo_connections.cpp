// Groups over Gloo: all ranks connected as they are opened, or two when they first need it.
#include <algorithm>

#include "base/environment.h"
#include "comm/backends/gloo/gloo.h"
#include "comm/backends/gloo/point_to_point.h"
#include "launch/failure_watch.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Gloo does not say for whom it waited: "; no sign of life from rank 1". "" where all live.
std::string silence(const GroupPlace& place) {
  std::string text;
  if (place.heartbeats.count() == 0) return text;
  const auto asked = neighbours(place.ranks, place.rank);
  for (const int rank : silent_ranks(*place.store, asked, place.heartbeats)) {
    text += concat(text.empty() ? "; no sign of life from rank " : ", ", rank);
  }
  return text;
}

/// ChannelOptions::open. Ranks come to a group when they have done what is before it.
auto opener(GroupPlace place, std::shared_ptr<GlooDevice> device, bool when_used,
            std::function<std::string(int epoch)> key_of) {
  return [=](int epoch,
             const std::function<void(int)>& waits_for) -> c10::intrusive_ptr<c10d::Backend> {
    const std::string key = key_of(epoch);
    const auto patience = place.options.init_timeout;
    place.store->meet(key, place.rank, place.ranks, patience, *place.poison);
    if (when_used) return {};
    try {
      return connect_all(*place.store, *device,
                         {key, place.self(), static_cast<int>(place.ranks.size()), patience},
                         place.poison, waits_for);
    } catch (const PeerLost& error) {
      throw PeerLost(concat(key, ": ", error.what(), silence(place)));
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
      channel.open_pair =
          pair_opener(place.store, device_, channel.timeout, place.poison, channel.self, key_of);
    }
    auto group = std::make_shared<PointToPointGroup>(std::move(channel));
    groups_.push_back(group);
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

ChannelOptions channel_options(const GroupPlace& place) {
  ChannelOptions channel;
  channel.name = place.name;
  channel.members = place.ranks;
  channel.self = place.self();
  channel.timeout = place.options.timeout;
  channel.compare_entries =
      place.options.compare_entries || base::environment_switch("TESSERA_COMPARE_ENTRIES");
  channel.poison = place.poison;
  channel.board = place.board;
  return channel;
}

std::unique_ptr<Connections> open_gloo(const LaunchEnvironment& launch) {
  return std::make_unique<GlooConnections>(launch);
}

}  // namespace tessera::comm
