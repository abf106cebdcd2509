#include "capture/dry/counted_step.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "fsdp/held_bytes.h"

namespace tessera::capture {
namespace {

/// Notes what the rank holds outside its pool wherever a span of its trace begins or ends.
class HeldAtMoments final : public DeviceMoments {
 public:
  explicit HeldAtMoments(std::function<std::int64_t()> bytes) : bytes_(std::move(bytes)) {}

  /// To be called wherever the rank has taken memory.
  void look() { most_ = std::max(most_, bytes_()); }
  void mark(TraceClock::time_point host) override {
    look();
    moments_.push_back({host, bytes_(), most_});
    most_ = moments_.back().bytes;
  }
  TraceClock::time_point found(TraceClock::time_point host) const override { return host; }

  std::vector<DryPass> passes(const std::vector<TraceSpan>& spans) const {
    std::vector<DryPass> found;
    std::vector<TraceClock::time_point> forwards;  // those that no later one has held so far
    for (const TraceSpan& span : spans) {
      if (span.row != TraceRow::kCompute) continue;
      for (const std::string_view pass : {"forward ", "backward "}) {
        if (!span.name.starts_with(pass) || span.name.starts_with("forward again ")) continue;
        const auto begin = at(span.begin), end = at(span.end);
        DryPass one{span.name.substr(pass.size()), pass == "forward ", begin->bytes, end->bytes,
                    begin->bytes};
        for (auto moment = begin + 1; moment <= end; ++moment) {
          one.most = std::max(one.most, moment->most);
        }
        if (one.is_forward) {
          one.is_innermost = forwards.empty() || forwards.back() < span.begin;
          while (!forwards.empty() && forwards.back() >= span.begin) forwards.pop_back();
          forwards.push_back(span.begin);
        }
        found.push_back(std::move(one));
      }
    }
    return found;
  }

 private:
  struct Moment {
    TraceClock::time_point host;
    std::int64_t bytes;
    std::int64_t most;  ///< since the moment before
  };
  std::vector<Moment>::const_iterator at(TraceClock::time_point host) const {
    return std::ranges::lower_bound(moments_, host, {}, &Moment::host);
  }

  const std::function<std::int64_t()> bytes_;
  std::int64_t most_ = 0;
  std::vector<Moment> moments_;
};

/// While alive, has `look` called wherever the thread takes memory.
class WatchedCount {
 public:
  WatchedCount(dry::MemoryCount& count, std::function<void()> at_each) : count_(count) {
    count_.watch(std::move(at_each));
  }
  ~WatchedCount() { count_.watch({}); }
  WatchedCount(const WatchedCount&) = delete;
  WatchedCount& operator=(const WatchedCount&) = delete;

 private:
  dry::MemoryCount& count_;
};

}  // namespace

CountedStep counted_step(const ShardedBase& model, dry::MemoryCount& count,
                         const std::function<void()>& step) {
  CountedStep found;
  auto moments =
      std::make_unique<HeldAtMoments>([&] { return count.now() - fsdp::pool_bytes(model); });
  HeldAtMoments& held = *moments;
  const auto trace = std::make_shared<Trace>(std::move(moments));
  count.begin_peak();
  {
    const WatchedCount watched(count, [&] {
      found.unsharded = std::max(found.unsharded, fsdp::unsharded_bytes(model));
      held.look();
    });
    const TraceHere traced(trace);
    step();
  }
  found.between_steps = count.now();
  found.peak = count.peak();
  found.spans = trace->take();
  found.passes = held.passes(found.spans);
  return found;
}

}  // namespace tessera::capture
