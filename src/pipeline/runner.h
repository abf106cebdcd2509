// The runner: walks the list of one rank of a valid program, whatever the schedule.
//
// What a step of the list does:
//   F  waits for the activations that the stage before has sent, and makes fresh leaves of them:
//      the backward of each stage is a graph task of its own. Of its outputs only autograd's edges
//      stay here; the memory goes when the message has gone, unless the graph itself saves it.
//   B  begins with what came back from the stage after (the last stage: with its losses); what
//      autograd leaves on the leaves goes to the stage before, zeros where it leaves nothing.
//   I  the same, but weight gradients of layers that can put them off wait (StepScope).
//   W  forms those of one stage and micro-batch. Nothing, where all were formed in I.
//   messages: receives are posted where the list says, so before the slot that needs them, small
//      ones before that where messages gain by it; a send keeps its memory until it is through, at
//      the latest to the end of the step. Between two stages of one rank (the turn of a V) tensors
//      are handed over without message or copy.
// A slot of an F and a B is a pair: where Parameters::overlap says so, exchanges of one are under way
// while the other one computes (StepScope::run_pair), else they run in turn. What both need has
// arrived before, what they give is sent when the slot ends.
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

/// What one rank of a pipeline talks through. P2P and group have the ranks of the pipeline in
/// their order; both are null where there is one.
struct Ties {
  std::shared_ptr<World> world;  ///< told of failures
  std::shared_ptr<comm::P2P> p2p;
  std::shared_ptr<comm::Group> group;  ///< control messages
  at::Device device = at::kCPU;        ///< the World's: of what arrives
};
/// Along the axis "pp". Collective among its ranks, the first time.
Ties ties_of(const Mesh& mesh);

/// Who holds the parameters of a rank's stages, while a step runs.
struct Parameters {
  StepScope* scope = nullptr;  ///< one stage in it for each; null: plain modules
  /// Gradients are reduced after each B or W (StepScopeOptions::sync_every_micro_batch), not once.
  bool reduce_every = false;
  bool overlap = true;  ///< pairs run under each other, where there is a scope
};

class Runner {
 public:
  explicit Runner(Ties ties);

  int rank() const { return ties_.p2p != nullptr ? ties_.p2p->rank() : 0; }

  /// A step. `stages`: those of this rank, ascending. The scope is finished here. Without a
  /// backward (Passes::kForward) no graph is made. Returns what the last stage's forward returned
  /// for each micro-batch, without graphs, on its rank; else nothing. Collective among the ranks of
  /// the pipeline. Errors: as Agreement::renew; those of stages and messages, see above; on CUDA
  /// as ValidProgram::require_messages_in_order.
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
