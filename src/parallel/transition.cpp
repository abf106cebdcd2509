#include "parallel/transition.h"

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "base/first_derivative.h"
#include "base/pass_local.h"
#include "base/test_hooks.h"
#include "grad/region.h"
#include "parallel/transition_watch.h"

namespace tessera::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using WatchHere = base::PassLocal<base::PassValue::kTransitionWatch, TransitionWatch*>;

at::Tensor seen(const Transition& of, Direction direction, const at::Tensor& given,
                at::Tensor made) {
  note_transition(of, direction, given, made);
  return made;
}

/// Undefined gradients become zeros: a result may be unused on this rank alone, and all ranks have
/// to issue the same collectives. [Note: left-out results]
struct TransitionFunction : torch::autograd::Function<TransitionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const c10::intrusive_ptr<Transition>& transition) {
    grad::refuse_recording("a transition between placements");
    ctx->saved_data["transition"] = c10::IValue::make_capsule(transition);
    const auto* hook = test_hooks::transition_forward.get();
    return seen(
        *transition, Direction::kForward, x,
        hook != nullptr ? (*hook)(*transition, x.detach()) : transition->forward(x.detach()));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    const auto held = ctx->saved_data["transition"].toCapsule();
    const auto* transition = dynamic_cast<const Transition*>(held.get());
    const auto* hook = test_hooks::transition_backward.get();
    return {seen(*transition, Direction::kBackward, grads[0],
                 hook != nullptr ? (*hook)(*transition, grads[0]) : transition->backward(grads[0])),
            at::Tensor()};
  }
};

}  // namespace

void note_transition(const Transition& of, Direction direction, const at::Tensor& given,
                     const at::Tensor& made) {
  if (auto* const watch = WatchHere::here()) watch->saw(of, direction, given, made);
}

TransitionWatchScope::TransitionWatchScope(TransitionWatch& watch)
    : outer_(std::exchange(WatchHere::here(), &watch)) {}
TransitionWatchScope::~TransitionWatchScope() { WatchHere::here() = outer_; }

at::Tensor apply_transition(const at::Tensor& x, c10::intrusive_ptr<Transition> transition) {
  return TransitionFunction::apply(x, transition);
}

}  // namespace tessera::parallel
