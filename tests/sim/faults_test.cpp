// Each fault that a GPU shows now and then, planted: it is found every time, and the correct
// program next to it reports nothing.
#include <ATen/ATen.h>

#include <latch>
#include <optional>
#include <thread>

#include "sim/streams.h"
#include "support/test.h"

namespace tessera::sim::faults_test {
namespace {

enum class Plant { kNothing, kNoRecord, kNoBlock };

/// A separate stream fills what the current one made, and the current one reads it.
void fill_and_read(Plant before, Plant after) {
  const c10::Stream compute = current(0), gather = new_stream(0);
  const auto order = [](const c10::Stream& waiting, const c10::Stream& other, Plant plant) {
    c10::Event event(c10::DeviceType::PrivateUse1);
    if (plant != Plant::kNoRecord) event.record(other);
    if (plant != Plant::kNoBlock) event.block(waiting);
  };
  const at::Tensor buffer = at::zeros({64}, on(0));
  order(gather, compute, before);
  run_on(gather, [&] { buffer.fill_(2); });
  order(compute, gather, after);
  EXPECT_EQ((buffer + 1).sum().item<float>(), 192);
}

TEST(Faults, EventsThatAreRecordedAndWaitedForOrder) {
  EXPECT_EQ(race_of([] { fill_and_read(Plant::kNothing, Plant::kNothing); }), "");
}

TEST(Faults, AMissingRecordIsFound) {
  EXPECT_THAT(race_of([] { fill_and_read(Plant::kNoRecord, Plant::kNothing); }),
              Says("fill_.Scalar writes on sim:0 stream ", " what zero_ ",
                   "writes on sim:0 stream 0: nothing orders the two"));
  EXPECT_THAT(race_of([] { fill_and_read(Plant::kNothing, Plant::kNoRecord); }),
              Says("reads on sim:0 stream 0 what fill_.Scalar writes on sim:0 stream ",
                   "record an event behind the one"));
}

TEST(Faults, AMissingBlockIsFound) {
  EXPECT_THAT(race_of([] { fill_and_read(Plant::kNoBlock, Plant::kNothing); }), Says("race: "));
  EXPECT_THAT(race_of([] { fill_and_read(Plant::kNothing, Plant::kNoBlock); }), Says("race: "));
}

// An event stands where it was recorded last, not where it was made.
TEST(Faults, AnEventThatIsRecordedTooEarlyIsFound) {
  const c10::Stream compute = current(0), other = new_stream(0);
  const at::Tensor values = at::zeros({8}, on(0));
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(compute);
  values.add_(1);
  event.block(other);
  const auto read = [&] { run_on(other, [&] { values.clone(); }); };
  EXPECT_THAT(race_of(read), Says("what add.out"));
  event.record(compute);
  event.block(other);
  EXPECT_EQ(race_of(read), "");
}

TEST(Faults, SlicesOfOneStorageAreApart) {
  const at::Tensor flat = at::zeros({128}, on(0));
  const c10::Stream other = new_stream(0);
  wait_for(other, current(0));
  run_on(other, [&] { flat.narrow(0, 0, 64).fill_(1); });
  EXPECT_EQ(race_of([&] { flat.narrow(0, 64, 64).fill_(2); }), "");
  EXPECT_NE(race_of([&] { flat.narrow(0, 63, 2).fill_(3); }), "") << "one element of the other's";
  const at::Tensor matrix = at::zeros({16, 16}, on(0));
  wait_for(other, current(0));
  run_on(other, [&] { matrix.narrow(1, 0, 8).fill_(1); });
  EXPECT_EQ(race_of([&] { matrix.narrow(1, 8, 8).fill_(2); }), "") << "columns lie in turns";
  EXPECT_NE(race_of([&] { matrix.select(1, 7).fill_(2); }), "");
}

TEST(Faults, ReadsAreNotOrderedAndNeedNotBe) {
  const at::Tensor values = at::ones({32}, on(0));
  const c10::Stream other = new_stream(0);
  wait_for(other, current(0));
  EXPECT_EQ(race_of([&] {
              run_on(other, [&] { values.sum(); });
              values.sum();
            }),
            "");
  EXPECT_THAT(race_of([&] { values.add_(1); }), Says("writes on sim:0 stream 0 what sum"));
}

/// A block is freed while another stream reads it, and the next one made is the same.
void use_again(bool wait, bool recorded) {
  const c10::Stream compute = current(0), other = new_stream(0);
  {
    const at::Tensor temporary = at::ones({1000}, on(0));
    wait_for(other, compute);
    run_on(other, [&] { temporary.sum(); });
    if (recorded) temporary.record_stream(other);
    if (wait) wait_for(compute, other);
  }
  at::zeros({1000}, on(0));
}

TEST(Faults, MemoryThatIsUsedAgainTooEarlyIsFound) {
  EXPECT_EQ(race_of([] { use_again(/*wait=*/true, /*recorded=*/false); }), "");
  EXPECT_THAT(race_of([] { use_again(/*wait=*/false, /*recorded=*/false); }),
              Says("writes on sim:0 stream 0 what sum"));
  EXPECT_EQ(race_of([] { use_again(/*wait=*/false, /*recorded=*/true); }), "");
}

// A result is made when its operation runs, in memory that another stream may read.
TEST(Faults, AResultInMemoryThatIsStillReadIsFound) {
  const auto make = [](bool wait) {
    const c10::Stream compute = current(0), other = new_stream(0);
    const at::Tensor some = at::ones({100}, on(0));
    {
      const at::Tensor temporary = at::ones({100}, on(0, at::kLong));
      wait_for(other, compute);
      run_on(other, [&] { temporary.sum(); });
      if (wait) wait_for(compute, other);
    }
    EXPECT_EQ(at::nonzero(some).size(0), 100);
  };
  EXPECT_EQ(race_of([&] { make(/*wait=*/true); }), "");
  EXPECT_THAT(race_of([&] { make(/*wait=*/false); }),
              Says("nonzero writes on sim:0 stream 0 what sum"));
}

/// The input of a kernel on another stream goes out of its scope, and something else is computed.
void drop_input(bool keep_until_done) {
  const c10::Stream compute = current(0), reduce = new_stream(0);
  std::optional<at::Tensor> gradient = at::ones({500}, on(0));
  wait_for(reduce, compute);
  const at::Tensor sum = run_on(reduce, [&] { return *gradient * 2; });
  if (!keep_until_done) gradient.reset();
  at::Tensor next = at::full({500}, 3.0, on(0));
  wait_for(compute, reduce);
  gradient.reset();
  next = at::full({500}, 4.0, on(0));
  EXPECT_EQ(sum.sum().item<float>(), 1000);
}

TEST(Faults, AnInputThatIsFreedBeforeItsReaderIsDoneIsFound) {
  EXPECT_EQ(race_of([] { drop_input(/*keep_until_done=*/true); }), "");
  EXPECT_THAT(race_of([] { drop_input(/*keep_until_done=*/false); }),
              Says("writes on sim:0 stream 0 what mul"));
}

TEST(Faults, AHostThatReadsTooEarlySeesNoNumbers) {
  const at::Tensor values = at::full({4}, 7.0, on(0));
  const at::Tensor early = at::zeros({4}), late = at::zeros({4});
  early.copy_(values, /*non_blocking=*/true);
  EXPECT_TRUE(early.isnan().all().item<bool>());
  late.copy_(values, /*non_blocking=*/true);
  c10::Event behind(c10::DeviceType::PrivateUse1);
  behind.record(current(0));
  behind.synchronize();
  EXPECT_TRUE(late.eq(7).all().item<bool>());
  EXPECT_TRUE(early.eq(7).all().item<bool>()) << "what is waited for lands with all before it";
}

// Naive: memory of ones is what some integers are, and a truth.
TEST(Faults, AHostThatReadsTooEarlySeesNoIntegerThatComes) {
  for (const bool pinned : {false, true}) {
    for (const auto dtype : {at::kLong, at::kInt, at::kByte, at::kBool}) {
      const at::Tensor comes = at::arange(-3, 3, at::kLong).to(dtype);
      const at::Tensor buffer = at::zeros({60}, at::TensorOptions(dtype).pinned_memory(pinned));
      const at::Tensor host = buffer.narrow(0, 7, 6);  // less than a page: it can be read
      host.copy_(comes.to(device(0)), /*non_blocking=*/true);
      EXPECT_FALSE(host.eq(comes).any().item<bool>()) << dtype << (pinned ? ", pinned" : "");
      guard().synchronizeStream(current(0));
      EXPECT_TRUE(at::equal(host, comes));
    }
  }
}

// An event of before the copy, or of another stream, is not behind it.
TEST(Faults, AHostThatWaitsForAnotherEventSeesNoNumbers) {
  const at::Tensor values = at::full({4}, 7.0, on(0)), host = at::zeros({4});
  c10::Event before(c10::DeviceType::PrivateUse1), behind(c10::DeviceType::PrivateUse1);
  before.record(current(0));
  host.copy_(values, /*non_blocking=*/true);
  before.synchronize();
  guard().synchronizeStream(new_stream(0));
  EXPECT_TRUE(host.isnan().all().item<bool>());
  behind.record(current(0));
  EXPECT_TRUE(behind.query());
  EXPECT_TRUE(host.eq(7).all().item<bool>()) << "an event that was asked and is over is behind it";
}

TEST(Faults, ASourceThatIsWrittenBeforeItsUploadIsOverIsFound) {
  const auto upload = [](bool wait) {
    const at::Tensor host = at::ones({8}, at::TensorOptions().pinned_memory(true));
    EXPECT_TRUE(host.is_pinned());
    const at::Tensor values = at::empty({8}, on(0)).copy_(host, /*non_blocking=*/true);
    if (wait) guard().synchronizeStream(current(0));
    host.fill_(2);
    guard().synchronizeStream(current(0));
    EXPECT_EQ(values.sum().item<float>(), 8);
  };
  EXPECT_EQ(race_of([&] { upload(/*wait=*/true); }), "");
  EXPECT_THAT(race_of([&] { upload(/*wait=*/false); }),
              Says("upload: its source in pinned memory was written"));
}

TEST(Faults, AWrongDeviceIsFound) {
  const at::Tensor here = at::ones({4}, on(0)), there = at::ones({4}, on(1));
  EXPECT_THAT(refusal_of([&] { here + there; }), Says("devices, sim:0 and sim:1"));
  EXPECT_THAT(refusal_of([&] { at::dot(here, there); }),
              Says("dot: found tensors on sim:0 and sim:1", "copy them"));
  EXPECT_EQ((here + there.to(device(0))).sum().item<float>(), 8);
  EXPECT_THAT(refusal_of([&] {
                c10::Event event(c10::DeviceType::PrivateUse1);
                event.record(current(0));
                event.record(current(1));
              }),
              Says("expected those of one device"));
}

// Two ranks, and a sum by tensor operations of rank 0 on its group's stream over both inputs.
std::string sum_over_ranks(bool rank_1_records) {
  std::string text;
  at::Tensor inputs[2];
  c10::Event ready[2] = {c10::Event(c10::DeviceType::PrivateUse1),
                         c10::Event(c10::DeviceType::PrivateUse1)};
  std::latch posted(2);
  const auto serve = [&](int rank) {
    const RankScope scope(rank);
    const c10::DeviceGuard mine(device(rank));
    inputs[rank] = at::full({16}, rank + 1.0, on(rank));
    if (rank == 0 || rank_1_records) ready[rank].record(current(rank));
    posted.arrive_and_wait();
    if (rank != 0) return;
    const c10::Stream group = new_stream(0);
    ready[0].block(group);
    ready[1].block(current(1));  // a copy between devices runs on its source's stream
    text = race_of([&] {
      const at::Tensor sum = run_on(group, [&] { return inputs[0] + inputs[1].to(device(0)); });
      wait_for(current(0), group);
      EXPECT_EQ(sum.sum().item<float>(), 48);
    });
  };
  // Each rank has streams of its own on its device, or the stream alone would order them.
  std::thread other([&] {
    const c10::StreamGuard own(new_stream(1));
    serve(1);
  });
  serve(0);
  other.join();
  return text;
}

TEST(Faults, AnUnorderedInputOfACollectiveIsFound) {
  EXPECT_EQ(sum_over_ranks(/*rank_1_records=*/true), "");
  EXPECT_THAT(
      sum_over_ranks(/*rank_1_records=*/false),
      Says("copy_ reads on sim:1 stream 0 of rank 0 what ", "of rank 1: nothing orders the two"));
}

// A race whose exception somebody swallowed is still there.
TEST(Faults, RacesAreKept) {
  const at::Tensor values = at::ones({8}, on(0));
  try {
    run_on(new_stream(0), [&] { values.add_(1); });
  } catch (...) {
  }
  EXPECT_EQ(take_races().size(), 1U);
  EXPECT_EQ(take_races().size(), 0U);
}

using FaultsDeathTest = testing::Test;

TEST(FaultsDeathTest, AHostAccessOfDeviceMemoryFaults) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const at::Tensor values = at::full({4}, 3.0, on(1));
        volatile float value = *static_cast<const float*>(values.const_data_ptr());
        (void)value;
      },
      testing::ExitedWithCode(134),
      "the host accesses device memory: a block of 512 bytes of sim:1, last written by "
      "fill_.Scalar; copy it to the host first");
  const at::Tensor on_host = at::full({4}, 3.0, on(1)).cpu();
  EXPECT_EQ(*static_cast<const float*>(on_host.const_data_ptr()), 3.0F);
}

TEST(FaultsDeathTest, PinnedMemoryIsUnreadableUntilItsCopyLands) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto read = [](bool wait) {
    const at::Tensor host = at::empty({5000}, at::TensorOptions().pinned_memory(true));
    host.copy_(at::full({5000}, 3.0, on(0)), /*non_blocking=*/true);
    if (wait) guard().synchronizeStream(current(0));
    return static_cast<const float*>(host.const_data_ptr())[4999];
  };
  EXPECT_EXIT(read(/*wait=*/false), testing::ExitedWithCode(134),
              "the host accesses pinned memory before a copy from the device has arrived");
  EXPECT_EQ(read(/*wait=*/true), 3.0F);
}

}  // namespace
}  // namespace tessera::sim::faults_test
