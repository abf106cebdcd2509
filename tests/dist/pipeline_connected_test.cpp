// The runner over messages as NCCL has them: two ranks are connected inside the first message
// between them, which holds up its rank until the other end comes to it; and the first message sent
// is the first received, with any content.

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "dist/pipeline_runs.h"
#include "launch/abort_flag.h"
#include "pipeline/runner.h"
#include "support/test.h"

namespace tessera::test::pipeline_connected_test {
namespace {

using namespace tessera::pipeline;  // NOLINT(google-build-using-namespace): what is tested
using comm::P2PRoute;

/// The state that the ranks of one pipeline share.
class Ways {
 public:
  explicit Ways(std::chrono::milliseconds patience) : patience_(patience) {}

  /// Returns once both ends have come.
  void connect(const P2PRoute& route, bool sends) {
    std::unique_lock lock(mutex_);
    Way& way = ways_[route];
    way.came[sends ? 1 : 0] = true;
    changed_.notify_all();
    if (!changed_.wait_for(lock, patience_, [&] { return way.came[0] && way.came[1]; })) {
      throw comm::LostRank(concat("the way from ", route.from, " to ", route.to,
                                  ": its other end does not come to it"));
    }
  }
  /// The tags of both ends have one order.
  void posted(const P2PRoute& route, bool sends, const comm::P2PTag& tag) {
    const std::lock_guard lock(mutex_);
    auto& tags = ways_[route].tags;
    auto& mine = tags[sends ? 1 : 0];
    const auto& others = tags[sends ? 0 : 1];
    mine.push_back(tag);
    if (others.size() >= mine.size()) {
      EXPECT_EQ(others[mine.size() - 1], tag) << to_string(tag);
    }
  }

 private:
  struct Way {
    std::array<bool, 2> came{};
    std::array<std::vector<comm::P2PTag>, 2> tags;
  };
  const std::chrono::milliseconds patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<P2PRoute, Way> ways_;
};

enum class Connects : std::uint8_t { kWhenAsked, kByTheFirstMessage };

class P2PLikeNccl final : public comm::P2P {
 public:
  P2PLikeNccl(std::shared_ptr<comm::P2P> inner, Ways& ways, Connects connects)
      : P2P({comm::all_ranks(inner->size()), inner->rank(), device_here()}),
        inner_(std::move(inner)),
        ways_(ways),
        connects_(connects) {}

  void connect(const std::set<P2PRoute>& routes) override {
    if (connects_ == Connects::kByTheFirstMessage) return;
    for (const P2PRoute& route : routes) {
      if (route.from == rank() || route.to == rank()) meet_on(route);
    }
  }
  bool gains_by_early_receives() const override {
    return connects_ == Connects::kByTheFirstMessage;
  }

 private:
  void meet_on(const P2PRoute& route) {
    if (met_.insert(route).second) ways_.connect(route, route.from == rank());
  }
  std::unique_ptr<comm::Transfer> post(comm::P2POp op) override {
    const bool sends = op.sends();
    const P2PRoute route = sends ? P2PRoute{rank(), op.peer, op.tag.direction}
                                 : P2PRoute{op.peer, rank(), op.tag.direction};
    if (op.tensor.numel() > 0) {
      meet_on(route);
      ways_.posted(route, sends, op.tag);
    }
    return sends ? inner_->send(op.peer, op.tag, op.tensor)
                 : inner_->receive(op.peer, op.tag, op.tensor);
  }

  const std::shared_ptr<comm::P2P> inner_;
  Ways& ways_;
  const Connects connects_;
  std::set<P2PRoute> met_;
};

Left run_like_nccl(const ValidProgram& program, const Toy& toy, Ways& ways, Connects connects) {
  Left left;
  std::mutex mutex;
  ranks(program.schedule().ranks()).run([&](World& world) {
    auto ties = ties_of(stages_mesh(world));
    ties.p2p = std::make_shared<P2PLikeNccl>(ties.p2p, ways, connects);
    Runner runner(ties);
    const Mine mine(toy, program.schedule(), world.rank());
    const auto results = runner.run(program, mine.pointers(), {});
    // Forwards alone are connected already.
    runner.run(ValidProgram(forward_only(program.schedule()), Passes::kForward), mine.pointers(),
               {});
    const std::lock_guard lock(mutex);
    mine.add_to(left, results);
  });
  return left;
}

TEST(PipelineLikeNccl, EveryKindEndsWithTheBitsOfOneProcess) {
  for (const KindRow& row : kinds()) {
    for (const int ranks : {2, 3, 4}) {
      Toy toy;  // with tensors that are small, and some that are empty
      toy.stages = ranks * row.stages_per_rank;
      toy.seed = static_cast<std::uint64_t>(ranks);
      const Shape shape{ranks, row.stages_per_rank, 2 * toy.stages};
      SCOPED_TRACE(concat(row.name, ", ", ranks, " ranks"));
      const ValidProgram program(make_schedule(row.kind, shape));
      program.require_messages_in_order();
      Ways ways(std::chrono::seconds(15));
      expect_same_left(run_like_nccl(program, toy, ways, Connects::kWhenAsked),
                       run_in_one_process(toy, shape.micro_batches), toy.numbers);
      if (HasFailure()) return;
    }
  }
}

// Naive: the first message of a way connects its ranks; they wait in different ones, for ever.
TEST(PipelineLikeNccl, RanksThatConnectInTheirFirstMessagesWaitForEachOther) {
  for (const KindRow& row : kinds()) {
    Toy toy;
    toy.stages = 2 * row.stages_per_rank;
    toy.more_rows = 1;
    const ValidProgram program(make_schedule(row.kind, {2, row.stages_per_rank, toy.stages}));
    Ways ways(std::chrono::milliseconds(200));
    EXPECT_THAT([&] { run_like_nccl(program, toy, ways, Connects::kByTheFirstMessage); },
                ::testing::ThrowsMessage<Error>(Says("its other end does not come to it")))
        << row.name;
  }
}

}  // namespace
}  // namespace tessera::test::pipeline_connected_test
