// Memory of the simulated device, and the host's.
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <thread>

#include "comm/device.h"
#include "sim/streams.h"
#include "support/test.h"

namespace tessera::sim::memory_test {
namespace {

TEST(Memory, ABlockIsUsedAgainAtOnceByItsStreamAlone) {
  const void* first = at::ones({300}, on(0)).const_data_ptr();
  EXPECT_NE(run_on(new_stream(0), [] { return at::ones({300}, on(0)).const_data_ptr(); }), first);
  EXPECT_EQ(at::ones({300}, on(0)).const_data_ptr(), first);
  const at::Tensor held = at::ones({300}, on(0));
  EXPECT_EQ(held.const_data_ptr(), first);
  EXPECT_NE(at::ones({300}, on(0)).const_data_ptr(), first) << "it is in use";
}

TEST(Memory, NewMemoryHoldsNoNumbers) {
  at::ones({300}, on(0));  // was there before
  EXPECT_TRUE(at::empty({300}, on(0)).isnan().all().item<bool>());
  EXPECT_TRUE(at::empty({3}, on(0, at::kBFloat16)).isnan().all().item<bool>());
  EXPECT_TRUE(at::empty({3}, on(0, at::kLong)).eq(-1).all().item<bool>());
  const at::Tensor pinned = at::empty({3}, at::TensorOptions().pinned_memory(true));
  EXPECT_TRUE(pinned.isnan().all().item<bool>());
}

TEST(Memory, ABlockBelongsToTheCurrentDeviceAndStream) {
  const c10::DeviceGuard there(device(2));
  EXPECT_EQ(at::empty({4}, at::TensorOptions().device(at::kPrivateUse1)).device(), device(2));
  EXPECT_EQ(at::empty({4}, on(3)).device(), device(3));
}

// Until a thread has waited for the stream it is not known to be done: the block stays away, and
// nothing that is launched waits for anything.
TEST(Memory, RecordedStreamsHoldABlockBackAndOrderNothing) {
  const c10::Stream other = new_stream(0);
  const at::Tensor neighbour = at::zeros({8}, on(0));
  wait_for(other, current(0));
  at::Tensor block = at::ones({777}, on(0));
  const void* address = block.const_data_ptr();
  wait_for(other, current(0));
  run_on(other, [&] {
    block.sum();
    neighbour.fill_(1);
  });
  block.record_stream(other);
  block = at::Tensor();
  EXPECT_NE(at::ones({777}, on(0)).const_data_ptr(), address);
  EXPECT_NE(race_of([&] { neighbour.add_(1); }), "") << "recording is no event";
  guard().synchronizeStream(other);
  const at::Tensor one = at::ones({777}, on(0)), two = at::ones({777}, on(0));
  EXPECT_TRUE(one.const_data_ptr() == address || two.const_data_ptr() == address);
}

TEST(Memory, WhatIsHeldAndWhatWasIsCounted) {
  auto* allocator = c10::getDeviceAllocator(c10::DeviceType::PrivateUse1);
  allocator->resetPeakStats(1);
  const std::int64_t before = live_bytes(1);
  {
    const at::Tensor held = at::empty({1 << 18}, on(1));
    EXPECT_EQ(live_bytes(1), before + (1 << 20));
  }
  {
    const at::Tensor smaller = at::empty({(1 << 18) - 4096}, on(1));
    EXPECT_EQ(live_bytes(1), before + (1 << 20) - (1 << 14)) << "in the block of the one before";
  }
  EXPECT_EQ(live_bytes(1), before);
  EXPECT_EQ(peak_bytes(1), before + (1 << 20));
  EXPECT_EQ(allocator->getDeviceStats(1).allocated_bytes[0].peak, peak_bytes(1));
}

// As a step reports it: memory that one stream has freed has no owner, but still counts as taken.
TEST(Memory, WhatTensorsHeldIsNotWhatTheAllocatorTook) {
  constexpr std::int64_t kBytes = std::int64_t{3} << 20;
  c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->emptyCache();
  const c10::Stream streams[] = {new_stream(2), new_stream(2)};
  at::Tensor before = run_on(streams[0], [] { return at::empty({kBytes}, on(2, at::kByte)); });
  before = at::Tensor();
  comm::begin_memory_peaks(device(2));
  const auto begin = comm::memory_of(device(2));
  EXPECT_EQ(begin.peak, begin.held) << "of what comes";
  for (const c10::Stream& stream : streams) {
    run_on(stream, [] { at::empty({kBytes}, on(2, at::kByte)); });
  }
  const auto memory = comm::memory_of(device(2));
  EXPECT_EQ(memory.held, begin.held);
  EXPECT_EQ(memory.peak, begin.held + kBytes);
  EXPECT_EQ(memory.reserved, begin.reserved + kBytes) << "of the second stream";
  EXPECT_GE(memory.reserved, memory.held + 2 * kBytes);
}

TEST(Memory, ADeviceHasASize) {
  const CapacityScope small(1, std::size_t{1} << 30);
  EXPECT_EQ(comm::memory_size(device(1)), std::int64_t{1} << 30);
}

TEST(Memory, ADeviceThatIsFullSaysSo) {
  const std::int64_t live = live_bytes(1);
  const CapacityScope full(1, static_cast<std::size_t>(live) + 4096);
  const at::Tensor fits = at::empty({1024}, on(1));
  try {
    at::empty({1}, on(1));
    FAIL() << "expected that it is refused";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_THAT(std::string(error.what_without_backtrace()),
                Says("Tried to allocate 4 bytes. Expected on sim:1 at most the 0"));
  }
  EXPECT_EQ(at::empty({1024}, on(2)).numel(), 1024) << "the others are not";
  EXPECT_EQ(c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->getMemoryInfo(1).first, 0U);
}

TEST(Memory, AnEmptiedCacheIsForEveryStream) {
  const void* address = at::ones({12345}, on(3)).const_data_ptr();
  c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->emptyCache();
  // Another thread has not waited for the device.
  std::thread([&] { EXPECT_NE(at::ones({12345}, on(3)).const_data_ptr(), address); }).join();
  EXPECT_EQ(run_on(new_stream(3), [] { return at::ones({12345}, on(3)).const_data_ptr(); }),
            address);
}

// Memory goes from one thread to another by the allocator: after what the first one has waited for.
TEST(Memory, WhatAThreadHasWaitedForIsOverForAnyThatTakesItsMemory) {
  for (const bool waits : {true, false}) {
    const c10::Stream other = new_stream(0);
    const std::string race = race_of([&] {
      std::thread([&] {
        const at::Tensor values = at::ones({777}, on(0));
        wait_for(other, current(0));
        run_on(other, [&] { values.mul(2); });
        if (waits) guard().synchronizeStream(other);
      }).join();
      at::full({777}, 3.0, on(0));
    });
    EXPECT_EQ(race.empty(), waits) << race;
  }
}

TEST(Memory, ResizedTensorsKeepTheirValues) {
  at::Tensor values = at::arange(6, on(0));
  values.resize_({4, 3});
  EXPECT_TRUE(at::equal(values.flatten().narrow(0, 0, 6).cpu(), at::arange(6, at::kFloat)));
  at::Tensor out = at::empty({0}, on(0));
  at::add_out(out, values, values);
  EXPECT_EQ(out.sizes(), values.sizes());
  out.resize_({2});
  EXPECT_EQ(out.sum().item<float>(), 2) << "0 + 2: the first two of twice the values";
}

TEST(Memory, CopiesGoBetweenHostAndDevicesInEveryDtypeAndForm) {
  const at::Tensor values = at::arange(24, at::kFloat).view({4, 6});
  for (const at::Tensor& from : {values, values.t(), values.narrow(1, 2, 3)}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      const at::Tensor there = from.to(on(0, dtype));
      EXPECT_TRUE(at::equal(there.cpu(), from.to(dtype)));
      const at::Tensor further = there.to(device(1));
      EXPECT_EQ(further.device(), device(1));
      EXPECT_TRUE(at::equal(further.to(at::kDouble).cpu(), from.to(dtype).to(at::kDouble)));
      const at::Tensor back = at::empty(from.sizes().vec(), at::kDouble).t().contiguous().t();
      back.copy_(there, /*non_blocking=*/true);
      EXPECT_FALSE(at::equal(back, from.to(dtype).to(at::kDouble)));
      guard().synchronizeStream(current(0));
      EXPECT_TRUE(at::equal(back, from.to(dtype).to(at::kDouble)));
    }
  }
}

// As CUDA orders it: both devices' current streams, and no other.
TEST(Memory, ACopyBetweenDevicesIsOrderedOnBothSides) {
  const at::Tensor from = at::ones({16}, on(0)), to = at::zeros({16}, on(1));
  EXPECT_EQ(race_of([&] {
              to.copy_(from);
              from.add_(1);
              to.add_(1);
            }),
            "");
  EXPECT_EQ(to.sum().item<float>(), 32);
  to.add_(1);
  EXPECT_NE(race_of([&] { run_on(new_stream(1), [&] { to.copy_(from); }); }), "");
}

TEST(Memory, LateCopiesOverOnePlaceLandInOrder) {
  const at::Tensor host = at::empty({5000}, at::TensorOptions().pinned_memory(true));
  const at::Tensor values = at::full({5000}, 1.0, on(0));
  host.copy_(values, /*non_blocking=*/true);
  c10::Event first(c10::DeviceType::PrivateUse1);
  first.record(current(0));
  values.fill_(2);
  host.copy_(values, /*non_blocking=*/true);
  guard().synchronizeStream(current(0));
  EXPECT_EQ(host.sum().item<float>(), 10000);
}

// As a pool gives it: memory that a view's storage shows and does not own.
TEST(Memory, StoragesShowMemoryOfOthersUntilItIsTakenAway) {
  const at::Tensor flat = at::arange(8, on(0));
  c10::Storage shown(c10::Storage::use_byte_size_t{}, flat.nbytes(),
                     at::DataPtr(flat.mutable_data_ptr(), device(0)), nullptr, false);
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(shown), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), flat.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(2);
  view.unsafeGetTensorImpl()->set_sizes_contiguous({2, 3});
  view.record_stream(new_stream(0));  // a block without an owner: passed over, as on a GPU
  EXPECT_EQ(view.sum().item<float>(), 2 + 3 + 4 + 5 + 6 + 7);
  at::Tensor parameter = at::zeros({2, 3}).requires_grad_(true);  // made on the CPU
  parameter.set_data(view);
  EXPECT_EQ(parameter.device(), device(0));
  parameter.sum().backward();
  EXPECT_TRUE(at::equal(parameter.grad().cpu(), at::ones({2, 3})));
  view.fill_(1);
  EXPECT_EQ(flat.sum().item<float>(), 0 + 1 + 6);
  view.fill_(2);
  EXPECT_NE(race_of([&] { run_on(new_stream(0), [&] { view.add_(1); }); }), "");
  shown.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_("taken away");
  EXPECT_THAT(refusal_of([&] { view.sum(); }), Says("taken away"));
}

// One column of a matrix with more rows than are followed: what lies between counts, and is said.
TEST(Memory, OfTensorsInVeryManyPiecesTheWholeRangeCounts) {
  const at::Tensor matrix = at::zeros({5000, 2}, on(0));
  const c10::Stream other = new_stream(0);
  wait_for(other, current(0));
  run_on(other, [&] { matrix.select(1, 0).fill_(1); });
  EXPECT_THAT(race_of([&] { matrix.select(1, 1).fill_(1); }),
              Says("taken as the whole range between the first and the last element"));
}

}  // namespace
}  // namespace tessera::sim::memory_test
