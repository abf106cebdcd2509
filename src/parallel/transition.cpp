#include "parallel/transition.h"

#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"

namespace tessera::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

thread_local TransitionStandIn* stand_in_of_thread = nullptr;

/// Undefined gradients are filled up with zeros: a result may be left out on this rank alone, and
/// all ranks have to issue the same collectives. [Note: left-out results]
struct TransitionFunction : torch::autograd::Function<TransitionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const c10::intrusive_ptr<Transition>& transition) {
    ctx->saved_data["transition"] = c10::IValue::make_capsule(transition);
    if (stand_in_of_thread != nullptr) return stand_in_of_thread->forward(*transition, x.detach());
    return transition->forward(x.detach());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    const auto held = ctx->saved_data["transition"].toCapsule();
    const auto* transition = dynamic_cast<const Transition*>(held.get());
    return {stand_in_of_thread != nullptr ? stand_in_of_thread->backward(*transition, grads[0])
                                          : transition->backward(grads[0]),
            at::Tensor()};
  }
};

}  // namespace

StandInScope::StandInScope(TransitionStandIn& stand_in) { stand_in_of_thread = &stand_in; }
StandInScope::~StandInScope() { stand_in_of_thread = nullptr; }

at::Tensor apply_transition(const at::Tensor& x, c10::intrusive_ptr<Transition> transition) {
  return TransitionFunction::apply(x, transition);
}

}  // namespace tessera::parallel
