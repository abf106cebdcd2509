// The rules of a policy: which of them speak about a parameter, and what they say together.
//
// The last matching rule wins field by field. A pattern that matches nothing is an error: it is a
// rule that its author believes to hold. Next: resolve.cpp.
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

/// What the matching rules ask for one parameter.
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

/// Whether a dtype can be computed in: floating, and not a payload format.
bool is_arithmetic(DType dtype);

/// What is expected of the dtype in which gradients are summed that travel as `reduce`; none where
/// `accumulate` holds all their values.
std::optional<std::string> wider_accumulator(DType accumulate, DType reduce);

/// Refuses dtypes that nothing can be computed in, rules without a pattern, and rules that
/// contradict themselves. Errors: kContract with the key.
void check_policy(const PrecisionPolicy& policy);

class RuleBook {
 public:
  /// `source`: where the rules stand, for messages.
  explicit RuleBook(const std::vector<PrecisionRule>& rules,
                    const char* source = "[[precision.rule]]");

  /// Of one tensor by its names. Also notes which patterns matched.
  Asked ask(const std::string& name, const std::vector<std::string>& aliases = {});

  /// Errors: kContract for the first pattern that has matched none of the names that were asked
  /// for, with the one that may have been meant. `elsewhere`: patterns that have matched something
  /// in another unit with rules of its own.
  void check_all_matched(const std::vector<std::string>& elsewhere = {}) const;

 private:
  const std::vector<PrecisionRule>& rules_;
  const char* source_;
  std::vector<std::vector<bool>> matched_;  ///< by rule, by pattern
  std::vector<std::string> names_;          ///< asked for, aliases included
  std::size_t tensors_ = 0;
};

}  // namespace tessera::grad
