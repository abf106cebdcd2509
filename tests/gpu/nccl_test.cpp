// Groups of the NCCL backend with one rank, which is all that one card can have: every operation,
// alone and together in a batch, on the group's stream, as the same ops of one rank on the CPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <chrono>

#include "base/environment.h"
#include "comm/backends/backend.h"
#include "comm/batch.h"
#include "comm/device.h"
#include "comm/stream.h"
#include "support/test.h"
#include "tessera/log_level.h"

namespace tessera::gpu_nccl_test {
namespace {

using comm::Batch;
using comm::Into;
using comm::Op;

const at::Device kCard(at::kCUDA, 0);

class OneRank : public testing::Test {
 protected:
  void TearDown() override {
    if (connections_) connections_->close();
  }
  /// Here and not in SetUp(): without a card the test is skipped before.
  comm::Group& group() {
    if (group_) return *group_;
    comm::use_device(kCard);
    const auto& row = comm::backend_named("nccl", at::kCUDA);
    connections_ = row.open({});
    group_ = connections_->make_group({.name = "ranks 0",
                                       .ranks = {0},
                                       .rank = 0,
                                       .device = kCard,
                                       .options = {},
                                       .store = comm::Store::in_memory(),
                                       .abort_flag = std::make_shared<comm::AbortFlag>(),
                                       .board = std::make_shared<comm::WaitBoard>()});
    group_->use_stream(comm::Stream::make(kCard), nullptr);
    return *group_;
  }

  const comm::Connections& connections() const { return *connections_; }

  static at::Tensor draw(std::uint64_t seed, at::ScalarType dtype, std::int64_t numel = 4099) {
    return at::randn({numel}, at::make_generator<at::CPUGeneratorImpl>(seed)).to(dtype);
  }

  /// Runs `make` of the tensors on the card and, as run_alone() does, on the CPU: the same bits.
  template <class Make>
  void expect_as_alone(const std::string& what, const std::vector<at::Tensor>& tensors,
                       const Make& make) {
    const auto batch_of = [&](const std::vector<at::Tensor>& given) {
      Batch batch;
      batch.label.unit = what;
      batch.ops = make(given);
      return batch;
    };
    std::vector<at::Tensor> here, there;
    for (const at::Tensor& one : tensors) {
      here.push_back(one.clone());
      there.push_back(one.to(kCard, one.scalar_type(), false, /*copy=*/true));
    }
    comm::run_alone(batch_of(here));
    group().issue(batch_of(there))->wait();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(at::equal(there[i].cpu(), here[i])) << what << ", tensor " << i;
    }
  }

 private:
  std::unique_ptr<comm::Connections> connections_;
  std::shared_ptr<comm::Group> group_;
};

TEST_F(OneRank, GathersAndSendsToItself) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
    expect_as_alone("gather", {draw(1, dtype)},
                    [](const auto& in) { return std::vector<Op>{comm::AllGather{in[0]}}; });
    expect_as_alone("broadcast", {draw(2, dtype)},
                    [](const auto& in) { return std::vector<Op>{comm::Broadcast{in[0], 0}}; });
    expect_as_alone("all-to-all", {draw(3, dtype), draw(4, dtype)}, [](const auto& in) {
      return std::vector<Op>{comm::AllToAll{in[0], {4099}, in[1], {4099}}};
    });
  }
}

// Naive: NCCL has no integers of 16 bits.
TEST_F(OneRank, MovesWhatItCannotAdd) {
  for (const auto dtype : {at::kShort, at::kInt, at::kChar, at::kByte, at::kBool, at::kHalf}) {
    expect_as_alone("gather", {draw(1, dtype)},
                    [](const auto& in) { return std::vector<Op>{comm::AllGather{in[0]}}; });
    expect_as_alone("broadcast", {draw(2, dtype)},
                    [](const auto& in) { return std::vector<Op>{comm::Broadcast{in[0], 0}}; });
  }
}

TEST_F(OneRank, SumsInTheDtypeThatTravelsAndInAWiderOne) {
  for (const auto wire : {at::kFloat, at::kBFloat16}) {
    for (const auto into : {Into::kOverwrite, Into::kAdd}) {
      expect_as_alone("reduce-scatter", {draw(1, wire), draw(2, at::kFloat)}, [&](const auto& in) {
        return std::vector<Op>{comm::ReduceScatter{in[0], in[1], into}};
      });
    }
    expect_as_alone("all-reduce", {draw(3, wire), draw(4, at::kFloat)},
                    [](const auto& in) { return std::vector<Op>{comm::AllReduce{in[0], in[1]}}; });
    expect_as_alone("all-reduce in place", {draw(3, wire)},
                    [](const auto& in) { return std::vector<Op>{comm::AllReduce{in[0]}}; });
  }
}

TEST_F(OneRank, OpsOfABatchGoOutTogether) {
  expect_as_alone(
      "together",
      {draw(1, at::kFloat), draw(2, at::kBFloat16), draw(3, at::kFloat), draw(4, at::kBFloat16)},
      [](const auto& in) {
        return std::vector<Op>{comm::AllGather{in[0]},
                               comm::ReduceScatter{in[1], in[2], Into::kAdd},
                               comm::AllGather{in[3]}};
      });
}

TEST_F(OneRank, ManyUnderWayAreWaitedForLater) {
  std::vector<std::unique_ptr<comm::Work>> works;
  std::vector<at::Tensor> results;
  for (int i = 0; i < 50; ++i) {
    at::Tensor sums = at::zeros({1 << 20}, at::TensorOptions(kCard));
    Batch batch;
    batch.label.unit = "many";
    batch.ops = {comm::ReduceScatter{at::full_like(sums, i), sums, Into::kAdd}};
    works.push_back(group().issue(std::move(batch)));
    results.push_back(sums);
  }
  for (const auto& work : works) work->wait();
  for (int i = 0; i < 50; ++i)
    EXPECT_TRUE((results[static_cast<std::size_t>(i)] == i).all().item<bool>());
}

// Naive: a communicator's destructor ends what still runs, and prints a warning.
TEST_F(OneRank, WhatIsUnderWayEndsBeforeItsConnectionsAreClosed) {
  const at::Tensor sums = at::zeros({1 << 26}, at::TensorOptions(kCard));
  Batch batch;
  batch.label.unit = "under way";
  batch.ops = {comm::ReduceScatter{at::ones_like(sums), sums, Into::kAdd}};
  const auto work = group().issue(std::move(batch));
  set_log_level(LogLevel::kWarn);
  testing::internal::CaptureStderr();
  TearDown();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  work->wait();
  EXPECT_TRUE((sums == 1).all().item<bool>());
}

TEST_F(OneRank, CannotBeRecovered) {
  group();
  EXPECT_THROW(connections().require_recovery(), Error);
}

TEST_F(OneRank, SetsForNcclWhatTheUserHasNotSet) {
  constexpr auto kOrder = "NCCL_LAUNCH_ORDER_IMPLICIT";
  const auto before = base::environment_variable(kOrder);
  base::set_environment_variable(kOrder, "0");
  group();
  EXPECT_EQ(base::environment_variable(kOrder), "0");
  EXPECT_EQ(base::environment_variable("TORCH_NCCL_DUMP_ON_TIMEOUT"), "0");
  base::set_environment_variable(kOrder, before.value_or("1"));
}

TEST(TwoRanksOnOneCard, AreRefusedByNccl) {
  const auto store = comm::Store::in_memory();
  comm::claim_device(*store, "host", "0000:01:00.0", 0);
  try {
    comm::claim_device(*store, "host", "0000:01:00.0", 1);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), Says("ranks 0 and 1 on one device"));
  }
}

}  // namespace
}  // namespace tessera::gpu_nccl_test
