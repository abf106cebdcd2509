// A program over a sharded module, as a value: a small model, how it is sharded, and what a
// training loop does with it, operation by operation.
//
// program_draw.h draws one from a seed, program_rules.h says what each operation may do at its
// place, program_run.h runs it together with the unsharded model, program_shrink.h makes it
// smaller. A program stays one when operations are taken out: an operation that has lost its
// meaning is left out when it runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "tessera/recompute_mode.h"
#include "tessera/world.h"

namespace tessera::test {

/// The features that may be drawn. TESSERA_PROGRAM_FEATURES="-defer,-gloo" takes some out,
/// "none,drop" puts some in.
enum class Feature : std::uint8_t {
  kRetain,     ///< graphs that are kept for another backward, and grow
  kSeveral,    ///< backwards that reach more than one forward
  kPartial,    ///< backwards of some results only
  kDrop,       ///< branches whose result one rank does not use
  kDropRoot,   ///< losses that one rank leaves out, of forwards that it reaches in another way
  kDefer,      ///< weight gradients for later
  kRecompute,  ///< checkpoint(), inside and outside of units
  kDetached,   ///< units without a marker
  kTies,
  kFrozen,
  kChanges,  ///< set_trainable
  kControls,
  kAccumulate,  ///< gradients that wait: sync, replicas, the last backward
  kFailures,    ///< exceptions, and recover()
  kInPlace,
  kForbidden,  ///< what has to be refused
  kInner,      ///< units called past the outermost
  kReplicas,
  kPolicies,
  kGloo,
  kIdleAfterFailure,  ///< controls for an idle model, reshard() and run_weight_gradients()
                      ///< between a failure and the next backward
  kDropDefer,         ///< branches that one rank drops, in programs that defer
  kCount
};
inline constexpr const char* kFeatureNames[] = {"retain",     "several",   "partial",
                                                "drop",       "drop_root", "defer",
                                                "recompute",  "detached",  "ties",
                                                "frozen",     "changes",   "controls",
                                                "accumulate", "failures",  "in_place",
                                                "forbidden",  "inner",     "replicas",
                                                "policies",   "gloo",      "idle_after_failure",
                                                "drop_defer"};
static_assert(std::size(kFeatureNames) == static_cast<std::size_t>(Feature::kCount));

class Features {
 public:
  bool has(Feature feature) const { return (bits_ >> static_cast<unsigned>(feature) & 1U) != 0; }
  /// "none", "all", "NAME", "-NAME", one after the other.
  static Features parse(const std::string& text) {
    Features features;
    for (std::size_t begin = 0; begin < text.size();) {
      const auto end = std::min(text.find(',', begin), text.size());
      features.apply(text.substr(begin, end - begin));
      begin = end + 1;
    }
    return features;
  }
  std::string text() const {
    std::string without;
    for (unsigned i = 0; i < static_cast<unsigned>(Feature::kCount); ++i) {
      if (!has(static_cast<Feature>(i)))
        without += concat(without.empty() ? "-" : ",-", kFeatureNames[i]);
    }
    return without;
  }

 private:
  void apply(const std::string& word) {
    if (word == "none" || word == "all") {
      bits_ = word == "none" ? 0 : ~0U;
      return;
    }
    const bool off = word.starts_with('-');
    for (unsigned i = 0; i < static_cast<unsigned>(Feature::kCount); ++i) {
      if (word.substr(off ? 1 : 0) != kFeatureNames[i]) continue;
      bits_ = off ? bits_ & ~(1U << i) : bits_ | 1U << i;
      return;
    }
    TESSERA_CHECK(word.empty(), ErrorKind::kUsage, "TESSERA_PROGRAM_FEATURES: found ", word,
                  ", expected all, none or a name of tests/property/program.h");
  }
  std::uint32_t bits_ = ~0U;
};

inline constexpr std::int64_t kWidth = 4;  // of the activations [2, kWidth]

/// kBias is the one whose backward reads no parameter, kLinear the one that can be deferred.
enum class ParameterKind : std::uint8_t { kScale, kBias, kMatrix, kLinear };

struct ProgramParameter {
  ParameterKind kind = ParameterKind::kScale;
  bool trainable = true;
};

struct ProgramChild {
  std::size_t node = 0;
  bool unit = false;                             ///< a handle of its own
  RecomputeMode outside = RecomputeMode::kNone;  ///< of the call
  bool detached = false;                         ///< its input needs no gradient
  bool is_second = false;                        ///< its result is the model's second one
  bool residual = true;
  int repeats = 1;
};

struct ProgramNode {
  std::vector<std::size_t> parameters;  ///< one that several nodes have is tied
  RecomputeMode inside = RecomputeMode::kNone;
  bool in_place = false;  ///< changes what it made itself
  std::vector<ProgramChild> children;
};

enum class ProgramPolicy : std::uint8_t { kPlain, kNarrowCompute, kNarrowWire };
enum class ProgramOptimizer : std::uint8_t { kSgd, kAdamW, kTorchSgd, kTorchAdamW };

enum class Act : std::uint8_t {
  kForward,
  kBackward,
  kEvaluate,
  kForget,          ///< a kept result goes out of scope
  kScaleResult,     ///< in place, by the caller
  kZeroGrad,        ///< of what is shown, also while something waits to be added to it
  kHalveGradients,  ///< in place, those that are shown; refused while something waits
  kRead,
  kNorm,
  kStep,
  kSync,
  kReplicaReduce,
  kLastBackward,
  kDefer,
  kRedeem,  ///< the tickets of one backward, on one rank or on all
  kRunWeights,
  kReshardAfterForward,
  kReshardAfterBackward,
  kUnshardInBackward,
  kForwardPrefetch,
  kBackwardPrefetch,
  kDivideFactor,
  kUnshard,
  kUnshardAsync,
  kReshard,
  kSetTrainable,
  // a forward and its backward, the exception on `rank`, or on all (-1); then recover()
  kThrowInForward,
  kThrowInBackward,
  // a forward and its backward that have to be refused
  kChangeArgument,
  kChangeHeldResult,
  kInputGradient,  ///< autograd::grad: right without checkpoint(), else refused
  kCount
};
inline constexpr const char* kActNames[] = {"forward",
                                            "backward",
                                            "evaluate",
                                            "forget",
                                            "scale in place",
                                            "zero_grad",
                                            "halve gradients",
                                            "read gradients",
                                            "norm",
                                            "optimizer step",
                                            "set_requires_gradient_sync",
                                            "set_requires_replica_reduce",
                                            "set_is_last_backward",
                                            "set_defer_weight_gradients",
                                            "redeem",
                                            "run_weight_gradients",
                                            "set_reshard_after_forward",
                                            "set_reshard_after_backward",
                                            "set_unshard_in_backward",
                                            "set_forward_prefetch",
                                            "set_backward_prefetch",
                                            "set_gradient_divide_factor",
                                            "unshard",
                                            "unshard_async",
                                            "reshard",
                                            "set_trainable",
                                            "throw in forward",
                                            "throw in backward",
                                            "change an argument in place",
                                            "change a held result in place",
                                            "autograd::grad of the input"};
static_assert(std::size(kActNames) == static_cast<std::size_t>(Act::kCount));

struct ProgramRoot {
  int result = 0;
  int output = 0;  ///< 0 the first, 1 the second of the model's results
};

/// One operation. What its act does not use stays as it is here.
struct Op {
  Act act = Act::kForward;
  int result = 0;  ///< that it makes or uses; redeem: which backward, since all were redeemed
  int from = -1;   ///< forward: an earlier result that is added to the input
  bool detached = false;  ///< forward: without its history
  bool input_grad = false;
  std::vector<ProgramRoot> roots;  ///< backward
  bool retain = false;
  bool on = true;  ///< of a switch; zero_grad: to none; unshard_async: waited for
  bool recurse = true;
  int unit = 0;   ///< into Program::units(); forward: the one that is called, 0 the model
  int node = -1;  ///< the branch that is dropped; where it throws, or changes its argument
  int rank = -1;  ///< that drops, throws, redeems, or leaves the last root out
  int parameter = 0;
  double factor = 1;
  std::vector<int> units;
  std::uint64_t seed = 0;
};

struct Program {
  std::uint64_t seed = 0;
  Features features;
  std::vector<ProgramParameter> parameters;
  std::vector<ProgramNode> nodes;                          ///< children come after their parents
  std::vector<std::optional<bool>> reshard_after_forward;  ///< by node
  int ranks = 1, replicas = 1;
  ThreadBackend backend = ThreadBackend::kInProcess;
  bool doubles = false;
  ProgramPolicy policy = ProgramPolicy::kPlain;
  ProgramOptimizer optimizer = ProgramOptimizer::kSgd;
  std::int64_t in_flight_bytes = std::int64_t{32} << 20;
  std::int64_t merge_below_bytes = 0;
  bool lockstep = false;  ///< ranks wait for each other after every operation
  std::vector<Op> ops;

  static Program draw(std::uint64_t seed, const Features& features);
  /// Ranks of the axis cp, over which gradients are summed as over dp_shard.
  int context() const { return ranks / replicas % 2 == 0 && seed % 2 == 1 ? 2 : 1; }
  std::string describe() const;

  /// The nodes that are units, the model first.
  std::vector<std::size_t> units() const {
    std::vector<std::size_t> all{0};
    for (const auto& node : nodes) {
      for (const auto& child : node.children) {
        if (child.unit) all.push_back(child.node);
      }
    }
    return all;
  }
  const ProgramChild* call_of(std::size_t node) const {
    for (const auto& parent : nodes) {
      for (const auto& child : parent.children) {
        if (child.node == node) return &child;
      }
    }
    return nullptr;  // the model
  }
  std::size_t parent_of(std::size_t node) const {
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      for (const auto& child : nodes[i].children) {
        if (child.node == node) return i;
      }
    }
    return node;
  }
  /// A node of the model still has it.
  bool has(std::size_t parameter) const {
    for (const auto& node : nodes) {
      for (const auto own : node.parameters) {
        if (own == parameter) return true;
      }
    }
    return false;
  }
  bool recomputes() const {
    for (const auto& node : nodes) {
      if (node.inside != RecomputeMode::kNone) return true;
      for (const auto& child : node.children) {
        if (child.outside != RecomputeMode::kNone) return true;
      }
    }
    return false;
  }
  bool has_second_result() const {
    for (const auto& child : nodes[0].children) {
      if (child.is_second) return true;
    }
    return false;
  }
};

}  // namespace tessera::test
