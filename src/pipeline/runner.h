// The runner: executes the list of one rank of a valid program of any schedule.
//
// The steps of a list:
//   F  waits for the activations that the stage before has sent, and makes fresh leaves of them:
//      the backward of each stage is a graph task of its own. Of its outputs only autograd's edges
//      stay here; the memory is freed when the message has been sent, unless the graph saves it.
//   B  begins with the gradients of the stage after (the last stage: with its losses); gradients of
//      the leaves go to the stage before, zeros where autograd leaves none.
//   I  the same, but layers that can defer their weight gradients do so (StepScope).
//   W  forms those of one stage and micro-batch. Does nothing where all were formed in I.
//   messages: receives are posted where the list says, so before the slot that needs them, small
//      ones before that where the transport gains by it; a send keeps its memory until it ends, at
//      the latest to the end of the step. Between two stages of one rank (the turn of a V) tensors
//      are handed over without message or copy.
// A slot of an F and a B is a pair: where Parameters::overlap says so, exchanges of one are in
// flight while the other one computes (StepScope::run_pair), else they run in turn. The inputs of
// both have arrived before; the outputs of both are sent when the slot ends.
//
// An exception in a slot gets the rank, stage, micro-batch and slot into its message, and aborts
// the World: the others end where they wait. Next: borders.h.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/p2p.h"
#include "pipeline/borders.h"
#include "pipeline/valid_program.h"
#include "tessera/pipeline.h"
#include "tessera/world.h"

namespace tessera {
class StepScope;
}  // namespace tessera

namespace tessera::pipeline {

/// The connections of one rank of a pipeline. P2P and group have the ranks of the pipeline in their
/// order; both are null where there is one.
struct Ties {
  std::shared_ptr<World> world;  ///< told of failures
  std::shared_ptr<comm::P2P> p2p;
  std::shared_ptr<comm::Group> group;  ///< control messages
  at::Device device = at::kCPU;        ///< the World's: of what arrives
};
/// Connects the ranks along the axis "pp". Collective among them, the first time.
Ties ties_of(const Mesh& mesh);

/// The parameters of a rank's stages while a step runs.
struct Parameters {
  StepScope* scope = nullptr;  ///< with one stage for each; null: plain modules
  /// Whether gradients are reduced after each B or W (StepScopeOptions::sync_every_micro_batch),
  /// not once.
  bool reduce_every = false;
  bool overlap = true;  ///< whether pairs run interleaved, where there is a scope
};

class Runner {
 public:
  explicit Runner(Ties ties);

  int rank() const { return ties_.p2p != nullptr ? ties_.p2p->rank() : 0; }

  /// Runs a step, and finishes the scope. `stages`: those of this rank, ascending. Without a
  /// backward (Passes::kForward) no graph is made. Returns what the last stage's forward returned
  /// for each micro-batch, without graphs, on its rank; else nothing. Collective among the ranks of
  /// the pipeline. Errors: as Agreement::renew; those of stages and messages, see above; on CUDA as
  /// ValidProgram::require_messages_in_order.
  std::vector<Tensors> run(const ValidProgram& program, const std::vector<Stage*>& stages,
                           const Parameters& parameters);

 private:
  [[noreturn]] void fail(const std::exception& error, const std::string& place);

  Ties ties_;
  Agreement agreement_;
  std::set<std::uint64_t> in_order_;   ///< hashes of programs whose messages do not overtake
  std::set<std::uint64_t> connected_;  ///< and of those whose ways are connected
};

}  // namespace tessera::pipeline
