// Ranks by the hundred, as threads: a step computes what the plain module does, and a rank that is
// lost is named. 24 ranks in ./test; by `scripts/full many_ranks` 256, and 64 over Gloo, where each
// pair of ranks has sockets.
#include <torch/csrc/autograd/autograd.h>

#include <future>

#include "comm/group.h"
#include "launch/failure_watch.h"
#include "proof.h"
#include "support/modules.h"
#include "support/quotient.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/optim.h"
#include "tessera/shard.h"

namespace tessera::test::many_ranks_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

int many() { return full_proof() ? 256 : 24; }
int many(ThreadBackend backend) {
  return backend == ThreadBackend::kGloo && full_proof() ? 64 : many();
}
int lost(int ranks = many()) { return ranks - ranks / 3; }

at::Tensor loss_of(int rank, const std::function<at::Tensor(const at::Tensor&)>& forward) {
  const auto seed = static_cast<std::uint64_t>(100 + rank);
  const auto y = forward(seeded(seed, {2, 10}));
  return (y.to(at::kFloat) - seeded(seed + 5000, {2, 10})).pow(2).mean();
}

/// Gradients of the mean of all ranks' losses, summed in rank order in fp32.
std::map<std::string, at::Tensor> plain_gradients(MixedMlp& module, int count) {
  std::map<std::string, at::Tensor> sums;
  for (int rank = 0; rank < count; ++rank) {
    for (auto& p : module.parameters()) p.mutable_grad().reset();
    const auto loss = loss_of(rank, [&](const at::Tensor& x) { return module.forward(x); });
    torch::autograd::backward({loss}, {});
    for (const auto& entry : module.named_parameters()) {
      const auto raw = entry.value().grad().to(at::kFloat);
      auto& sum = sums[entry.key()];
      sum = sum.defined() ? sum + raw : raw;
    }
  }
  for (auto& [name, sum] : sums) sum = over(sum, count);
  return sums;
}

class ManyRanksOver : public testing::TestWithParam<ThreadBackend> {
 protected:
  int ranks() const { return many(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, ManyRanksOver,
                         testing::Values(ThreadBackend::kInProcess, ThreadBackend::kGloo),
                         [](const auto& one) {
                           return one.param == ThreadBackend::kGloo ? "Gloo" : "InProcess";
                         });

TEST_P(ManyRanksOver, AStepComputesWhatThePlainModuleDoes) {
  MixedMlp plain(7);
  const auto expected = plain_gradients(plain, ranks());
  WorldOptions options;
  options.timeout = seconds(300);
  comm::ThreadRanks all(ranks(), GetParam(), options);
  all.run([&](World& world) {
    PrecisionPolicy policy;
    policy.optimizer.master = MasterRequest::kNone;
    auto handle = fully_shard(std::make_shared<MixedMlp>(7), data_mesh(world), policy);
    SgdOptions sgd;
    sgd.lr = 0.1;
    const auto optimizer = make_sgd(handle, sgd);
    const auto loss = loss_of(world.rank(), [&](const at::Tensor& x) { return handle.forward(x); });
    torch::autograd::backward({loss}, {});
    EXPECT_GT(clip_grad_norm(handle, 0.0), 0.0);
    const bool looks = world.rank() == 0 || world.rank() == lost(ranks());
    handle.visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
      if (!looks) return;
      EXPECT_TRUE(same_bits(gradient, expected.at(name).to(gradient.scalar_type()))) << name;
    });
    optimizer->step();
    handle.visit_full_parameters([&](const std::string& name, const at::Tensor& value) {
      if (!looks) return;
      const auto before = plain.named_parameters()[name].detach();
      EXPECT_TRUE(same_bits(value, before.add(expected.at(name).to(before.scalar_type()), -0.1)))
          << name;
    });
  });
}

TEST(ManyRanks, ARankThatDoesNotComeIsNamed) {
  WorldOptions options;
  options.timeout = seconds(full_proof() ? 20 : 2);
  comm::ThreadRanks all(many(), ThreadBackend::kInProcess, options);
  try {
    all.run([](World& world) {
      comm::barrier(world.control(), "all are here");
      if (world.rank() == lost()) return;
      comm::barrier(world.control(), "step");
    });
    ADD_FAILURE() << "a barrier without one of its ranks";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), Says(concat("for rank ", lost(), ";")));
  }
}

/// The others are connecting to a rank that fails instead: their waits end at once, and the ranks
/// can continue together.
void fail_while_connecting(const std::function<void(comm::Group&)>& send) {
  const int ranks = many(ThreadBackend::kGloo);
  WorldOptions options;
  options.timeout = seconds(300);
  comm::ThreadRanks all(ranks, ThreadBackend::kGloo, options);
  std::atomic<int> begun{0};
  std::atomic<int> ended{0};
  const auto begin = std::chrono::steady_clock::now();
  try {
    all.run([&](World& world) {
      std::vector<int> everyone;
      for (int rank = 0; rank < ranks; ++rank) everyone.push_back(rank);
      const auto group = world.group(everyone, "step control");
      if (world.rank() == lost(ranks)) {
        while (begun < ranks - 1) std::this_thread::yield();
        throw std::runtime_error("no memory");
      }
      ++begun;
      try {
        send(*group);
      } catch (const Error&) {
        ++ended;
        throw;
      }
    });
    ADD_FAILURE() << "a collective without one of its ranks";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), Says("no memory"));
  }
  EXPECT_EQ(ended, ranks - 1);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(100));
  all.run([&](World& world) {
    std::vector<int> everyone;
    for (int rank = 0; rank < ranks; ++rank) everyone.push_back(rank);
    send(*world.group(everyone, "step control"));
  });
}

TEST(ManyRanks, ARankThatFailsWhileRelayingRanksConnectEndsTheirWaits) {
  fail_while_connecting([](comm::Group& group) { comm::barrier(group, "step"); });
}

TEST(ManyRanks, ARankThatFailsWhileAllConnectToAllEndsTheirWaits) {
  fail_while_connecting([](comm::Group& group) {
    comm::Batch batch;
    batch.label.unit = "all at once";
    batch.ops.emplace_back(comm::AllGather{at::zeros({group.size()})});
    group.issue(std::move(batch))->wait();
  });
}

struct Waiting : comm::Blocked {
  void abort() override {}
};

// The watches alone, each with its threads, over one store.
TEST(ManyRanks, ARankWithoutAHeartbeatIsNamedByAnother) {
  const auto store = comm::Store::in_memory();
  std::vector<int> everyone;
  for (int rank = 0; rank < many(); ++rank) everyone.push_back(rank);
  std::promise<std::string> named;
  std::atomic<bool> is_named{false};
  std::atomic<int> wrong{0};
  Waiting wait;
  std::vector<std::shared_ptr<comm::WaitBoard>> boards;
  std::vector<std::unique_ptr<comm::FailureWatch>> watches;
  for (const int rank : everyone) {
    const auto& board = boards.emplace_back(std::make_shared<comm::WaitBoard>());
    board->watch(everyone);
    comm::FailureWatch::Actions actions;
    actions.failed = [&](const std::string&) { ++wrong; };
    actions.disagree = [&](const std::string&, int) { ++wrong; };
    actions.aborted = [](const comm::Abort&, int) {};
    actions.lost = [&](const std::string& why) {
      if (!is_named.exchange(true)) named.set_value(why);
    };
    auto options = comm::watch_options(rank, many());
    options.blocked_after = milliseconds(500);
    watches.push_back(std::make_unique<comm::FailureWatch>(store, board, options, actions));
  }
  for (const auto& board : boards) board->enter(wait);
  auto answer = named.get_future();
  EXPECT_EQ(answer.wait_for(full_proof() ? seconds(60) : seconds(2)), std::future_status::timeout)
      << "all live";
  watches[static_cast<std::size_t>(lost())]->stop();
  ASSERT_EQ(answer.wait_for(seconds(60)), std::future_status::ready);
  EXPECT_EQ(answer.get(), concat("rank ", lost(), " has given no sign of life for 6 s"));
  EXPECT_EQ(wrong, 0);
  for (auto& watch : watches) watch->stop();
  for (const auto& board : boards) board->leave(wait);
}

}  // namespace
}  // namespace tessera::test::many_ranks_test
