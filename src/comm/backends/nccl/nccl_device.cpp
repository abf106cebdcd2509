#include "comm/backends/nccl/nccl_device.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>
#include <dlfcn.h>

#include <cstdio>

#include "comm/backends/nccl/nccl.h"
#include "comm/device.h"
#include "tessera/error.h"

namespace tessera::comm {

bool nccl_built_in() { return true; }

at::DeviceType nccl_device() { return at::kCUDA; }

DeviceFacts nccl_facts(int device) {
  const cudaDeviceProp& card =
      *at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
  return {card.name, 10 * card.major + card.minor};
}

void require_nccl_device() {
  TESSERA_CHECK(cuda_devices() > 0, ErrorKind::kUsage,
                "comm.backend: found nccl, but there is no CUDA device; use gloo");
}

int version_of_driver() {
  // libtorch has loaded the driver, and does not tell its version.
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == nullptr) return 0;
  const auto ask = reinterpret_cast<int (*)(int*)>(::dlsym(driver, "cuDriverGetVersion"));
  int version = 0;
  const bool said = ask != nullptr && ask(&version) == 0;
  ::dlclose(driver);
  return said ? version : 0;
}

std::string pci_id(c10::Device device) {
  const cudaDeviceProp& card = *at::cuda::getDeviceProperties(device.index());
  char text[32];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x.0", static_cast<unsigned>(card.pciDomainID),
                static_cast<unsigned>(card.pciBusID), static_cast<unsigned>(card.pciDeviceID));
  return text;
}

}  // namespace tessera::comm
