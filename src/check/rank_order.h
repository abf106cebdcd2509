// The collectives and messages of the ranks of a run, compared pairwise.
//
// A dry step notes what one rank issues; ranks that differ in one place of the mesh stand for all.
// Two ranks have to issue what they share in the same order, and what one sends another has to
// receive. Pure. Next: ../train/dry/dry_step.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "check/finding.h"

namespace tessera::check {

struct NotedCollective {
  std::string group = {};         ///< "gather of ranks 0,1": the same on its ranks
  std::uint64_t fingerprint = 0;  ///< the same on ranks that mean the same
  std::string unit = {};
  std::string words = {};  ///< "reduce_scatter of model.layers.3 (...)"
};

struct NotedMessage {
  std::string words = {};  ///< "activations of stage 1, micro-batch 3, step 2"
  bool sends = false;
  int peer = 0;
  std::int64_t bytes = 0;
};

/// All that one rank issues in a step.
struct NotedRank {
  int rank = 0;
  std::string place = {};  ///< "pp 1", "last of tp"
  std::vector<NotedCollective> collectives = {};
  std::vector<NotedMessage> messages = {};
};

/// One finding a pair of ranks and kind: the first collective that differs, messages that no rank
/// receives or that no rank sends.
std::vector<Finding> wrong_order(std::span<const NotedRank> ranks);

}  // namespace tessera::check
