// What the stages of a pipeline have of one model between them: a checkpoint knows no pipeline, a
// rank has the parameters of its own stages only.
//
// Ranks that differ in their stage alone tell each other their names. A parameter that two stages
// have (a tied embedding) is written by the first. Next: snapshot.h, loader.h.
#pragma once

#include <functional>
#include <set>
#include <string>

#include "checkpoint/snapshot.h"
#include "tessera/shard.h"

namespace tessera::checkpointing {

/// Names of parameters and of buffers that are stored; of what `Holds` leaves out there are none.
struct NamesOfStages {
  std::set<std::string, std::less<>> everywhere;  ///< of all stages, this rank's own included
  std::set<std::string, std::less<>> of_earlier;  ///< of the stages before this rank's
};

/// What an optimizer may keep of parameters of any stage (Optimizer::kept_names): a stage without
/// 16-bit ones keeps no masters. Collective as names_of_stages.
std::set<std::string> kept_in_stages(const ShardedBase& model, const Optimizer& optimizer);

/// Collective among the ranks of axis pp; nobody is asked where it has one.
NamesOfStages names_of_stages(const ShardedBase& model, const Holds& holds);

}  // namespace tessera::checkpointing
