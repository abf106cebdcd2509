// The findings of `tessera gradients --precision-what-if`, as a value, as text and as JSON.
//
// Pure. Next: precision_what_if.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/model_contract.h"
#include "train/config/config.h"
#include "train/precision/precision_groups.h"
#include "train/precision/precision_search.h"

namespace tessera::train {

/// One run of the batch compared with the one in float32.
struct MeasuredPolicy {
  ParameterErrors errors = {};  ///< [P], relative L2
  double loss = 0;
  double loss_error = 0;  ///< relative
  /// Choices of experts that differ, at least: half of what the experts' loads differ by.
  std::int64_t moved_choices = 0;
};

/// The cost of a policy. Bytes of the whole model, but for those of a rank.
struct PolicyCost {
  std::int64_t unsharded_bytes = 0;             ///< of parameters in their compute dtypes
  std::int64_t gradient_bytes = 0;              ///< of gradients on the wire
  std::map<std::string, int> activations = {};  ///< units by the dtype that they compute in
  /// Those of rank 0 in a step, counted in a dry one; none where that is not possible.
  std::optional<std::int64_t> activation_bytes = {};
  std::optional<std::int64_t> sent_bytes = {};
};

/// Without what only a run knows: contracts of `policy`.
PolicyCost cost_of(const ModelContract& contract);

/// Bytes that each group adds where it alone is wide, compared with `narrow`: to its own
/// parameters, and to the activations of a rank, which an embedding in float32 doubles.
struct GroupCosts {
  std::vector<std::int64_t> bytes = {};  ///< [G], at least 0
  /// Activations are among them: of all groups, or of none where one is not counted, since a group
  /// whose activations are not known would seem to have none.
  bool have_activations = true;
};
/// `alone`: [G] of each group wide.
GroupCosts group_costs(const PolicyCost& narrow, const std::vector<PolicyCost>& alone);

struct WhatIfReport {
  double bound = 0;
  std::int64_t rows = 0, tokens = 0;  ///< of the batch, and of a row
  int ranks = 1;
  std::vector<std::string> names = {};  ///< [P] of the trained parameters
  std::vector<PrecisionGroup> groups = {};
  std::int64_t choices = 0;  ///< of experts in the batch, all layers; 0 without experts
  bool routing_is_imposed = false;
  double wide_loss = 0;

  MeasuredPolicy narrow = {};
  std::vector<MeasuredPolicy> widened = {}, narrowed = {};  ///< [G]
  std::optional<MeasuredPolicy> wire =
      {};  ///< float32 with bfloat16 on the wire, if that rounds here
  ErrorTable table = {};

  FoundPolicy found = {};
  std::vector<bool> narrow_wire = {};  ///< [G] gradients of the group travel in bfloat16
  PrecisionConfig precision = {};      ///< what is printed: dtypes and rules
  MeasuredPolicy verified = {};        ///< of `precision`
  std::int64_t passes = 0;             ///< forward and backward passes of the batch

  PolicyCost wide_cost = {}, narrow_cost = {}, found_cost = {};
  GroupCosts costs = {};  ///< by which the cheapest policy was looked for

  /// Whether the errors of `precision` stay within the bound.
  bool is_within_bound() const;
};

/// "[precision]" and "[[precision.rule]]" of what a search sets: param_dtype, reduce_dtype, rules.
std::string policy_lines(const PrecisionConfig& precision);

std::string to_text(const WhatIfReport& report);
/// One object with every error of every parameter; an error that is not finite is null.
std::string to_json(const WhatIfReport& report);

}  // namespace tessera::train
