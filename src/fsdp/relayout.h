// Relayout: a unit's parameters in the buckets that their changed contracts ask for, and the bytes
// on their way there.
//
// First every rank lays the unit out anew (no communication), then what lay elsewhere travels in
// one all-to-all among the ranks of a shard group; replicas do the same among themselves. What is
// sent follows from the two plans, which all ranks know. Next: trainable.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/runtime/unit.h"
#include "layout/range.h"

namespace tessera::fsdp {

/// A parameter whose elements lie elsewhere than before.
struct Relaid {
  Parameter* parameter = nullptr;
  AxesGroups on;                    ///< the ranks that share it
  std::vector<layout::Move> moves;  ///< between them
  layout::Range before, after;      ///< what this rank held and holds
  std::uint32_t old_version = 0;    ///< of the shard, which has a new one now
  at::Tensor old_shard;             ///< [before]; the new one is parameter->shard, [after], zeros
};

/// Gives the unit the buckets that its parameters' contracts name now. Buckets that come out as
/// they were keep their memory. The unit must be released, without gradients under way.
std::vector<Relaid> lay_out_anew(Unit& unit);

/// Values over the elements of one relaid parameter.
struct Carried {
  const Relaid* parameter = nullptr;
  at::Tensor from;  ///< [before]
  at::Tensor to;    ///< [after]; other dtypes are converted
};

/// Fills every `to`. Collective over the shard groups. Errors: kComm.
void carry(Runtime& runtime, const Unit& unit, const std::vector<Carried>& all);

}  // namespace tessera::fsdp
