#include "fsdp/recompute.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "base/sample_place.h"
#include "fsdp/runtime.h"
#include "tessera/error.h"
#include "tessera/recompute.h"

namespace tessera {
namespace fsdp {
namespace {

// Which checkpoint this thread is inside of; a thread is a rank, so this is per rank.
thread_local Recorded* t_first = nullptr;
thread_local Recorded* t_again = nullptr;

}  // namespace

FirstForwardScope::FirstForwardScope(Recorded& recorded) : outer_(t_first) { t_first = &recorded; }
FirstForwardScope::~FirstForwardScope() { t_first = outer_; }
RecomputeScope::RecomputeScope(Recorded& recorded) : outer_(t_again) {
  recorded.next = 0;
  t_again = &recorded;
}
RecomputeScope::~RecomputeScope() { t_again = outer_; }
Recorded* first_forward() { return t_first; }
Recorded* recomputing() { return t_again; }

}  // namespace fsdp

namespace {

using torch::autograd::variable_list;

at::Tensor random_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(const at::Tensor& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// Random numbers as they came the first time; afterwards they go on where they were. An undefined
/// state: nothing was drawn, nothing changes.
class RandomStateScope {
 public:
  explicit RandomStateScope(const at::Tensor& state) {
    if (!state.defined()) return;
    before_ = random_state();
    set_random_state(state);
  }
  ~RandomStateScope() {
    if (before_.defined()) set_random_state(before_);
  }
  RandomStateScope(const RandomStateScope&) = delete;
  RandomStateScope& operator=(const RandomStateScope&) = delete;

 private:
  at::Tensor before_;
};

/// The state that backward needs travels in the context's saved_data only as tensors; the function
/// and the recorded entries ride in a holder.
struct Block : torch::CustomClassHolder {
  std::function<at::Tensor(const std::vector<at::Tensor>&)> run;
  fsdp::Recorded recorded;
  at::Tensor random;  ///< before the first forward, if that drew anything (5 KB)
  std::optional<SamplePlace> place = sample_place();
};

class Recompute : public torch::autograd::Function<Recompute> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const c10::intrusive_ptr<Block>& block, at::TensorList arguments) {
    const auto inputs = arguments.vec();
    context->saved_data["block"] = c10::IValue::make_capsule(block);
    context->save_for_backward(inputs);
    const fsdp::FirstForwardScope scope(block->recorded);
    const at::NoGradGuard no_grad;
    auto random = random_state();
    auto output = block->run(inputs);
    if (!at::equal(random, random_state())) block->random = std::move(random);
    // An input that comes back unchanged would be taken for an in-place result.
    for (const auto& input : inputs) {
      if (output.is_same(input)) return output.clone();
    }
    return output;
  }

  static variable_list backward(torch::autograd::AutogradContext* context, variable_list grads) {
    const auto block =
        c10::static_intrusive_pointer_cast<Block>(context->saved_data["block"].toCapsule());
    // The outermost graph task must know the runtimes before the nested one reaches them.
    for (const auto& entry : block->recorded.entries) entry->runtime->begin_backward();
    variable_list inputs;
    for (const auto& saved : context->get_saved_variables()) {
      inputs.push_back(saved.detach().set_requires_grad(saved.requires_grad()));
    }
    at::Tensor output;
    {
      const fsdp::RecomputeScope scope(block->recorded);
      const RandomStateScope random(block->random);
      const SampleScope place(block->place);
      const at::AutoGradMode grad(true);
      output = block->run(inputs);
    }
    if (output.requires_grad()) torch::autograd::backward({output}, {grads.at(0)});
    variable_list result{at::Tensor()};  // the block itself
    for (auto& input : inputs) {
      result.push_back(input.requires_grad() ? input.grad() : at::Tensor());
    }
    return result;
  }
};

}  // namespace

at::Tensor checkpoint(std::function<at::Tensor(const std::vector<at::Tensor>&)> function,
                      const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto block = c10::make_intrusive<Block>();
  block->run = std::move(function);
  auto arguments = inputs;
  const bool any =
      std::any_of(inputs.begin(), inputs.end(), [](const auto& t) { return t.requires_grad(); });
  if (!any) {
    // Parameters alone would not make the node part of the graph: an empty input that requires grad
    // does.
    arguments.push_back(at::empty({0}).set_requires_grad(true));
    block->run = [run = std::move(block->run)](const std::vector<at::Tensor>& all) {
      return run({all.begin(), all.end() - 1});
    };
  }
  // A TensorList: in a vector the engine would not find the tensors, and cut the graph in silence.
  return Recompute::apply(block, at::TensorList(arguments));
}

}  // namespace tessera
