// Makes a Program that fails smaller for as long as it fails: operations are taken out, then parts
// of its model and of its layout.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "property/program.h"

namespace tessera::test {

class ProgramShrink {
 public:
  using Fails = std::function<bool(const Program&)>;
  ProgramShrink(Program program, Fails fails, std::chrono::seconds at_most)
      : program_(std::move(program)),
        fails_(std::move(fails)),
        until_(std::chrono::steady_clock::now() + at_most) {}

  Program smallest() {
    for (bool smaller = true; smaller;) {
      smaller = take_out_operations();
      for (const auto& simpler : simplifications()) {
        auto candidate = program_;
        simpler(candidate);
        if (candidate.describe() != program_.describe()) smaller = keeps(candidate) || smaller;
      }
    }
    return program_;
  }

 private:
  bool keeps(const Program& candidate) {
    if (std::chrono::steady_clock::now() > until_ || !fails_(candidate)) return false;
    program_ = candidate;
    return true;
  }

  bool take_out_operations() {
    bool any = false;
    for (auto size = program_.ops.size(); size > 0; size /= 2) {
      for (std::size_t end = program_.ops.size(); end > 0;) {
        const auto begin = end > size ? end - size : 0;
        auto candidate = program_;
        const auto first = candidate.ops.begin();
        candidate.ops.erase(
            first + static_cast<std::ptrdiff_t>(begin),
            first + static_cast<std::ptrdiff_t>(std::min(end, program_.ops.size())));
        any = keeps(candidate) || any;
        end = std::min(begin, program_.ops.size());
      }
    }
    return any;
  }

  using Change = std::function<void(Program&)>;
  std::vector<Change> simplifications() const {
    std::vector<Change> all = {
        [](Program& p) { p.backend = ThreadBackend::kInProcess; },
        [](Program& p) {
          p.ranks /= p.replicas;
          p.replicas = 1;
        },
        [](Program& p) { p.ranks = p.replicas == 1 ? std::min(p.ranks, 2) : p.ranks; },
        [](Program& p) { p.ranks = p.replicas == 1 ? 1 : p.ranks; },
        [](Program& p) { p.policy = ProgramPolicy::kPlain; },
        [](Program& p) { p.doubles = p.policy == ProgramPolicy::kPlain; },
        [](Program& p) { p.optimizer = ProgramOptimizer::kSgd; },
        [](Program& p) { p.in_flight_bytes = std::int64_t{32} << 20; },
        [](Program& p) { p.merge_below_bytes = 0; },
        [](Program& p) { p.lockstep = true; },
        [](Program& p) {
          for (auto& parameter : p.parameters) parameter.trainable = true;
        },
    };
    for (std::size_t i = program_.nodes.size(); i-- > 1;)
      all.push_back([i](Program& p) { take_out_node(p, i); });
    for (std::size_t i = 0; i < program_.nodes.size(); ++i) {
      all.push_back([i](Program& p) {
        if (i >= p.nodes.size()) return;
        p.nodes[i].inside = RecomputeMode::kNone;
        p.nodes[i].in_place = false;
        p.reshard_after_forward[i].reset();
      });
      all.push_back([i](Program& p) {
        if (i >= p.nodes.size()) return;
        for (auto& child : p.nodes[i].children) {
          child.outside = RecomputeMode::kNone;
          child.repeats = 1;
          child.residual = true;
        }
      });
      all.push_back([i](Program& p) {
        if (i < p.nodes.size() && p.nodes[i].parameters.size() > 1)
          p.nodes[i].parameters.pop_back();
      });
    }
    for (std::size_t i = 0; i < program_.ops.size(); ++i) {
      all.push_back([i](Program& p) {
        if (i < p.ops.size() && p.ops[i].act == Act::kForward && p.ops[i].unit == 0)
          p.ops[i].input_grad = false;
      });
      all.push_back([i](Program& p) {
        if (i < p.ops.size() && p.ops[i].act == Act::kForward) p.ops[i].node = p.ops[i].rank = -1;
      });
      all.push_back([i](Program& p) {
        if (i < p.ops.size() && p.ops[i].act == Act::kForward) p.ops[i].from = -1;
      });
      all.push_back([i](Program& p) {
        if (i < p.ops.size() && p.ops[i].roots.size() > 1) p.ops[i].roots.pop_back();
      });
    }
    return all;
  }

  /// The last node only, so that the others keep their numbers.
  static void take_out_node(Program& p, std::size_t number) {
    if (number + 1 != p.nodes.size() || !p.nodes[number].children.empty()) return;
    for (auto& node : p.nodes)
      std::erase_if(node.children, [&](const auto& child) { return child.node == number; });
    p.nodes.pop_back();
    p.reshard_after_forward.pop_back();
    for (auto& op : p.ops) {
      if (op.act == Act::kForward && op.node == static_cast<int>(number)) op.node = op.rank = -1;
    }
  }

  Program program_;
  Fails fails_;
  std::chrono::steady_clock::time_point until_;
};

}  // namespace tessera::test
