#include "comm/device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/AutogradState.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "base/environment.h"
#include "base/text/printable.h"
#include "comm/backends/backend.h"
#include "comm/torch_compat.h"
#include "launch/store.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Whether the program is built with the backend for such devices: a libtorch with CUDA has the
/// devices also in a program without it.
bool built_with(c10::DeviceType type) {
  const auto of_its_kind = std::ranges::find(backends(), type, &BackendRow::device);
  return c10::impl::hasDeviceGuardImpl(type) &&
         (of_its_kind == backends().end() || of_its_kind->built_in());
}

int devices_there(c10::DeviceType type) {
  return built_with(type) ? c10::impl::VirtualGuardImpl(type).deviceCount() : 0;
}

c10::Device parsed(const std::string& name) {
  if (name == "auto") return cuda_devices() > 0 ? c10::kCUDA : c10::kCPU;
  try {
    const c10::Device device(name);
    if (device.is_cpu() || at::isAccelerator(device.type())) return device;
  } catch (const c10::Error&) {  // reported below
  }
  throw Error(ErrorKind::kUsage,
              concat("world: found device ", printable(name),
                     ", expected auto, cpu, or an accelerator that libtorch knows, as cuda or "
                     "cuda:0"));
}

}  // namespace

std::optional<int> device_number(int local_rank, int visible) {
  if (visible == 1) return 0;
  return local_rank < visible ? std::optional(local_rank) : std::nullopt;
}

int cuda_devices() { return devices_there(c10::kCUDA); }

std::string device_of_spawned(const std::string& name, const std::string& backend, int ranks,
                              int devices) {
  if (name != "auto" && name != "cuda") return name;
  if (devices == 0 || ranks <= devices) return name;  // 0: device_of_rank says it
  if (devices == 1 && backend == "gloo") return name;
  if (name == "auto" && backend != "nccl") return "cpu";
  throw Error(
      ErrorKind::kUsage,
      concat("world: found ", ranks, " ranks and ", devices, " CUDA device",
             devices == 1 ? "" : "s", " of this host with device ", name,
             ", expected a device for each rank; start at most ", devices,
             " (--nproc, [parallelism]), or set device = \"cpu\" and comm.backend = \"auto\"",
             devices == 1 ? ", or comm.backend = \"gloo\", with which they share it" : ""));
}

c10::Device device_of_rank(const std::string& name, int local_rank) {
  const c10::Device asked = parsed(name);
  if (asked.is_cpu()) return c10::kCPU;
  const int there = devices_there(asked.type());
  const std::string type = c10::DeviceTypeName(asked.type(), /*lower_case=*/true);
  TESSERA_CHECK(built_with(asked.type()), ErrorKind::kUsage, "world: found device ", name,
                ", but this program is built without ", type, "; take cpu, or build it with ", type,
                ", against a libtorch that has it");
  TESSERA_CHECK(there > 0, ErrorKind::kUsage, "world: found device ", name,
                ", but libtorch sees no ", type, " device; take cpu, or see that a driver and a ",
                "device are there, and shown to this program");
  if (asked.has_index()) {
    TESSERA_CHECK(asked.index() < there, ErrorKind::kUsage, "world: found device ", name,
                  ", expected one of ", type, ":0 to ", type, ":", there - 1);
    return asked;
  }
  const auto number = device_number(local_rank, there);
  TESSERA_CHECK(number, ErrorKind::kUsage, "world: found local rank ", local_rank, " and ", there,
                " ", type, " devices, expected a device for each rank of a host; ", "start ", there,
                " ranks on it, or name the one that all take, as ", type, ":0");
  return {asked.type(), static_cast<c10::DeviceIndex>(*number)};
}

DeviceFacts facts_of(c10::Device device) {
  const auto of_its_kind = std::ranges::find(backends(), device.type(), &BackendRow::device);
  return of_its_kind == backends().end() ? DeviceFacts() : of_its_kind->facts(device.index());
}

DeviceMemory memory_of(c10::Device device) {
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return {stats.allocated_bytes[kAll].current, stats.allocated_bytes[kAll].peak,
          stats.reserved_bytes[kAll].peak};
}

void begin_memory_peaks(c10::Device device) {
  at::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}

std::optional<std::int64_t> memory_size(c10::Device device) {
  return compat::memory_size(*at::getDeviceAllocator(device.type()), device.index());
}

void prepare_growing_segments() {
  // libtorch takes the first of these that is set, as a whole.
  constexpr auto kOfCuda = "PYTORCH_CUDA_ALLOC_CONF", kOfAll = "PYTORCH_ALLOC_CONF";
  if (base::environment_variable(kOfCuda) || base::environment_variable(kOfAll)) return;
  base::set_environment_variable(kOfCuda, "expandable_segments:True");
}

void claim_device(Store& store, const std::string& host, const std::string& device, int rank) {
  if (host.empty()) return;
  const std::string mine = concat(rank);
  const std::string first = store.set_if_absent(concat("device/", host, "/", device), mine);
  TESSERA_CHECK(
      first == mine, ErrorKind::kUsage, "world: found ranks ", first, " and ", rank,
      " on one device (", device, " of their host), expected one for each rank; start as ",
      "many ranks on a host as it has devices, each with a local rank of its own, or take ",
      "comm.backend = \"gloo\"");
}

namespace {

// The values are "RANK KIND": of the rank that wrote first, and of the first one with another kind.
constexpr const char* kFirstKind = "device kind";
constexpr const char* kOtherKind = "other device kind";

std::string kind_of(const std::string& said) { return said.substr(said.find(' ') + 1); }
/// "rank 3 on cpu by gloo".
std::string rank_and_kind(const std::string& said) {
  return concat("rank ", said.substr(0, said.find(' ')), " on ", kind_of(said));
}

}  // namespace

void tell_device_kind(Store& store, const std::string& kind, int rank) {
  const std::string mine = concat(rank, " ", kind);
  const std::string first = store.set_if_absent(kFirstKind, mine);
  if (kind_of(first) != kind) store.set_if_absent(kOtherKind, mine);
}

std::string differing_device_kinds(Store& store) {
  const auto other = store.find(kOtherKind);
  if (!other) return "";
  return concat("world: found ", rank_and_kind(store.find(kFirstKind).value_or("")), " and ",
                rank_and_kind(*other), ", expected one kind of device for all ranks; device = ",
                "\"auto\" takes what a host has: see that each shows its devices (driver, ",
                "CUDA_VISIBLE_DEVICES), or set device = \"cpu\"");
}

void use_device(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

namespace {

// Values from cuBLAS's documentation: workspaces of a fixed size for each stream. libtorch takes
// both.
constexpr auto kProductsVariable = "CUBLAS_WORKSPACE_CONFIG";
constexpr auto kProductsAlike = ":4096:8", kProductsAlikeSmall = ":16:8";

}  // namespace

void prepare_deterministic_products() {
  if (!base::environment_variable(kProductsVariable)) {
    base::set_environment_variable(kProductsVariable, kProductsAlike);
  }
}

void take_deterministic_kernels(c10::Device device) {
  if (device.is_cpu()) return;
  if (device.is_cuda()) {
    const auto products = base::environment_variable(kProductsVariable);
    TESSERA_CHECK(products == kProductsAlike || products == kProductsAlikeSmall, ErrorKind::kUsage,
                  "deterministic kernels on ", device.str(), ": found ", kProductsVariable, " ",
                  products ? printable(*products) : "unset", ", expected ", kProductsAlike, " or ",
                  kProductsAlikeSmall, ", without which products vary; set it before the program ",
                  "starts (tessera train does), or debug.deterministic = false");
  }
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

bool backward_stays_here() {
  return !c10::AutogradState::get_tls_state().get_multithreading_enabled();
}

}  // namespace tessera::comm
