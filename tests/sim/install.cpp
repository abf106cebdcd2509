#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>

#include "sim/guard.h"
#include "sim/hooks.h"
#include "sim/memory.h"
#include "sim/operations.h"
#include "sim/sim.h"
#include "sim/simulator.h"

namespace tessera::sim {

void install(int devices) {
  map_memory();
  register_guard(devices);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory());
  register_hooks();
  c10::register_privateuse1_backend("sim");
  register_single_operations();
}

void settle() {
  if (!why_broken().empty()) restart();
  device_memory().emptyCache();  // waits for every device
  restart();
}

}  // namespace tessera::sim
