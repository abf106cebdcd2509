// Describes a machine by what a rank of a run has of it: operations and bytes a second, memory,
// neighbours. Pure.
//
// It is one value for every forecast: how long a step takes, and whether it fits. Data sheets
// (`h100`, `h200`) and measurements (`tessera measure`) fill it in; a line that neither knows has no
// value. Next: ../train/step_rates.h, which makes times of it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/text/words.h"

namespace tessera::check {

enum class MachineSource : std::uint8_t {
  kPublished,  ///< by those who make it
  kMeasured,   ///< by products, copies and messages that were run on it
};
constexpr auto words_of(MachineSource) {
  return std::to_array<Word<MachineSource>>(
      {{"published", MachineSource::kPublished}, {"measured", MachineSource::kMeasured}});
}

/// Operations a second of one rank in products of matrices, a multiplication and its addition
/// counted as two, by the dtype of the factors.
struct ProductFlops {
  double bfloat16 = 0.0;
  double float32 = 0.0;
  bool operator==(const ProductFlops&) const = default;
};

/// All of one rank. No value: not known.
struct Machine {
  std::string name = {};
  MachineSource source = MachineSource::kPublished;
  ProductFlops flops = {};
  double memory_bandwidth = 0.0;              ///< bytes a second, read and written, of its memory
  std::int64_t memory = 0;                    ///< bytes
  int ranks_per_host = 1;                     ///< as many as the description is of
  std::optional<double> bandwidth = {};       ///< bytes a second that it sends within its host
  std::optional<double> host_bandwidth = {};  ///< bytes a second that it sends to other hosts
  std::optional<double> latency = {};         ///< seconds of a message
  bool operator==(const Machine&) const = default;
};

/// The descriptions that the program knows by name; none for another name.
std::optional<Machine> shipped_machine(std::string_view name);

}  // namespace tessera::check
