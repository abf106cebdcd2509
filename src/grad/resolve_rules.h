// The rules of a policy: which of them match a parameter, and what they ask together.
//
// The last matching rule wins field by field. A pattern that matches nothing is an error, since its
// author expects it to have an effect. Next: resolve.cpp.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/contract.h"

namespace tessera::grad {

/// A value and where it comes from: "rule 2 (*norm)", "[precision] param_dtype".
template <class T>
struct Setting {
  T value;
  std::string reason;
};

/// The settings that the matching rules ask for, for one parameter.
struct Asked {
  std::optional<Setting<DType>> param_dtype;
  std::optional<Setting<DType>> reduce_dtype;
  std::optional<Setting<DType>> storage_dtype;
  std::optional<Setting<DType>> accumulate_dtype;
  std::optional<Setting<DType>> grad_dtype;
  std::optional<Setting<bool>> pin;
  std::optional<Setting<bool>> widen;
  std::optional<Setting<FrozenRule>> frozen;
};

/// Whether computation in the dtype is possible: it is floating, and no payload format.
bool is_arithmetic(DType dtype);

/// Returns what is expected of the dtype in which gradients are summed that are sent as `reduce`;
/// none where `accumulate` holds all their values.
std::optional<std::string> wider_accumulator(DType accumulate, DType reduce);

/// Refuses dtypes without arithmetic, rules without a pattern, and rules that contradict
/// themselves. Errors: kContract with the key.
void check_policy(const PrecisionPolicy& policy);

class RuleBook {
 public:
  /// `source`: where the rules are written, for messages.
  explicit RuleBook(const std::vector<PrecisionRule>& rules,
                    const char* source = "[[precision.rule]]");

  /// Returns the settings for one tensor, by its names. Also notes which patterns matched.
  Asked ask(const std::string& name, const std::vector<std::string>& aliases = {});

  /// Errors: kContract for the first pattern that matched none of the names in calls of ask(), with
  /// the name that may have been meant. `elsewhere`: patterns that matched in another unit with the
  /// same rules.
  void check_all_matched(const std::vector<std::string>& elsewhere = {}) const;

 private:
  const std::vector<PrecisionRule>& rules_;
  const char* source_;
  std::vector<std::vector<bool>> matched_;  ///< by rule, by pattern
  std::vector<std::string> names_;          ///< names in calls of ask(), aliases included
  std::size_t tensors_ = 0;
};

}  // namespace tessera::grad
