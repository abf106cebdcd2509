// Rows of the truth table of dtypes: what a file stores and a user asks for, and what must become
// of it. truth_table_test.cpp runs them.
#pragma once

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/contract.h"

namespace tessera::golden {

/// One row: the tensors row.first and row.second, which a file holds together with more elements of
/// `bulk` dtype.
struct TruthRow {
  std::string name;
  std::optional<DType> checkpoint;  ///< none = from scratch: values are drawn
  std::optional<DType> requested;   ///< [precision] storage_dtype
  DType storage = DType::kFloat32;
  DType compute = DType::kFloat32;
  Master master = Master::kStorage;
  DType bulk = DType::kBFloat16;
  bool frozen_first = false;  ///< row.first is frozen; row.second is trained all the same
  bool has_policy = true;     ///< param_dtype bfloat16, reduce_dtype float32
  std::function<void(PrecisionPolicy&)> also = nullptr;
  std::optional<DType> storage_of_first = {};  ///< where it differs: whole on every rank

  PrecisionPolicy policy() const {
    PrecisionPolicy policy;
    if (has_policy) {
      policy.param_dtype = DType::kBFloat16;
      policy.reduce_dtype = DType::kFloat32;
    }
    policy.storage_dtype = requested;
    if (also) also(policy);
    return policy;
  }
};

inline void PrintTo(const TruthRow& row, std::ostream* out) { *out << row.name; }

namespace rows {

inline PrecisionRule rule_of_row() {
  PrecisionRule rule;
  rule.match = {"row"};
  return rule;
}
inline void pin(PrecisionPolicy& policy) {
  policy.rules = {rule_of_row()};
  policy.rules[0].pin = true;
}
inline void pin_and_widen(PrecisionPolicy& policy) {
  pin(policy);
  policy.rules[0].widen = true;
}

inline void whole(PrecisionPolicy& policy) {
  policy.rules.push_back(rule_of_row());
  policy.rules.back().match = {"row.first"};
  policy.rules.back().frozen = FrozenRule::kReplicate;
}
inline void pin_whole(PrecisionPolicy& policy) {
  pin(policy);
  whole(policy);
}

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBF16 = DType::kBFloat16;
constexpr auto kRemainder = Master::kRemainder;
constexpr auto kStorage = Master::kStorage;

}  // namespace rows

/// In the table's order. Quantized files (MXFP4 and fp8 with scales) come with packed storage, and
/// tensor parallel rows with that axis: both have no row yet.
inline std::vector<TruthRow> truth_table() {
  using namespace rows;
  using Policy = PrecisionPolicy;
  return {
      {"BFloat16AsItIs", kBF16, {}, kBF16, kBF16, kRemainder},
      {"BFloat16AskedForBFloat16", kBF16, kBF16, kBF16, kBF16, kRemainder},
      {"BFloat16AskedForFloat32", kBF16, kF32, kF32, kBF16},
      {"Float32InABFloat16FileAsItIs", kF32, {}, kF32, kF32},
      {"Float32InAFloat32FileAsItIs", kF32, {}, kF32, kBF16, kStorage, kF32},
      {"Float32InAFloat32FileAllIntrinsic",
       kF32,
       {},
       kF32,
       kF32,
       kStorage,
       kF32,
       false,
       true,
       [](Policy& policy) { policy.intrinsic = Intrinsic::kAll; }},
      {"Float32InABFloat16FileNoneIntrinsic",
       kF32,
       {},
       kF32,
       kBF16,
       kStorage,
       kBF16,
       false,
       true,
       [](Policy& policy) { policy.intrinsic = Intrinsic::kNone; }},
      {"Float32AskedForBFloat16IsKept", kF32, kBF16, kF32, kF32},
      {"Float32AskedForBFloat16IsNarrowed", kF32, kBF16, kBF16, kF32, kRemainder, kBF16, false,
       true, [](Policy& policy) { policy.on_narrower_request = NarrowerRequest::kNarrow; }},
      {"Float32InAFloat32FileNarrowed", kF32, kBF16, kBF16, kBF16, kRemainder, kF32, false, true,
       [](Policy& policy) { policy.on_narrower_request = NarrowerRequest::kNarrow; }},
      {"Float32AskedForFloat32", kF32, kF32, kF32, kF32},
      {"Float32InAFloat32FileAskedForFloat32", kF32, kF32, kF32, kBF16, kStorage, kF32},
      {"BFloat16PinnedAndWidened", kBF16, kBF16, kF32, kF32, kStorage, kBF16, false, true,
       pin_and_widen},
      {"BFloat16PinnedAskedForFloat32", kBF16, kF32, kF32, kF32, kStorage, kBF16, false, true, pin},
      {"ScratchAskedForFloat32", {}, kF32, kF32, kBF16},
      {"ScratchAskedForBFloat16", {}, kBF16, kBF16, kBF16, kRemainder},
      {"ScratchPinned", {}, kF32, kF32, kF32, kStorage, kBF16, false, true, pin},
      {"FrozenShardedBFloat16AskedForFloat32", kBF16, kF32, kF32, kBF16, kStorage, kBF16, true},
      {"FrozenShardedPinned", kF32, {}, kF32, kF32, kStorage, kBF16, true, true, pin},
      {"FrozenWholeBFloat16AskedForFloat32", kBF16, kF32, kF32, kBF16, kStorage, kBF16, true, true,
       whole, kBF16},
      {"FrozenWholeFloat32InAFloat32File",
       kF32,
       {},
       kF32,
       kBF16,
       kStorage,
       kF32,
       true,
       true,
       whole,
       kBF16},
      {"FrozenWholePinned", kF32, {}, kF32, kF32, kStorage, kBF16, true, true, pin_whole, kF32},
      {"NoPolicyBFloat16", kBF16, {}, kBF16, kBF16, kRemainder, kBF16, false, false},
      {"NoPolicyFloat32", kF32, {}, kF32, kF32, kStorage, kBF16, false, false},
  };
}

}  // namespace tessera::golden
