// Injection: a mistake in every run that begins while it lives.
//
// Runs are made inside the library (small runs, dry steps, training), so that everything goes in by
// base/test_hooks.h, from the first hook that a rank comes to: made_parts, on the rank's thread. A
// run on one rank is left as it is: checks take it for the right one. Next: mistakes.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "comm/group.h"
#include "comm/p2p.h"
#include "golden/faulty_run.h"
#include "tessera/contract.h"
#include "tessera/mesh.h"
#include "tessera/shard.h"
#include "train/data/data.h"
#include "train/step.h"

namespace tessera::mistakes {

using golden::RankParts;

/// Counts that the mistake did something.
using Act = std::function<void()>;

/// Replaces a transition; empty: it does what it does itself. An undefined result is that, too, and
/// does not count.
struct Instead {
  using Way = std::function<at::Tensor(const parallel::Transition&, const at::Tensor&)>;
  Way forward = {}, backward = {};
};

/// The changes of one rank. Empty functions change nothing.
struct Changes {
  /// Before the model is sharded.
  std::function<void(const RankParts&)> parts = {};
  std::function<Instead(const RankParts&)> transitions = {};
  /// Changes a model that is parallel now.
  std::function<void(const Mesh&, ShardedBase&, const Act&)> model = {};
  /// In the place of sums over ranks; undefined ones are not changed.
  std::function<std::unique_ptr<golden::SumStandIn>(const RankParts&)> sums = {};
  using DataRanks = std::function<comm::Group*(train::RankSum, comm::Group*)>;
  std::function<DataRanks(const RankParts&)> data_ranks = {};
  using Stages = std::function<comm::Group*(comm::Group*)>;
  std::function<Stages(const RankParts&)> stages_of_norm = {};
  using SumOfNorm = std::function<double(double, comm::Group*)>;
  std::function<SumOfNorm(const RankParts&)> sum_of_norm = {};
  using Accepted = std::function<void(const GradContract&, const at::Tensor& slot)>;
  std::function<Accepted(const RankParts&)> accepted = {};
  /// Whether a message is held back, on the threads that issue of several ranks.
  std::function<bool(const comm::Group&, const comm::Label&)> holds_back = {};
  std::function<comm::P2PTag(comm::P2PTag)> sends_as = {};
  /// Whether it changed something.
  std::function<bool(const Mesh&, const train::MicroBatch&)> micro_batch = {};
};

class Injection {
 public:
  explicit Injection(Changes changes);
  ~Injection();
  Injection(const Injection&) = delete;
  Injection& operator=(const Injection&) = delete;
  /// How often the mistake did something, on all ranks of all runs.
  int acted() const;

 private:
  struct Hooks;
  std::unique_ptr<Hooks> hooks_;
};

/// Whether the rank of this thread has last begun a forward or backward of unit `name`.
bool is_in_unit(const std::string& name);
/// The sum over the ranks of `group`; `mine` where that is null. Collective.
double sum_over(comm::Group* group, double mine);

}  // namespace tessera::mistakes
