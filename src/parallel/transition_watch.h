// TransitionWatch: sees what the transitions of a thread are given and what they make of it.
//
// `tessera check` compares that with what each transition is for, from the inputs of all ranks. Whoever
// watches copies what it keeps: tensors may be changed in place afterwards. Nothing is looked at while
// there is no watch. Next: transition.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/axis.h"

namespace tessera::parallel {

class Transition;

class TransitionWatch {
 public:
  virtual ~TransitionWatch() = default;
  /// `given` and `made` are this rank's tensors; in backward the gradients of result and input.
  virtual void saw(const Transition& of, Direction direction, const at::Tensor& given,
                   const at::Tensor& made) = 0;
};

/// Tells the watch of this thread, where there is one.
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
