#include "check/machine.h"

#include <algorithm>
#include <iterator>

namespace tessera::check {
namespace {

// NVIDIA's data sheets of the SXM boards: dense products on tensor cores in bfloat16 and products in
// float32 outside of them; NVLink's 900 GB/s are both directions together. A port of 400 Gb/s for
// each GPU is that of DGX H100 and H200. None says how long a message takes.
const Machine kShipped[] = {
    {.name = "h100",
     .source = MachineSource::kPublished,
     .flops = {.bfloat16 = 989e12, .float32 = 67e12},
     .memory_bandwidth = 3.35e12,
     .memory = 80'000'000'000,
     .ranks_per_host = 8,
     .bandwidth = 450e9,
     .host_bandwidth = 50e9,
     .latency = {}},
    {.name = "h200",
     .source = MachineSource::kPublished,
     .flops = {.bfloat16 = 989e12, .float32 = 67e12},
     .memory_bandwidth = 4.8e12,
     .memory = 141'000'000'000,
     .ranks_per_host = 8,
     .bandwidth = 450e9,
     .host_bandwidth = 50e9,
     .latency = {}},
};

}  // namespace

std::optional<Machine> shipped_machine(std::string_view name) {
  const auto* const found =
      std::ranges::find_if(kShipped, [&](const Machine& one) { return one.name == name; });
  return found == std::end(kShipped) ? std::nullopt : std::optional(*found);
}

}  // namespace tessera::check
