// Regions: parts of a model whose forward and backward are recorded once and run again without
// autograd. [Note: regions]
//
// A region is one autograd node inside a unit's forward. Its first call is eager, since it may make
// tables that later ones find. The second is recorded (tape.h): the body runs with a graph of its
// own, which the node's backward runs through. The next two are recorded again, on other data, and
// compared: the operations with those of before, and bit for bit the results of the program
// (region_program.h) for the same inputs; a difference names the operation, and the region stays
// eager from then on. All later calls are replayed, except those with another value of an argument
// that has not varied so far, which are compared first. A call replays what was recorded under the
// same guards (variants.h): sizes, strides and dtypes of arguments, what needs a gradient, modes,
// threads, and memory from outside that is where it was (outside.h); there are four variants at
// most. Any other call runs the body, and the reason is counted. No region communicates, so that
// one rank may replay while another one does not.
//
// Gradients reach their slots by the sink, as any others do. In its backward a replayed node finds
// what forward left in its entry; where the gradients that come are not like those that were
// recorded (one is missing, another layout), the body runs again from the kept arguments. Sources:
// DeepSpeed PR 8038 (raw gradients of a compiled backward), torchtitan's tests of traced against
// eager gradients bit for bit. Next: tape.h, region_program.h, live_entry.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "capture/replay/live_entry.h"
#include "grad/region.h"
#include "tessera/compile.h"

namespace tessera::capture {

class Region;

/// The state that the regions of one model share.
struct SharedByRegions {
  ReplayCalls calls;
  std::shared_ptr<Blocks> blocks = std::make_shared<Blocks>();
  std::set<std::string> said;  ///< reasons that were logged

  /// To be called after a replay of `region`. After the last one of a forward, known from the
  /// forward before, the head and the loss follow, where an eager step holds most and has no
  /// scratch: scratch blocks are decommitted.
  void forward_ran(const Region& region);
  void backward_runs();
  void add(const std::shared_ptr<Region>& region) {
    std::erase_if(regions_, [](const auto& one) { return one.expired(); });
    regions_.push_back(region);
  }
  /// Enclose a recorded forward and its backward, whose graph holds what it has read. All regions
  /// count holders before the first such graph exists and after the last one.
  void recording_begins();
  void recording_ends();
  bool is_recording() const { return recordings_ > 0; }
  /// To be called when a call runs eagerly while another one of its region is recorded, as the
  /// micro-batches of a pipeline do: its graph holds what it has read, perhaps for longer than the
  /// recording's.
  void makes_eager_graph() { eager_graphs_ = true; }
  /// Returns at a call whether such graphs may exist. Those of eager calls are gone at the next
  /// call after this one.
  bool has_graphs() { return is_recording() || std::exchange(eager_graphs_, false); }
  /// Calls Holders::look() of all regions. [Note: weak holds]
  void look_at_holders(bool has_graphs) const;
  /// Returns what a recorded or compared call took to the system. Small pieces stay on the heap for
  /// good; memory between them no longer fits what eager calls take, which would need more.
  void trim() const;

 private:
  const Region *ran_last_ = nullptr, *ends_forward_ = nullptr;  // only compared: they may be gone
  int ran_ =
      0;  // in this forward; with one alone, faulting pages in again costs more than it saves
  int recordings_ = 0;
  bool eager_graphs_ = false;
  std::vector<std::weak_ptr<Region>> regions_;
};

class ReplayedRegions : public grad::Regions {
 public:
  ReplayedRegions() = default;
  std::vector<at::Tensor> run(const std::shared_ptr<torch::nn::Module>& owner,
                              std::string_view name, const std::vector<at::Tensor>& inputs,
                              const grad::RegionBody& body) override;
  void forget() override;

  const ReplayCalls& calls() const { return shared_->calls; }
  Blocks& blocks() { return *shared_->blocks; }

 private:
  std::shared_ptr<SharedByRegions> shared_ = std::make_shared<SharedByRegions>();
  std::map<std::pair<const torch::nn::Module*, std::string>, std::shared_ptr<Region>> regions_;
};

/// Replays the regions of `model`, the outermost handle, from here on; changes nothing where they
/// are replayed already. Errors: kUsage in a step.
void replay_regions(const ShardedBase& model);

/// Returns the most that blocks of the regions of `model`, the outermost handle, took since the
/// last call of this, by unit; none without regions.
RegionBlocks take_region_blocks(const ShardedBase& model);
struct RegionBytes {
  std::int64_t mapped = 0;
  std::int64_t decommitted = 0;  ///< of these, without pages
};
/// Returns what they take now.
RegionBytes region_bytes(const ShardedBase& model);

}  // namespace tessera::capture
