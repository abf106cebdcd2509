// A front end of another language, as far as a unit can tell: its exceptions are none of C++ where
// a call of the unit ends, each of its tensors has an object in addition to the reference that the
// unit is given, and its checkpoints are non-reentrant ones: the second run, inside backward, puts
// what it saves in the places of what the first run saved, and stops early.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/plain.h"
#include "tessera/shard.h"

namespace tessera::test {

using Several = std::vector<at::Tensor>;
using UnitBody = std::function<Several(const Several&)>;

/// A second run has all that backward needs.
struct EarlyStop {};

enum class Stops { kEarly, kNever };

class Frame;

/// A tensor that a node keeps for its backward, or its place in the running checkpoint.
class Saved {
 public:
  explicit Saved(const at::Tensor& tensor);
  at::Tensor get() const;

 private:
  at::Tensor tensor_;
  std::shared_ptr<Frame> frame_;
  std::size_t place_ = 0;
};

/// body(inputs), which runs again in backward. As torch.utils.checkpoint with use_reentrant=False.
Several non_reentrant(const UnitBody& body, const Several& inputs, Stops stops = Stops::kEarly);
/// The same as torch.utils.checkpoint with use_reentrant=True.
at::Tensor reentrant(const UnitBody& body, const at::Tensor& x);

/// x W^T, which saves both through Saved.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight);

class FrontEnd : public ShardedBase {
 public:
  using ShardedBase::Call;
  using ShardedBase::CallKind;

  FrontEnd(std::shared_ptr<torch::nn::Module> module, UnitBody run, const Mesh& mesh,
           const PrecisionPolicy& policy = {}, const ShardOptions& options = {})
      : ShardedBase(std::move(module), mesh, policy, options), run_(std::move(run)) {}

  Several call(Several inputs);
  at::Tensor operator()(const at::Tensor& x) { return call({x})[0]; }
  void become(UnitBody run) { run_ = std::move(run); }

  std::optional<CallKind> kind;   ///< none: kind_here()
  bool has_objects = false;       ///< results have objects of the front end, which it gives up
  bool says_base_objects = true;  ///< it says so of those of what results are views of

 private:
  UnitBody run_;
};

}  // namespace tessera::test
