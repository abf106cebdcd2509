// ModelContract: the contracts of a model's parameters, buffers and units as one value.
//
// resolve_model_contract is a pure function of (metadata, policy, layout). Its result is printed,
// compared, hashed, and agreed on by all ranks before the first collective. Whatever changes a
// number that a run computes stands in it; the reasons beside the values do not count as part of
// them. Next: shard.h.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/contract.h"

namespace tessera {

/// What is known of a buffer: a tensor of a module that is not trained and not sharded.
struct BufferMeta {
  std::string name;                 ///< canonical name
  std::vector<std::int64_t> shape;  ///< whole on every rank
  DType dtype = DType::kFloat32;    ///< of the tensor as it is
  std::optional<DType> checkpoint;  ///< as in ParameterMeta, as the three below
  std::optional<DType> checkpoint_bulk;
  std::optional<std::string> strict_pin, pin16;
  bool stored = true;           ///< checkpoints hold it (PyTorch's `persistent`)
  bool computed_table = false;  ///< made from the configuration, as rope's tables: never cast
};

/// Index into BufferContract::reasons.
enum class BufferField : std::uint8_t { kStorage, kCompute, kCount };

struct BufferContract {
  std::string name;
  std::vector<std::int64_t> shape;
  DType storage = DType::kFloat32;  ///< as found, and as checkpoints hold it
  DType compute = DType::kFloat32;  ///< after the one cast that follows loading
  bool stored = true;
  std::array<std::string, static_cast<std::size_t>(BufferField::kCount)> reasons;

  std::string& reason(BufferField field) { return reasons[static_cast<std::size_t>(field)]; }
  const std::string& reason(BufferField field) const {
    return reasons[static_cast<std::size_t>(field)];
  }
  bool operator==(const BufferContract&) const = default;
};

/// What is known of a unit before it is resolved.
struct UnitMeta {
  std::string name;     ///< "" = the outermost
  bool nested = false;  ///< stands in another unit
  /// Its own parameters (not those of units inside), as indices into the model's.
  std::vector<std::size_t> parameters;
  bool casts_inputs = true;           ///< false: its layers cast by themselves
  std::optional<DType> asked_output;  ///< ShardOptions::output_dtype
};

/// Index into UnitContract::reasons.
enum class UnitField : std::uint8_t { kInput, kActivation, kOutput, kCount };

struct UnitContract {
  std::string name;
  bool nested = false;
  std::optional<DType> input;  ///< floating inputs are cast to it; none = they stay as they come
  /// What its operations are expected to give; none = it has no parameter to tell.
  std::optional<DType> activation;
  std::optional<DType> output;  ///< floating outputs are cast to it; none = they stay as they come
  std::array<std::string, static_cast<std::size_t>(UnitField::kCount)> reasons;

  std::string& reason(UnitField field) { return reasons[static_cast<std::size_t>(field)]; }
  const std::string& reason(UnitField field) const {
    return reasons[static_cast<std::size_t>(field)];
  }
  bool operator==(const UnitContract&) const = default;
};

struct ModelContract {
  std::vector<GradContract> parameters;
  std::vector<BufferContract> buffers;
  std::vector<UnitContract> units;
  bool operator==(const ModelContract&) const = default;
};

/// Resolves a whole model: its parameters as resolve_contracts, and what follows from them for
/// buffers and units, all in their order. Patterns of rules may match parameters or buffers.
/// Errors: as resolve_contracts; also for a name that two tensors have.
ModelContract resolve_model_contract(const std::vector<ParameterMeta>& parameters,
                                     const std::vector<BufferMeta>& buffers,
                                     const std::vector<UnitMeta>& units,
                                     const PrecisionPolicy& policy, const DataAxes& data);

/// Three tables with aligned columns (parameters, buffers, units; empty ones are left out), then
/// the reasons by number: what `tessera inspect --contract` prints.
std::string to_string(const ModelContract& contract);
/// "parameter w reduce float32", a line a value, the reasons left out: what ranks compare.
std::string to_lines(const ModelContract& contract);
/// The same on every rank and every machine for equal contracts; changes with every value in it and
/// with their order (reasons are left out).
std::uint64_t hash(const ModelContract& contract);

}  // namespace tessera
