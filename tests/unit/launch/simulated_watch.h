// Many ranks that watch each other, in simulated time: the same PeerWatch as in a run, over a store
// that answers one request after the other and takes a while for each.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "launch/peer_watch.h"

namespace tessera::comm {

/// As c10d's TCPStore: one thread serves all.
class SimulatedStore final : public WatchedStore {
 public:
  using Duration = std::chrono::microseconds;

  explicit SimulatedStore(Duration request) : request_(request) {}

  void set(const std::string& key, const std::string& value) override {
    charge(1);
    values_[key] = value;
  }
  std::vector<std::optional<std::string>> find(const std::vector<std::string>& keys) override {
    std::vector<std::optional<std::string>> found;
    for (const auto& key : keys) {
      const auto place = values_.find(key);
      found.push_back(place == values_.end() ? std::nullopt : std::optional(place->second));
    }
    const auto there = static_cast<std::size_t>(
        std::count_if(found.begin(), found.end(), [](const auto& one) { return one.has_value(); }));
    if (there == found.size()) {
      charge(2);  // c10d waits for them, and gets them
    } else {
      charge(1 + (keys.size() > 1 ? static_cast<int>(keys.size() + 2 * there) : 0));
    }
    return found;
  }

  /// Requests of one rank begin now; returns when the last one was answered.
  void begin(PeerWatch::Time now) { now_ = now; }
  PeerWatch::Time end() const { return now_; }
  void charge(int requests) {
    requests_ += static_cast<std::uint64_t>(requests);
    free_ = std::max(free_, now_) + requests * request_;
    now_ = free_;
  }
  std::uint64_t requests() const { return requests_; }
  std::size_t texts_of_issued() const {
    return static_cast<std::size_t>(std::count_if(values_.begin(), values_.end(), [](auto& one) {
      return one.first.starts_with("issued/");
    }));
  }

 private:
  Duration request_;
  PeerWatch::Time now_{};
  PeerWatch::Time free_{};
  std::uint64_t requests_ = 0;
  std::unordered_map<std::string, std::string> values_;
};

struct SimulatedRank {
  Standing standing;  ///< `waited` is worked out
  std::optional<PeerWatch::Time> waits_since;
  std::string lines;
  bool alive = true;
  std::optional<PeerWatch::Time> dies_at;
};

class SimulatedWatch {
 public:
  struct Named {
    int by = -1;
    double seconds = 0;         ///< until the first rank found it
    double told_seconds = 0;    ///< until the last one has read it
    double told_0_seconds = 0;  ///< until rank 0 has, which serves the store
    std::string why;
  };

  SimulatedWatch(int size, SimulatedStore::Duration request)
      : store(request), poll_(watch_poll(size)) {
    std::vector<int> everyone;
    for (int rank = 0; rank < size; ++rank) everyone.push_back(rank);
    PeerWatch::Options options;
    options.silent_after = WatchTimes{poll_}.silent_after();
    for (int rank = 0; rank < size; ++rank) {
      options.rank = rank;
      watches_.push_back(std::make_unique<PeerWatch>(store, options));
      ranks.emplace_back().standing.peers = everyone;
    }
    beats_.resize(watches_.size());
    for (int rank = 0; rank < size; ++rank) {
      // Ranks start one after the other, as a launcher starts them.
      const auto phase = std::chrono::duration_cast<std::chrono::microseconds>(poll_) * rank / size;
      events_.push({PeerWatch::Time(phase), rank, false});
      events_.push({PeerWatch::Time(phase) + std::chrono::microseconds(10), rank, true});
    }
  }

  /// Returns what is found until `seconds` have passed, and when; none: nothing.
  std::optional<Named> run(double seconds) {
    std::optional<Named> named;
    const auto end = PeerWatch::Time(std::chrono::duration_cast<PeerWatch::Time::duration>(
        std::chrono::duration<double>(seconds)));
    while (!events_.empty() && events_.top().at <= end) {
      const Event event = events_.top();
      events_.pop();
      auto& rank = ranks[static_cast<std::size_t>(event.rank)];
      if (rank.dies_at && event.at >= *rank.dies_at) rank.alive = false;
      if (!rank.alive) continue;
      store.begin(event.at);
      if (!event.is_look) {
        beat(event.rank, event.at);
      } else if (named) {
        store.charge(3);  // the failure key is there
        named->told_seconds = in_seconds_of(store.end());
        if (event.rank == 0) named->told_0_seconds = named->told_seconds;
        continue;
      } else if (auto found = look(event.rank, event.at)) {
        const double now = in_seconds_of(store.end());
        named = Named{event.rank, now, now, event.rank == 0 ? now : 0, found->why};
        continue;
      }
      events_.push({store.end() + poll_, event.rank, event.is_look});
    }
    return named;
  }

  int cause(int rank) const { return watches_[static_cast<std::size_t>(rank)]->cause(); }
  std::chrono::milliseconds poll() const { return poll_; }
  std::uint64_t looks() const { return looks_; }
  std::uint64_t most_requests_of_a_look() const { return most_requests_; }

  SimulatedStore store;
  std::vector<SimulatedRank> ranks;

 private:
  struct Event {
    PeerWatch::Time at;
    int rank;
    bool is_look;
    bool operator<(const Event& other) const { return at > other.at; }  // the earliest is on top
  };

  static double in_seconds_of(PeerWatch::Time time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  }

  Standing standing_of(int rank, PeerWatch::Time now) const {
    const auto& one = ranks[static_cast<std::size_t>(rank)];
    Standing standing = one.standing;
    const bool waits = one.waits_since && *one.waits_since <= now;
    standing.waited =
        waits ? std::chrono::duration_cast<std::chrono::milliseconds>(now - *one.waits_since)
              : std::chrono::milliseconds(0);
    if (!waits) {
      standing.waits = 0;
      standing.wait.reset();
    }
    return standing;
  }

  void beat(int rank, PeerWatch::Time now) {
    const Standing standing = standing_of(rank, now);
    const Pulse pulse{++beats_[static_cast<std::size_t>(rank)],
                      0,
                      standing.waits,
                      standing.wait,
                      cause(rank),
                      standing.issued};
    store.set(store_key::pulse(rank), encode(pulse));
  }

  std::optional<PeerWatch::Finding> look(int rank, PeerWatch::Time now) {
    const auto before = store.requests();
    store.charge(2);  // the failure key, the abort key
    const auto& one = ranks[static_cast<std::size_t>(rank)];
    auto found = watches_[static_cast<std::size_t>(rank)]->look(now, 0, standing_of(rank, now),
                                                                [&] { return one.lines; });
    most_requests_ = std::max(most_requests_, store.requests() - before);
    ++looks_;
    return found;
  }

  std::chrono::milliseconds poll_;
  std::vector<std::unique_ptr<PeerWatch>> watches_;
  std::vector<std::uint64_t> beats_;
  std::priority_queue<Event> events_;
  std::uint64_t looks_ = 0;
  std::uint64_t most_requests_ = 0;
};

}  // namespace tessera::comm
