// The limits of known devices: refused where they are too little, reported where they are a
// measure.
//
// Pure: who it is says comm/device.h. Next: metrics.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/contract.h"

namespace tessera::train {

/// Floating-point operations a second of dense products in bfloat16, as the maker states them; none
/// for a name that is not in the table.
std::optional<double> peak_flops(std::string_view device_name);

/// `capability` of CUDA, 90 for 9.0; 0: unknown. Errors: kConfig where a parameter computes in
/// bfloat16 or float16 and the device has no products in the one, or no attention in the other.
void require_16_bits(const std::vector<GradContract>& parameters, std::string_view device_name,
                     int capability);

}  // namespace tessera::train
