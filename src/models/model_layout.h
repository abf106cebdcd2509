// Model layout: how the ranks of one replica share the tensors of a model beyond the data axes, as
// values.
//
// Pure. Every tensor of a family has a role in its layer (its weight is cut by columns, by rows,
// over experts ...); role and degrees give its ParameterLayout, from which the contract derives
// what the sink owes. The modules declare the same (nn/, moe/); that they agree is checked when the
// model is sharded. Source: the matrix of torchtitan's layouts, docs/communication.md. Next:
// tessera/placement.h, local_sizes.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "models/model_degrees.h"
#include "models/parameter_table.h"
#include "tessera/placement.h"

namespace tessera::models {

/// What a tensor is to the ranks of tp or of the experts.
enum class TensorRole : std::uint8_t {
  kColumn,      ///< dim 0 cut over tp: its outputs are a part of all
  kRow,         ///< dim 1 cut over tp: its inputs are
  kKeyValue,    ///< dim 0 cut by key and value heads, which are copied where they are fewer than tp
  kInside,      ///< whole, used on what differs between ranks: gradients are partial
  kStream,      ///< whole, used on the tokens between layers
  kEverywhere,  ///< whole, and every rank computes the same with it
  kExpertIn,    ///< an expert's first product: cut over experts, and over its inner size by etp
  kExpertOut,   ///< an expert's second product
  kExpertSum,   ///< added to what an expert gives: cut over experts only
};

/// Of a parameter's name, adapters included. Errors: kInternal for a name that no family has.
TensorRole role_of(std::string_view name);

/// Errors: kConfig naming the key of [parallelism], what was found and what would divide.
void check_degrees(const ModelSpec& spec, const ModelDegrees& degrees);

/// Of one row of the table. check_degrees has passed.
ParameterLayout layout_of(const ModelSpec& spec, const ParameterSpec& row,
                          const ModelDegrees& degrees);

}  // namespace tessera::models
