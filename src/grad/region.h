// The seam between a layer and whoever records and replays parts of its model (capture/).
//
// A region is a function of the tensors that it is given: a layer says where one begins and ends, by
// in_region(), and is called as ever where nobody replays. Who records meanwhile is told what
// operations do not show: which raw gradient belongs to which slot (GradSink), and what makes a
// region impossible to replay. Threads: each forward and backward runs on one, which is the rank's.
// Next: ../capture/replay/regions.h.
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

/// What replays the regions of one model.
class Regions {
 public:
  virtual ~Regions() = default;
  /// body(inputs) of `owner`, which has one region of that `name` ("" = all of it), or what it would
  /// have given, bit for bit, gradients too. Inputs may be undefined; the body reads nothing else
  /// but what belongs to `owner`. Errors: those of the body.
  virtual std::vector<at::Tensor> run(const std::shared_ptr<torch::nn::Module>& owner,
                                      std::string_view name, const std::vector<at::Tensor>& inputs,
                                      const RegionBody& body) = 0;
  /// Parameters lie elsewhere from here on: what was recorded holds no longer.
  virtual void forget() = 0;
};

/// Of the model whose forward runs on this thread; null: bodies are called.
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

/// Body of `owner` in its region `name`, by the `regions` of the forward that it belongs to.
std::vector<at::Tensor> in_region(const std::shared_ptr<Regions>& regions,
                                  const std::shared_ptr<torch::nn::Module>& owner,
                                  std::string_view name, const std::vector<at::Tensor>& inputs,
                                  const RegionBody& body);

/// Who records the operations of this thread.
class Recording {
 public:
  virtual ~Recording() = default;
  /// `raw` is what the slot's parameter gets here, beside what it got before.
  virtual void gradient(GradSink& sink, SlotId slot, const at::Tensor& raw) = 0;
  /// The same, but `product` is formed later (WeightGradStore).
  virtual void deferred(GradSink& sink, SlotId slot, const Product& product) = 0;
  /// keep() returns `value`: kept in the first run of a checkpoint, or taken from it again.
  virtual void keep(const at::Tensor& value, CheckpointRun run) = 0;
  /// What is recorded can not be replayed. The first reason counts.
  virtual void refuse(std::string_view why) = 0;
};

/// Null: nobody.
Recording* recording();

/// While alive, `recording` is told, and passes take no turns: it hears of one.
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

/// The same, of the forward that runs here; `owner` is held by a shared pointer, else it is called.
template <class Body>
std::vector<at::Tensor> in_region(torch::nn::Module& owner, std::string_view name,
                                  const std::vector<at::Tensor>& inputs, const Body& body) {
  const auto& regions = regions_here();
  if (regions == nullptr) return body(inputs);
  return in_region(regions, owner.weak_from_this().lock(), name, inputs, body);
}

/// As Recording::refuse(), where somebody records.
inline void refuse_recording(std::string_view why) {
  if (auto* here = recording()) here->refuse(why);
}

}  // namespace tessera::grad
