// A dry step of a run, without memory: what one rank of any number holds and sends.
//
// The model is made parallel and stepped by the code that a run uses, over a World of this thread
// alone (comm/dry_world.h) and on fake tensors (dry/fake_operations.h): no rank is started, no
// weight is read, and what a layer allocates is counted and not forecast. Two steps are made; the
// second one is what all others are like. What a rank's routers choose follows from stated loads
// (expert_loads.h), and all ranks choose alike. Next: dry_batches.h, ../parallelize.h, ../step.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/trace.h"
#include "capture/dry/counted_step.h"
#include "comm/backends/dry/dry.h"
#include "fsdp/held_bytes.h"
#include "models/model_spec.h"
#include "moe/routing.h"
#include "tessera/dtype_watch.h"
#include "tessera/model_contract.h"
#include "train/config/config.h"
#include "train/dry/expert_loads.h"
#include "train/hf/model_source.h"

namespace tessera::train {

using capture::DryPass;

/// Bytes of one rank.
struct DryStep {
  fsdp::HeldBytes held = {};  ///< when gradients are complete; `unsharded`: the most of the step
  fsdp::OptimizerBytes optimizer = {};
  std::int64_t between_steps = 0;  ///< all that is held behind a step
  std::int64_t peak = 0;           ///< the most in a step, all that is held counted
  // The fields below are of the second step.
  std::int64_t micro_batches = 1;
  std::vector<comm::DryCollective> collectives = {};  ///< in order of issue
  std::vector<comm::DryMessage> messages = {};        ///< the same, where it is a pipeline's
  std::vector<DryPass> passes = {};                   ///< in the order of their ends
  std::vector<TraceSpan> spans = {};                  ///< as a traced run has them
  ModelContract contract = {};                        ///< that the rank's parameters carry
  std::vector<DtypeFinding> dtypes = {};              ///< empty unless asked for
  /// The error that ended a step in which operations had left their unit's dtype, which may be why:
  /// nothing else is known of such a step. Empty: it ended well.
  std::string failed = {};
  bool has_loads = false;  ///< DryOptions::loads were given
};

/// Whether the operations of a dry forward are looked at for results of another dtype than their
/// unit's.
enum class WatchDtypes : std::uint8_t { kNo, kYes };

struct DryOptions {
  WatchDtypes dtypes = WatchDtypes::kNo;
  ExpertLoads loads = {};  ///< of every rank and every micro-batch
};

/// Steps rank `rank` of `ranks`. Without training.seq_len a row has few tokens, and no images.
/// Errors: as train's, of configuration, contract and layout; as require_fit() for loads and as
/// DryBatches; kConfig for more tokens than are counted.
DryStep dry_step(const Config& config, const ModelSource& source, int rank, int ranks,
                 const DryOptions& options = {});

/// Deals out the tokens of each router of a thread by `loads`, which are not even. Errors: as
/// require_fit().
moe::ChoiceScope::Choose choice_by(const ExpertLoads& loads, const models::RoutedExperts& of);

}  // namespace tessera::train
