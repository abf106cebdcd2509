// Batches that memory does not hold: what is certain is refused before anything is loaded, what is
// found later ends with the key that mends it instead of the allocator's words.
//
// No estimate of what a step takes: that depends on layers, dtypes and recomputation.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::train {

/// A rank's rows of a step.
struct RowsOfRank {
  std::int64_t rows = 0;         ///< loaded when it begins
  std::int64_t micro_batch = 0;  ///< of them, computed together
  std::int64_t tokens = 0;       ///< of a row
  std::int64_t shared_by = 1;    ///< the ranks that compute them, cp
};

/// Bytes of this machine's memory, swap included.
double memory_bytes();
/// Without what is on disk.
double ram_bytes();

/// Bytes of what holds a run.
struct Room {
  double host = 0;  ///< the rows of a step
  /// The memory of the device that computes a micro-batch.
  double computes = 0;
  std::string computes_on = "this machine";  ///< "cuda:0"
};

/// Inputs and targets are int64, a token's logits on this rank (`logits` of them) at least two
/// bytes each. Errors: kConfig naming the key of what alone is more than there is.
void require_room(const RowsOfRank& rows, std::int64_t logits, const Room& room);

/// Also as libtorch says it, which has no type for it on CPUs.
bool is_out_of_memory(const std::exception& error);
/// Whose memory it was, if it was a device's.
struct DeviceThatRanOut {
  std::string name;     ///< "cuda:0"
  std::string doing;    ///< "the forward of unit layers.3"
  double held = 0;      ///< bytes, by tensors
  double peak = 0;      ///< bytes, the most that tensors held
  double reserved = 0;  ///< bytes, the most that the allocator took
};
/// kConfig, names the keys. `error` says how much was asked for.
std::string out_of_memory_text(const RowsOfRank& rows, const std::exception& error,
                               const std::optional<DeviceThatRanOut>& device = std::nullopt);
/// The text for memory that no batch takes: weights, an update. `when`: "before the first step".
std::string out_of_memory_text(std::string_view when, const std::exception& error,
                               const std::optional<DeviceThatRanOut>& device = std::nullopt);

}  // namespace tessera::train
