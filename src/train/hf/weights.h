// Weights: read from a folder or drawn, of a sharded model by each rank only the ranges that it
// owns, in any layout; and that a folder holds what config.json describes, from its headers
// alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/tensor_source.h"
#include "layout/local_part.h"
#include "models/description.h"
#include "tessera/contract.h"
#include "tessera/error.h"
#include "tessera/shard.h"
#include "train/hf/model_forms.h"

namespace tessera::train {

struct ModelSource;

/// That the source's folder holds the model's parameters and buffers and no other tensors. Errors:
/// kFormat for a tensor that is missing, has another shape, or that the model does not have; for
/// tensors that one parameter stacks in several dtypes; for a buffer that is not floating.
/// `layer_keys`: FamilyTraits::layer_keys, named where a layer has other tensors.
void check_tensors(const ModelSource& source);
void check_tensors(const TensorSource& folder, const std::vector<models::ParameterSpec>& table,
                   const std::vector<models::BufferSpec>& buffers,
                   std::string_view layer_keys = {});

/// The error for a tensor of the folder ("tensor", "buffer") whose dtype is not one to compute in.
Error not_floating(const TensorSource& folder, std::string_view what, const std::string& name,
                   DType dtype);

/// The same of a checkpoint of adapters, which are float32. Errors: kFormat.
void check_adapters(const ModelSource& source);

/// Verifies every `ranks`-th file of those that have a hash on record, from the `rank`-th on: all
/// of them together each file once. Rank 0 shows how far it is. Errors: as TensorSource::verify().
void verify_weights(const TensorSource& folder, int rank = 0, int ranks = 1);

/// A copy of a piece of a parameter as the folder stores it, 1-D. Errors: kFormat where the folder
/// stores a tied name too, with other values.
at::Tensor read_parameter(const TensorSource& folder, const GradContract& contract,
                          const FileForm& form, const layout::Piece& piece);

/// A copy of the elements [begin, end) of a tensor, 1-D, in its dtype.
at::Tensor read_elements(const TensorSource& folder, const std::string& name, std::int64_t begin,
                         std::int64_t end);

/// Which parameters are filled.
enum class Loaded : std::uint8_t { kModel, kAdapters };

/// Copies the owned range of every parameter of that kind; the folder passed check_tensors or
/// check_adapters. Not collective. Errors: kContract for a value that the dtype it is kept in, or
/// loaded through, cannot hold; kFormat for a value that is not finite in a parameter whose name
/// matches one of `states` (KeepInFloat32::states).
void load_weights(const ShardedBase& model, const TensorSource& folder, const FileForms& forms = {},
                  Loaded what = Loaded::kModel, std::span<const std::string> states = {});

/// Gives every buffer that the folder has its values in the storage dtype; set_loaded() casts them.
/// Not collective.
void load_buffers(const ShardedBase& model, const TensorSource& folder);

/// Units: elements copied at a time; what loading holds in addition to the weights themselves.
inline constexpr std::int64_t kLoadChunk = std::int64_t{1} << 20;

/// Draws the parameters of that kind, all of which the table must have. Element i of parameter p
/// (of the whole one) depends on (seed, p, i) only: drawn in fp32, then cast. Not collective.
void draw_weights(const ShardedBase& model, const std::vector<models::ParameterSpec>& table,
                  std::uint64_t seed, Loaded what = Loaded::kModel);

/// The parameter as a file would hold it in one tensor, of the shape that is cut.
layout::FileShape as_one_tensor(const GradContract& contract);

}  // namespace tessera::train
