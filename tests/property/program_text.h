// A program in words.
#pragma once

#include "property/program.h"

namespace tessera::test {
namespace detail {

inline std::string recompute_text(RecomputeMode mode) {
  return mode == RecomputeMode::kFull ? "checkpoint" : "selective checkpoint";
}

inline std::string describe_model(const Program& p) {
  static constexpr const char* kKinds[] = {"scale", "bias", "matrix", "linear"};
  std::string text;
  for (std::size_t i = 0; i < p.nodes.size(); ++i) {
    const auto& node = p.nodes[i];
    const auto* call = p.call_of(i);
    const auto& reshard = p.reshard_after_forward[i];
    const bool unit = call == nullptr || call->unit;
    text += concat("  node ", i, unit ? " (unit" : "",
                   unit && reshard ? (*reshard ? ", resharded" : ", kept") : "", unit ? ")" : "",
                   node.in_place ? ", in place" : "", ":");
    if (node.inside != RecomputeMode::kNone) text += concat(" ", recompute_text(node.inside));
    for (const auto number : node.parameters) {
      text += concat(" p", number, "=", kKinds[static_cast<int>(p.parameters[number].kind)],
                     p.parameters[number].trainable ? "" : " frozen");
    }
    for (const auto& child : node.children) {
      text += concat(" -> ", child.node, child.unit ? " unit" : "",
                     child.outside == RecomputeMode::kNone
                         ? ""
                         : concat(" in a ", recompute_text(child.outside)),
                     child.detached ? " detached" : "", child.is_second ? " second" : "",
                     child.residual ? "" : " in a row", child.repeats > 1 ? " twice" : "");
    }
    text += "\n";
  }
  return text;
}

inline std::string describe_op(const Program& p, const Op& op) {
  const auto node_of = [&](int unit) {
    return p.units().at(static_cast<std::size_t>(unit) % p.units().size());
  };
  const auto ranks = [&] {
    return op.rank < 0 ? std::string("all ranks") : concat("rank ", op.rank);
  };
  std::string text = kActNames[static_cast<int>(op.act)];
  switch (op.act) {
    case Act::kForward:
      text = concat("r", op.result, " = forward");
      if (op.unit != 0) text += concat(" of node ", node_of(op.unit));
      if (op.from >= 0) text += concat(" of input + r", op.from, op.detached ? ".detach()" : "");
      if (op.input_grad) text += ", input requires grad";
      if (op.node >= 0) text += concat(", rank ", op.rank, " drops node ", op.node);
      return text;
    case Act::kBackward:
      for (std::size_t i = 0; i < op.roots.size(); ++i) {
        text += concat(i == 0 ? " r" : " + r", op.roots[i].result, ".", op.roots[i].output);
      }
      return concat(text, op.retain ? ", retain_graph" : "",
                    op.rank >= 0 ? concat(", rank ", op.rank, " without the last") : "");
    case Act::kForget:
    case Act::kScaleResult:
      return concat(text, " r", op.result);
    case Act::kZeroGrad:
      return concat(text, op.on ? "(to none)" : "(to zeros)");
    case Act::kSync:
      return concat(text, "(", op.on, op.recurse ? "" : ", not recursive", ") of node ",
                    node_of(op.unit));
    case Act::kReplicaReduce:
    case Act::kLastBackward:
    case Act::kDefer:
      return concat(text, "(", op.on, ")");
    case Act::kReshardAfterForward:
    case Act::kReshardAfterBackward:
    case Act::kUnshardInBackward:
      return concat(text, "(", op.on, ") of node ", node_of(op.unit));
    case Act::kForwardPrefetch:
    case Act::kBackwardPrefetch:
      text += concat(" of node ", node_of(op.unit), " {");
      for (const int unit : op.units) text += concat(" ", node_of(unit));
      return text + " }";
    case Act::kDivideFactor:
      return concat(text, "(", op.factor, ")");
    case Act::kUnshard:
    case Act::kReshard:
      return concat(text, " of node ", node_of(op.unit));
    case Act::kUnshardAsync:
      return concat(text, " of node ", node_of(op.unit), op.on ? ", waited for" : "");
    case Act::kSetTrainable:
      return concat(text, " p", op.parameter, op.on ? " trained" : " frozen");
    case Act::kThrowInForward:
      return concat(text, " at node ", op.node, " on ", ranks());
    case Act::kThrowInBackward:
      return concat(text, " on ", ranks());
    case Act::kChangeArgument:
      return concat(text, " of node ", op.node);
    case Act::kRedeem:
      return concat(text, " what backward ", op.result, " has left, on ", ranks());
    default:
      return text;
  }
}

}  // namespace detail

inline std::string Program::describe() const {
  static constexpr const char* kPolicies[] = {"", ", computes in bf16", ", sends bf16"};
  static constexpr const char* kOptimizers[] = {"SGD", "AdamW", "torch SGD", "torch AdamW"};
  auto text =
      concat("program ", seed, features.text().empty() ? "" : " of features ", features.text(),
             ": ", ranks, " ranks, ", replicas, " replicas, cp ", context(),
             backend == ThreadBackend::kGloo ? ", Gloo" : "", doubles ? ", fp64" : ", fp32",
             kPolicies[static_cast<int>(policy)], ", ", kOptimizers[static_cast<int>(optimizer)],
             ", in flight ", in_flight_bytes, " bytes, merge below ", merge_below_bytes,
             lockstep ? ", in lockstep" : "", "\n", detail::describe_model(*this));
  for (std::size_t i = 0; i < ops.size(); ++i) {
    text += concat("  ", i, ". ", detail::describe_op(*this, ops[i]), "\n");
  }
  return text;
}

}  // namespace tessera::test
