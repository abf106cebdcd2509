// Describes a machine by what a rank of a run has of it: operations and bytes a second, memory,
// neighbours. Pure.
//
// It is one value for every forecast: how long a step takes, and whether it fits. Data sheets
// (`h100`, `h200`) and measurements (`tessera measure`) fill it in; what neither knows has no
// value, and no line in a file. Next: ../cli/planned_machine.h, which makes one of the options of a
// command.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/text/fields.h"
#include "base/text/words.h"
#include "tessera/dtype.h"

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
  /// Products of 16 bits have one rate, all others that of float32.
  double of(DType dtype) const;
  bool operator==(const ProductFlops&) const = default;
};

/// The range of an amount of bytes, or of bytes a second: a number, or a text as "80GiB".
struct Bytes {
  double min = 1.0;
  double max = 1e18;
};

/// All of one rank.
struct Machine {
  std::string name = {};
  MachineSource source = MachineSource::kPublished;
  std::optional<std::int64_t> memory = {};      ///< bytes
  std::optional<double> memory_bandwidth = {};  ///< bytes a second of it, read and written
  std::optional<int> ranks_per_host = {};
  std::optional<double> bandwidth = {};       ///< bytes a second that it sends within its host
  std::optional<double> host_bandwidth = {};  ///< bytes a second that it sends to other hosts
  std::optional<double> latency = {};         ///< seconds of a message of no bytes
  std::optional<ProductFlops> flops = {};
  bool operator==(const Machine&) const = default;
};

inline constexpr NumberRange kFlops{1.0, 1e21};

template <class V>
constexpr void fields(V& visit, Of<ProductFlops>) {
  visit("bfloat16", &ProductFlops::bfloat16, kFlops);
  visit("float32", &ProductFlops::float32, kFlops);
}

/// A number alone is bytes: no machine has so few.
template <class V>
constexpr void fields(V& visit, Of<Machine>) {
  constexpr Bytes kMemory{1e6, 1e15};
  constexpr Bytes kRate{1e3, 1e18};
  visit("name", &Machine::name, TextLimit{100, Letters::kPrintable});
  visit("source", &Machine::source);
  visit({"memory", Missing::kLeftOut}, &Machine::memory, kMemory);
  visit({"memory_bandwidth", Missing::kLeftOut}, &Machine::memory_bandwidth, kRate);
  visit({"ranks_per_host", Missing::kLeftOut}, &Machine::ranks_per_host, IntRange{1, 4096});
  visit({"bandwidth", Missing::kLeftOut}, &Machine::bandwidth, kRate);
  visit({"host_bandwidth", Missing::kLeftOut}, &Machine::host_bandwidth, kRate);
  visit({"latency", Missing::kLeftOut}, &Machine::latency, NumberRange{0.0, 1e3});
  visit({"flops", Missing::kLeftOut}, &Machine::flops);
}

/// Those that the program knows by name; none for another name.
std::optional<Machine> shipped_machine(std::string_view name);
std::vector<std::string> shipped_machines();

inline constexpr std::int64_t kMostMachineBytes = 1 << 16;

/// TOML, which parse_machine() reads as the same value. `comments` stand before it, a line each.
std::string to_toml(const Machine& machine, const std::vector<std::string>& comments = {});
/// `source` names the file in messages. Errors: kConfig with the line for what is no TOML, for an
/// unknown key with the nearest one, a value of another type or out of its range; kConfig for a key
/// that is missing.
Machine parse_machine(std::string_view text, std::string_view source);

}  // namespace tessera::check
