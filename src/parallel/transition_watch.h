// TransitionWatch sees the inputs and results of the transitions of a thread.
//
// `tessera check` compares them with what each transition should make of the inputs of all ranks. A
// watch must copy what it keeps: tensors may be changed in place afterwards. Without a watch
// nothing is done. Next: transition.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/axis.h"

namespace tessera::parallel {

class Transition;

class TransitionWatch {
 public:
  virtual ~TransitionWatch() = default;
  /// `given` and `made` are this rank's tensors; in backward, the gradients of result and input.
  virtual void saw(const Transition& of, Direction direction, const at::Tensor& given,
                   const at::Tensor& made) = 0;
};

/// Calls the watch of this thread, if there is one.
void note_transition(const Transition& of, Direction direction, const at::Tensor& given,
                     const at::Tensor& made);

/// While alive, `watch` sees the transitions of this thread.
class TransitionWatchScope {
 public:
  explicit TransitionWatchScope(TransitionWatch& watch);
  ~TransitionWatchScope();
  TransitionWatchScope(const TransitionWatchScope&) = delete;
  TransitionWatchScope& operator=(const TransitionWatchScope&) = delete;

 private:
  TransitionWatch* outer_;
};

}  // namespace tessera::parallel
