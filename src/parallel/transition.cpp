#include "parallel/transition.h"

#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"

namespace tessera::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct TransitionFunction : torch::autograd::Function<TransitionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const c10::intrusive_ptr<Transition>& transition) {
    ctx->saved_data["transition"] = c10::IValue::make_capsule(transition);
    return transition->forward(x.detach());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    const auto held = ctx->saved_data["transition"].toCapsule();
    const auto* transition = dynamic_cast<const Transition*>(held.get());
    return {transition->backward(grads[0]), at::Tensor()};
  }
};

}  // namespace

at::Tensor apply_transition(const at::Tensor& x, c10::intrusive_ptr<Transition> transition) {
  return TransitionFunction::apply(x, transition);
}

}  // namespace tessera::parallel
