// ModelContract: the contracts of a model's parameters, buffers and units as one value.
//
// resolve_model_contract is a pure function of (metadata, policy, layout). Its result is printed,
// compared, hashed, and agreed on by all ranks before the first collective. It has every setting
// that changes a number that a run computes; the reasons are not part of the comparison. Next:
// shard.h.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/contract.h"

namespace tessera {

/// The facts about a buffer, a tensor of a module that is neither trained nor sharded.
struct BufferMeta {
  std::string name;                       ///< canonical name
  std::vector<std::int64_t> shape;        ///< the whole buffer, which every rank holds
  DType dtype = DType::kFloat32;          ///< dtype of the tensor as it is
  std::optional<DType> checkpoint;        ///< as ParameterMeta::checkpoint
  std::optional<DType> checkpoint_bulk;   ///< as ParameterMeta::checkpoint_bulk
  std::optional<std::string> strict_pin;  ///< as ParameterMeta::strict_pin
  std::optional<std::string> pin16;       ///< as ParameterMeta::pin16
  bool stored = true;                     ///< whether checkpoints hold it (PyTorch's `persistent`)
  bool computed_table = false;  ///< computed from the config, as RoPE's tables; never cast
};

/// Index into BufferContract::reasons.
enum class BufferField : std::uint8_t {
  kStorage,  ///< BufferContract::storage
  kCompute,  ///< BufferContract::compute
  kCount     ///< number of fields
};

/// The resolved dtypes of one buffer, with a reason for each.
struct BufferContract {
  std::string name;                 ///< canonical name
  std::vector<std::int64_t> shape;  ///< the whole buffer, which every rank holds
  DType storage = DType::kFloat32;  ///< as found, and as checkpoints hold it
  DType compute = DType::kFloat32;  ///< after the one cast that follows loading
  bool stored = true;               ///< whether checkpoints hold it
  /// The reason of each value, by BufferField.
  std::array<std::string, static_cast<std::size_t>(BufferField::kCount)> reasons;

  /// The reason of one value.
  std::string& reason(BufferField field) { return reasons[static_cast<std::size_t>(field)]; }
  /// The reason of one value.
  const std::string& reason(BufferField field) const {
    return reasons[static_cast<std::size_t>(field)];
  }
  bool operator==(const BufferContract&) const = default;
};

/// The facts about a unit before it is resolved.
struct UnitMeta {
  std::string name;     ///< canonical name; "" = the outermost unit
  bool nested = false;  ///< whether it is inside another unit
  /// Its own parameters, without those of inner units, as indices into the model's.
  std::vector<std::size_t> parameters;
  bool casts_inputs = true;           ///< false: its layers cast by themselves
  std::optional<DType> asked_output;  ///< ShardOptions::output_dtype
};

/// Index into UnitContract::reasons.
enum class UnitField : std::uint8_t {
  kInput,       ///< UnitContract::input
  kActivation,  ///< UnitContract::activation
  kOutput,      ///< UnitContract::output
  kCount        ///< number of fields
};

/// The resolved dtypes of one unit, with a reason for each.
struct UnitContract {
  std::string name;            ///< canonical name; "" = the outermost unit
  bool nested = false;         ///< whether it is inside another unit
  std::optional<DType> input;  ///< floating inputs are cast to it; none = no cast
  /// The dtype that its operations are expected to give; none = it has no parameter to derive it
  /// from.
  std::optional<DType> activation;
  std::optional<DType> output;  ///< floating outputs are cast to it; none = no cast
  /// The reason of each value, by UnitField.
  std::array<std::string, static_cast<std::size_t>(UnitField::kCount)> reasons;

  /// The reason of one value.
  std::string& reason(UnitField field) { return reasons[static_cast<std::size_t>(field)]; }
  /// The reason of one value.
  const std::string& reason(UnitField field) const {
    return reasons[static_cast<std::size_t>(field)];
  }
  bool operator==(const UnitContract&) const = default;
};

/// The contracts of a whole model.
struct ModelContract {
  std::vector<GradContract> parameters;  ///< in the model's order
  std::vector<BufferContract> buffers;   ///< in the model's order
  std::vector<UnitContract> units;       ///< in the model's order
  bool operator==(const ModelContract&) const = default;
};

/// Resolves a whole model: parameters as resolve_contracts(), then buffers and units, which follow
/// from them, all in their order. Patterns of rules may match parameters or buffers. Errors: as
/// resolve_contracts(); kContract for a name that two tensors have.
ModelContract resolve_model_contract(const std::vector<ParameterMeta>& parameters,
                                     const std::vector<BufferMeta>& buffers,
                                     const std::vector<UnitMeta>& units,
                                     const PrecisionPolicy& policy, const DataAxes& data);

/// Prints tables of parameters, buffers and units (empty ones are left out), then the reasons by
/// number, as `tessera inspect --contract` does.
std::string to_string(const ModelContract& contract);
/// Prints one line for each value without its reason, "parameter w reduce float32", for ranks to
/// compare.
std::string to_lines(const ModelContract& contract);
/// Returns a hash that is the same on every rank and every machine for equal contracts. It changes
/// with every value and with their order, and does not cover the reasons.
std::uint64_t hash(const ModelContract& contract);

}  // namespace tessera
