// One device for each rank of a host, where a backend wants that.
#include "comm/device.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>

#include "base/environment.h"
#include "comm/backends/backend.h"
#include "launch/store.h"
#include "support/test.h"

namespace tessera::comm::device_test {
namespace {

std::string refusal(Store& store, const std::string& host, const std::string& device, int rank) {
  return refusal_of([&] { claim_device(store, host, device, rank); });
}

TEST(ClaimedDevice, OfTwoRanksOfAHostIsRefusedAndNamesBoth) {
  const auto store = Store::in_memory();
  EXPECT_EQ(refusal(*store, "host", "0000:41:00.0", 1), "");
  EXPECT_EQ(
      refusal(*store, "host", "0000:41:00.0", 3),
      "usage: world: found ranks 1 and 3 on one device (0000:41:00.0 of their host), expected "
      "one for each rank; start as many ranks on a host as it has devices, each with a local "
      "rank of its own, or take comm.backend = \"gloo\"");
}

TEST(ClaimedDevice, OfOtherRanksIsAnotherOneOrOnAnotherHost) {
  const auto store = Store::in_memory();
  EXPECT_EQ(refusal(*store, "host", "0000:41:00.0", 0), "");
  EXPECT_EQ(refusal(*store, "host", "0000:42:00.0", 1), "");
  EXPECT_EQ(refusal(*store, "other host", "0000:41:00.0", 2), "");
  EXPECT_EQ(refusal(*store, "host", "0000:41:00.0", 0), "") << "said again";
}

TEST(ClaimedDevice, OfHostsThatCannotBeToldIsNotCompared) {
  const auto store = Store::in_memory();
  EXPECT_EQ(refusal(*store, "", "0000:41:00.0", 0), "");
  EXPECT_EQ(refusal(*store, "", "0000:41:00.0", 1), "");
}

TEST(DeviceKinds, OfAllRanksAreOneOrTheFirstTwoThatDifferAreNamed) {
  const auto store = Store::in_memory();
  tell_device_kind(*store, "cuda by nccl", 2);
  tell_device_kind(*store, "cuda by nccl", 0);
  EXPECT_EQ(differing_device_kinds(*store), "");
  tell_device_kind(*store, "cpu by gloo", 3);
  tell_device_kind(*store, "cpu by gloo", 1);
  EXPECT_EQ(
      differing_device_kinds(*store),
      "world: found rank 2 on cuda by nccl and rank 3 on cpu by gloo, expected one kind of "
      "device for all ranks; device = \"auto\" takes what a host has: see that each shows its "
      "devices (driver, CUDA_VISIBLE_DEVICES), or set device = \"cpu\"");
}

TEST(DeviceKinds, OfOtherBackendsDiffer) {
  const auto store = Store::in_memory();
  tell_device_kind(*store, "cuda by nccl", 0);
  tell_device_kind(*store, "cuda by gloo", 1);
  EXPECT_NE(differing_device_kinds(*store), "");
}

/// Returns the devices that `ranks` of one host get, or the refusal.
std::string spawned(const std::string& name, const std::string& backend, int ranks, int devices) {
  try {
    return device_of_spawned(name, backend, ranks, devices);
  } catch (const Error& error) {
    return concat(to_string(error.kind()), ": ", error.what());
  }
}

TEST(SpawnedDevices, AreWhatWasAskedForWhereEachRankHasOne) {
  for (const char* name : {"auto", "cpu", "cuda"}) {
    for (const char* backend : {"auto", "gloo", "nccl"}) {
      EXPECT_EQ(spawned(name, backend, 4, 4), name) << backend;
      EXPECT_EQ(spawned(name, backend, 1, 1), name) << backend;
      EXPECT_EQ(spawned(name, backend, 2, 0), name) << "its ranks say that there is none";
    }
  }
}

TEST(SpawnedDevices, OfOneNumberAreSharedByAllRanks) {
  EXPECT_EQ(spawned("cuda:0", "auto", 4, 2), "cuda:0");
  EXPECT_EQ(spawned("cuda:1", "gloo", 4, 3), "cuda:1");
}

TEST(SpawnedDevices, OfAutoAreTheCpuWhereTheyAreTooFew) {
  EXPECT_EQ(spawned("auto", "auto", 2, 1), "cpu");
  EXPECT_EQ(spawned("auto", "auto", 4, 3), "cpu");
  EXPECT_EQ(spawned("auto", "gloo", 4, 3), "cpu");
  EXPECT_EQ(spawned("cpu", "auto", 4, 3), "cpu");
}

TEST(SpawnedDevices, TheOnlyOneIsSharedOverGloo) {
  EXPECT_EQ(spawned("cuda", "gloo", 4, 1), "cuda");
  EXPECT_EQ(spawned("auto", "gloo", 4, 1), "auto");
}

TEST(SpawnedDevices, ThatWereAskedForAndAreTooFewAreRefused) {
  EXPECT_EQ(spawned("cuda", "auto", 4, 1),
            "usage: world: found 4 ranks and 1 CUDA device of this host with device cuda, expected "
            "a device for each rank; start at most 1 (--nproc, [parallelism]), or set device = "
            "\"cpu\" and comm.backend = \"auto\", or comm.backend = \"gloo\", with which they "
            "share it");
  EXPECT_EQ(spawned("cuda", "gloo", 4, 2),
            "usage: world: found 4 ranks and 2 CUDA devices of this host with device cuda, "
            "expected a device for each rank; start at most 2 (--nproc, [parallelism]), or set "
            "device = \"cpu\" and comm.backend = \"auto\"");
  EXPECT_EQ(spawned("auto", "nccl", 2, 1).substr(0, 6), "usage:") << "not the CPU's";
  EXPECT_EQ(spawned("cuda", "nccl", 2, 1).substr(0, 6), "usage:");
}

/// Returns the device that a rank which asks for `name` gets, or the refusal.
std::string device_asked_for(const std::string& name) {
  try {
    return device_of_rank(name, 0).str();
  } catch (const Error& error) {
    return concat(to_string(error.kind()), ": ", error.what());
  }
}

/// CUDA devices as a libtorch with CUDA shows them where a driver is, in any build of the program.
class DevicesOfLibtorch {
 public:
  DevicesOfLibtorch() { place().store(&shown_); }
  ~DevicesOfLibtorch() { place().store(before_); }
  DevicesOfLibtorch(const DevicesOfLibtorch&) = delete;
  DevicesOfLibtorch& operator=(const DevicesOfLibtorch&) = delete;

 private:
  static std::atomic<const c10::impl::DeviceGuardImplInterface*>& place() {
    return c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::kCUDA)];
  }
  const c10::impl::DeviceGuardImplInterface* before_ = place().load();
  c10::impl::FakeGuardImpl<c10::kCUDA> shown_;
};

// Naive: libtorch's devices are taken, for which this program has no backend.
TEST(AskedForDevice, OfAProgramWithoutCudaIsTheCpuOrRefusedForAnyLibtorch) {
  if (backend_named("nccl", c10::kCUDA).built_in()) GTEST_SKIP() << "built with CUDA";
  const auto expect_none = [](const char* libtorch) {
    SCOPED_TRACE(libtorch);
    EXPECT_EQ(cuda_devices(), 0);
    EXPECT_EQ(device_asked_for("auto"), "cpu");
    EXPECT_EQ(device_asked_for("cuda"),
              "usage: world: found device cuda, but this program is built without cuda; take cpu, "
              "or build it with cuda, against a libtorch that has it");
    EXPECT_NE(device_asked_for("cuda:1").find("found device cuda:1, but this program is"),
              std::string::npos);
  };
  expect_none("without CUDA");
  const DevicesOfLibtorch shown;
  expect_none("with CUDA, a driver and devices");
}

TEST(AskedForDevice, WhereLibtorchSeesNoneIsTheCpuOrRefused) {
  if (!backend_named("nccl", c10::kCUDA).built_in() || cuda_devices() > 0) {
    GTEST_SKIP() << "built without CUDA, or there is a device";
  }
  EXPECT_EQ(device_asked_for("auto"), "cpu");
  EXPECT_EQ(device_asked_for("cuda"),
            "usage: world: found device cuda, but libtorch sees no cuda device; take cpu, or see "
            "that a driver and a device are there, and shown to this program");
}

/// Returns what deterministic kernels on CUDA say where the variable of its products is set so.
std::string deterministic_with(const char* products) {
  constexpr auto kName = "CUBLAS_WORKSPACE_CONFIG";
  products == nullptr ? ::unsetenv(kName) : ::setenv(kName, products, /*overwrite=*/1);
  try {
    take_deterministic_kernels(c10::Device(c10::kCUDA, 0));
  } catch (const Error& error) {
    return concat(to_string(error.kind()), ": ", error.what());
  }
  const bool takes = at::globalContext().deterministicAlgorithms();
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  return takes ? "" : "nothing is taken";
}

// Naive: the first product of the run ends it, by libtorch's message.
TEST(DeterministicKernels, OnCudaWantTheVariableOfItsProducts) {
  const std::string refusal =
      "usage: deterministic kernels on cuda:0: found CUBLAS_WORKSPACE_CONFIG ";
  EXPECT_EQ(deterministic_with(nullptr).find(refusal + "unset, expected :4096:8 or :16:8"), 0U);
  EXPECT_EQ(deterministic_with(":0:0").find(refusal + "':0:0', expected :4096:8"), 0U);
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms()) << "nothing is taken by halves";
  EXPECT_EQ(deterministic_with(":16:8"), "");
  EXPECT_EQ(deterministic_with(":4096:8"), "");
}

TEST(GrowingSegments, AreAskedForWhereNoOneHasSaidWhatTheAllocatorIsToDo) {
  constexpr auto kOfCuda = "PYTORCH_CUDA_ALLOC_CONF", kOfAll = "PYTORCH_ALLOC_CONF";
  ::unsetenv(kOfCuda);
  ::setenv(kOfAll, "max_split_size_mb:64", /*overwrite=*/1);
  prepare_growing_segments();
  EXPECT_FALSE(base::environment_variable(kOfCuda)) << "it would come before the user's";
  ::unsetenv(kOfAll);
  prepare_growing_segments();
  EXPECT_EQ(base::environment_variable(kOfCuda), "expandable_segments:True");
  ::setenv(kOfCuda, "expandable_segments:False", /*overwrite=*/1);
  prepare_growing_segments();
  EXPECT_EQ(base::environment_variable(kOfCuda), "expandable_segments:False");
  ::unsetenv(kOfCuda);
}

TEST(DeterministicKernels, TheProgramSetsTheVariableWhereNoOneHas) {
  ::unsetenv("CUBLAS_WORKSPACE_CONFIG");
  prepare_deterministic_products();
  EXPECT_EQ(base::environment_variable("CUBLAS_WORKSPACE_CONFIG"), ":4096:8");
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8", /*overwrite=*/1);
  prepare_deterministic_products();
  EXPECT_EQ(base::environment_variable("CUBLAS_WORKSPACE_CONFIG"), ":16:8");
}

}  // namespace
}  // namespace tessera::comm::device_test
