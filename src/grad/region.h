// The interface between a layer and code that records and replays parts of its model (capture/).
//
// A region is a function of the tensors that it gets. A layer marks it with in_region(), which
// calls it directly where nothing replays. A recording also needs to know what operations do not
// show: which raw gradient belongs to which slot (GradSink), and what makes a region impossible to
// replay. Threads: each forward and backward runs on one, the rank's. Next:
// ../capture/replay/regions.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/pass_local.h"
#include "grad/keep.h"
#include "grad/sink.h"

namespace tessera::grad {

using RegionBody = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

/// Replays the regions of one model.
class Regions {
 public:
  virtual ~Regions() = default;
  /// Returns body(inputs), or exactly the bits that it would return, also for gradients. `owner`
  /// has one region of that `name`; "" is all of it. Inputs may be undefined; the body reads
  /// nothing but them and what belongs to `owner`. Errors: those of the body.
  virtual std::vector<at::Tensor> run(const std::shared_ptr<torch::nn::Module>& owner,
                                      std::string_view name, const std::vector<at::Tensor>& inputs,
                                      const RegionBody& body) = 0;
  /// Forgets all recordings, since parameters have moved.
  virtual void forget() = 0;
};

/// Returns those of the model whose forward runs on this thread; null: bodies are called.
const std::shared_ptr<Regions>& regions_here();

/// While alive, `regions` are those of the model in this pass.
class RegionsScope {
 public:
  explicit RegionsScope(std::shared_ptr<Regions> regions);
  ~RegionsScope();
  RegionsScope(const RegionsScope&) = delete;
  RegionsScope& operator=(const RegionsScope&) = delete;

 private:
  const std::shared_ptr<Regions> regions_;
  const std::shared_ptr<Regions>* outer_;
};

/// Runs the body as region `name` of `owner`, by the `regions` of the forward that it belongs to.
std::vector<at::Tensor> in_region(const std::shared_ptr<Regions>& regions,
                                  const std::shared_ptr<torch::nn::Module>& owner,
                                  std::string_view name, const std::vector<at::Tensor>& inputs,
                                  const RegionBody& body);

/// Records the operations of this thread.
class Recording {
 public:
  virtual ~Recording() = default;
  /// Notes that the slot's parameter gets the gradient `raw` here, in addition to earlier ones.
  virtual void gradient(GradSink& sink, SlotId slot, const at::Tensor& raw) = 0;
  /// Notes a gradient whose `product` is formed later (WeightGradStore).
  virtual void deferred(GradSink& sink, SlotId slot, const Product& product) = 0;
  /// Notes that keep() returns `value`: kept in the first run of a checkpoint, or taken from it
  /// again.
  virtual void keep(const at::Tensor& value, CheckpointRun run) = 0;
  /// Notes that the recording cannot be replayed. The first reason counts.
  virtual void refuse(std::string_view why) = 0;
};

/// Returns the recording of this thread; null where there is none.
Recording* recording();

/// While alive, `recording` records this thread, and passes take no turns: it records one.
class RecordingScope {
 public:
  explicit RecordingScope(Recording* recording);
  ~RecordingScope();
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;

 private:
  Recording* outer_;
  const base::NoTurns no_turns_;
};

/// The same for the forward that runs here. The body is called directly where no shared pointer
/// holds `owner`.
template <class Body>
std::vector<at::Tensor> in_region(torch::nn::Module& owner, std::string_view name,
                                  const std::vector<at::Tensor>& inputs, const Body& body) {
  const auto& regions = regions_here();
  if (regions == nullptr) return body(inputs);
  return in_region(regions, owner.weak_from_this().lock(), name, inputs, body);
}

/// Calls Recording::refuse() where this thread is recorded.
inline void refuse_recording(std::string_view why) {
  if (auto* here = recording()) here->refuse(why);
}

}  // namespace tessera::grad
