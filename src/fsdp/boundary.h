// The autograd nodes at the edges of a unit's forward: they tell the runtime when its backward
// begins and ends.
//
// Identity nodes, made by hand: a custom Function would make its outputs views, which users may not
// change in place. One a tensor: autograd runs every node behind a node that it runs, so behind one
// over all results it would run what made those that no root uses, with undefined gradients, of
// which some functions make zeros. Those of the results run before anything inside does, since
// autograd takes nodes in reverse of their making, and those of the arguments (the markers of
// [Note: readiness]) after everything inside has run: the first of either kind that runs says so
// for all.
//
// [Note: in-place changes] What crosses a unit's border is an alias: memory and version counter are
// those of the original, the history is another. A change in place on one side gives the tensor of
// the other side the new values under the old history: the right loss, the wrong gradient, and
// autograd sees nothing. So the counter of an argument may not move while the module runs, nor that
// of a result between forward and backward if somebody beside the caller holds the original. A
// result that nobody else holds is the caller's, to be changed as ever.
//
// Autograd has a thread for each device: nodes of tensors on two of them would come to the unit at
// the same time, and to what its backward keeps no lock is taken. So all that requires grad is on
// the device of the parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdp/runtime.h"

namespace tessera::fsdp {

/// Tensors that crossed a border, and their version counters then.
class Crossed {
 public:
  /// `position`: among all tensors of the call. Inference tensors have no counter and are left out.
  void add(std::size_t position, const at::Tensor& tensor);
  /// Errors: kUsage naming the unit and the first argument that changed.
  void require_arguments_unchanged(const Unit& unit) const;
  /// The same for results.
  void require_results_unchanged(const Unit& unit) const;

 private:
  struct One {
    std::size_t position;
    c10::VariableVersion counter;  ///< the tensor itself may be gone, its memory with it
    std::uint32_t version;
  };
  const One* first_changed() const;
  std::vector<One> tensors_;
};

/// Errors: kUsage naming the unit, the first of the grad-requiring ones that is elsewhere, and both
/// devices. `what` they are: "argument", "result".
void require_device(const std::vector<at::Tensor*>& tensors, const char* what, const Unit& unit);
/// Its parameters as they come: they are gone when the forward has ended. Errors: kUsage naming
/// unit, result and parameter.
void require_no_parameters(const std::vector<at::Tensor*>& outputs, const Unit& unit);
/// Replaces the grad-requiring ones among `inputs` by aliases behind markers. Returns them; null
/// where there are none.
std::shared_ptr<const Crossed> mark_inputs(const std::vector<at::Tensor*>& inputs,
                                           const std::shared_ptr<Entry>& entry);
/// Replaces the grad-requiring ones among `outputs` by aliases behind pre-backward nodes, each
/// of which compares all those that others hold, too. `inputs` are what the call itself still
/// holds.
void mark_outputs(const std::vector<at::Tensor*>& outputs, const std::vector<at::Tensor*>& inputs,
                  const std::shared_ptr<Entry>& entry);

}  // namespace tessera::fsdp
