// Simulates how long a schedule takes, and what a rank holds meanwhile, for given costs. Pure.
//
// A model of the runner: a rank runs its slots one after the other, each as soon as what it needs
// has arrived; a message leaves when its slot ends, but not before its receive is posted, and
// blocks no rank. Costs have any one unit.
#pragma once

#include <optional>
#include <vector>

#include "pipeline/interleave.h"
#include "pipeline/program.h"
#include "pipeline/schedule.h"

namespace tessera::pipeline {

struct StageCosts {
  double forward = 1.0;
  double input_gradient = 1.0;
  double weight_gradient = 1.0;
  /// None: the sum of I and W.
  std::optional<double> backward = {};
  /// The slot in which this stage's F is paired with a B. None: what the turns of their pieces
  /// take, or, without pieces, both one after the other.
  std::optional<double> paired = {};
  /// The computation of F, and of B or I, between exchanges (with_exchanges()); empty without any.
  Pieces forward_pieces = {};
  Pieces backward_pieces = {};
  /// From the end of a slot to the arrival at another rank.
  double send_forward = 0.0;
  double send_backward = 0.0;
  /// Held for a micro-batch from its F to its I or B.
  double live_bytes = 0.0;
  /// Held from its I to its W. With recomputation this is more than live_bytes: what W needs has
  /// been computed again.
  double deferred_bytes = 0.0;

  double of_backward() const { return backward.value_or(input_gradient + weight_gradient); }
};

/// Exchanges within a stage, over the ranks that share its layers.
struct Exchanges {
  int forward = 0;   ///< of a layer in its forward
  int backward = 0;  ///< of a layer in its backward: with recomputation also the repeated ones
  int layers = 1;    ///< of a stage
  double cost = 0.0;
};

/// Adds exchanges to what a stage computes: F and I take longer, and pairs take turns. The
/// computation is cut into equal pieces; a backward passes the turn once more a layer, after the
/// layer's last exchange, as experts do where they form their weight gradients.
StageCosts with_exchanges(const StageCosts& computing, const Exchanges& exchanges);

/// The costs of each stage.
using Costs = std::vector<StageCosts>;

struct SlotTime {
  double all = 0.0;
  double exposed = 0.0;  ///< of its exchanges: the rank waits for them
  double hidden = 0.0;   ///< of its exchanges: the rest
};
SlotTime time_of(const Slot& slot, const Costs& costs);

struct TimeSpan {
  double begin = 0.0;
  double end = 0.0;
};

struct SimulatedRank {
  double busy = 0.0;
  double idle = 0.0;         ///< makespan - busy
  int peak_live_chunks = 0;  ///< validate.h
  double peak_bytes = 0.0;   ///< live and deferred
  double peak_deferred_bytes = 0.0;
  int most_open_sends = 0;  ///< most sends that have not arrived at once: the memory that they keep
  double exposed_exchange = 0.0;  ///< of `busy`: the rank waits for exchanges
  double hidden_exchange = 0.0;   ///< the rest of the exchanges' time
  std::vector<TimeSpan> slots;
};

struct SimulatedMessage {
  HandOver what;
  double sent = 0.0;
  double posted = 0.0;  ///< when its receive was
  double arrived = 0.0;
};

struct Simulated {
  double makespan = 0.0;
  std::vector<SimulatedRank> ranks;
  std::vector<SimulatedMessage> messages;  ///< in the order of their content
};

/// The program must be valid. Errors: kUsage where there are not the costs of each stage, or one is
/// negative or not finite.
Simulated simulate(const Program& program, const Costs& costs);
Simulated simulate(const Schedule& schedule, const Costs& costs);

}  // namespace tessera::pipeline
