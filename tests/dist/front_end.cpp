#include "dist/front_end.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <utility>

namespace tessera::test {
namespace {

enum class Which { kFirst, kAgain };
struct Running {
  std::shared_ptr<Frame> frame;
  Which which;
};
thread_local std::vector<Running> t_running;

/// Makes an object of an interpreter, another one each time; it is never read.
c10::SafePyObject new_object() {
  static auto* const no_interpreter = [] {
    auto* made = new c10::impl::PyInterpreter(nullptr);
    made->disarm();  // counts no references
    return made;
  }();
  thread_local std::uintptr_t last = 0;
  last += 16;
  return {reinterpret_cast<PyObject*>(last), no_interpreter};
}

/// The frame is the one under way, and hooks on saved tensors are set, as torch sets them. Without
/// Python there are none to call.
class RunningScope {
 public:
  RunningScope(std::shared_ptr<Frame> frame, Which which) {
    t_running.push_back({std::move(frame), which});
    at::SavedTensorDefaultHooks::lazy_initialize();
    at::SavedTensorDefaultHooks::push_hooks(new_object(), new_object());
  }
  ~RunningScope() {
    at::SavedTensorDefaultHooks::pop_hooks();
    t_running.pop_back();
  }
  RunningScope(const RunningScope&) = delete;
  RunningScope& operator=(const RunningScope&) = delete;
};

}  // namespace

class Frame : public std::enable_shared_from_this<Frame> {
 public:
  Frame(UnitBody body, const Several& inputs, Stops stops) : body_(std::move(body)), stops_(stops) {
    for (const auto& input : inputs) inputs_.emplace_back(input);
  }
  std::size_t save(const at::Tensor& tensor, Which which) {
    if (which == Which::kFirst) return count_++;
    again_.push_back(tensor.detach());
    if (stops_ == Stops::kEarly && again_.size() == count_) throw EarlyStop();
    return again_.size() - 1;
  }
  at::Tensor get(std::size_t place) {
    const int task = torch::autograd::get_current_graph_task_id();
    if (std::exchange(task_, task) != task) run_again();
    return again_.at(place);
  }

 private:
  void run_again() {
    again_.clear();
    Several inputs;
    for (const auto& input : inputs_) inputs.push_back(input.get());
    const RunningScope scope(shared_from_this(), Which::kAgain);
    const at::AutoGradMode grad(true);
    try {
      body_(inputs);
    } catch (const EarlyStop&) {
    }
    if (again_.size() != count_) throw std::runtime_error("the second run saved other tensors");
  }

  UnitBody body_;
  Stops stops_;
  std::vector<Saved> inputs_;
  std::size_t count_ = 0;
  Several again_;
  int task_ = -1;
};

Saved::Saved(const at::Tensor& tensor) {
  if (t_running.empty()) {
    tensor_ = tensor;
    return;
  }
  const auto [frame, which] = t_running.back();
  frame_ = frame;
  place_ = frame->save(tensor, which);
}

at::Tensor Saved::get() const { return frame_ == nullptr ? tensor_ : frame_->get(place_); }

Several non_reentrant(const UnitBody& body, const Several& inputs, Stops stops) {
  const auto frame = std::make_shared<Frame>(body, inputs, stops);
  const RunningScope scope(frame, Which::kFirst);
  return body(inputs);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class T>
struct Held : torch::CustomClassHolder {
  explicit Held(T it) : value(std::move(it)) {}
  T value;
};

template <class T>
void hold(AutogradContext* context, T value) {
  context->saved_data["held"] =
      c10::IValue::make_capsule(c10::make_intrusive<Held<T>>(std::move(value)));
}

template <class T>
const T& held(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Held<T>>(context->saved_data["held"].toCapsule())
      ->value;
}

struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    hold(context, std::pair{Saved(x), Saved(weight)});
    return at::linear(x, weight);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto& [x, weight] = held<std::pair<Saved, Saved>>(context);
    const auto values = x.get();
    return {at::mm(gradients[0], weight.get()), at::mm(gradients[0].t(), values)};
  }
};

struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(AutogradContext* context, const UnitBody* body, const at::Tensor& x) {
    hold(context, *body);
    context->save_for_backward({x});
    return (*body)({x})[0];
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::AutoGradMode grad(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const auto y = held<UnitBody>(context)({x})[0];
    torch::autograd::backward({y}, {gradients[0]});
    return {at::Tensor(), x.grad()};
  }
};

}  // namespace

at::Tensor product(const at::Tensor& x, const at::Tensor& weight) {
  return Product::apply(x, weight);
}

at::Tensor reentrant(const UnitBody& body, const at::Tensor& x) {
  return Reentrant::apply(&body, x);
}

Several FrontEnd::call(Several inputs) {
  Call one_call(*this, kind.value_or(Call::kind_here()));
  std::vector<at::Tensor*> entering;
  for (auto& input : inputs) entering.push_back(&input);
  one_call.enter(entering);
  Several results;
  std::optional<std::string> error;
  bool stopped = false;
  try {
    results = run_(inputs);
  } catch (const EarlyStop&) {
    stopped = true;
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  // Here no exception of C++ is under way.
  if (stopped) {
    one_call.stop();
    one_call.fail("nothing happens any more");
    throw EarlyStop();
  }
  if (error) {
    one_call.fail("an exception of the front end");
    one_call.stop();
    throw std::runtime_error(*error);
  }
  std::vector<at::Tensor*> leaving;
  Several objects, bases;
  std::vector<std::size_t> wrappers, base_wrappers;
  for (auto& result : results) {
    leaving.push_back(&result);
    if (!has_objects) continue;
    objects.push_back(result);
    wrappers.push_back(1);
    const bool is_new_base =
        result.is_view() && std::ranges::none_of(bases, [&](const at::Tensor& base) {
          return base.is_same(result._base());
        });
    bases.push_back(is_new_base ? at::Tensor(at::TensorBase(result._base())) : at::Tensor());
    base_wrappers.push_back(says_base_objects && result.is_view() ? 1 : 0);
  }
  one_call.leave(leaving, wrappers, base_wrappers);
  one_call.fail("nothing happens any more");
  return results;
}

}  // namespace tessera::test
