// The words of public enumerations (base/text/words.h) that files, options and messages share.
#pragma once

#include "base/text/words.h"
#include "tessera/dtype.h"
#include "tessera/precision.h"
#include "tessera/recompute_mode.h"

namespace tessera {

constexpr auto words_of(Rounding) {
  return std::to_array<Word<Rounding>>(
      {{"nearest_even", Rounding::kNearestEven}, {"half_away", Rounding::kHalfAway}});
}
constexpr auto words_of(FrozenAs) {
  return std::to_array<Word<FrozenAs>>(
      {{"shard", FrozenAs::kShard}, {"replicate", FrozenAs::kReplicate}});
}
constexpr auto words_of(Intrinsic) {
  return std::to_array<Word<Intrinsic>>(
      {{"minority", Intrinsic::kMinority}, {"all", Intrinsic::kAll}, {"none", Intrinsic::kNone}});
}
constexpr auto words_of(NarrowerRequest) {
  return std::to_array<Word<NarrowerRequest>>({{"keep", NarrowerRequest::kKeep},
                                               {"narrow", NarrowerRequest::kNarrow},
                                               {"error", NarrowerRequest::kError}});
}
constexpr auto words_of(MasterRequest) {
  return std::to_array<Word<MasterRequest>>(
      {{"auto", MasterRequest::kAuto}, {"none", MasterRequest::kNone}});
}
/// Orders the modes by how much they keep, most first.
constexpr auto words_of(RecomputeMode) {
  return std::to_array<Word<RecomputeMode>>({{"none", RecomputeMode::kNone},
                                             {"selective", RecomputeMode::kSelective},
                                             {"full", RecomputeMode::kFull}});
}

}  // namespace tessera
