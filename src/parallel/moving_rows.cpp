// all_to_all as two autograd nodes. In forward Begin issues and Finish waits; in backward Finish
// issues and Begin waits. Between the two the arriving rows must not be read.
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <memory>
#include <utility>

#include "base/first_derivative.h"
#include "base/test_hooks.h"
#include "comm/turns.h"
#include "grad/region.h"
#include "parallel/transition.h"
#include "parallel/transition_watch.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct AllToAll : Transition {
  AllToAll(const Axis& over, Splits rows, std::string name)
      : Transition("all_to_all", over, std::move(name)), splits(std::move(rows)) {}

  at::Tensor forward(const at::Tensor& rows) const override {
    return exchange_rows(rows, axis, splits, where);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    return exchange_rows(grad, axis, splits.swapped(), where, Direction::kBackward);
  }
  TransitionForm form() const override { return {.splits = splits}; }

  const Splits splits;
};

/// The exchange under way in one direction, which both nodes share.
class UnderWay : public torch::CustomClassHolder {
 public:
  UnderWay(c10::intrusive_ptr<AllToAll> transition, std::function<void()> meanwhile_back)
      : of_(std::move(transition)), meanwhile_back_(std::move(meanwhile_back)) {}

  at::Tensor begin(Direction direction, const at::Tensor& given) {
    const bool is_forward = direction == Direction::kForward;
    rows_ = std::make_unique<RowsUnderWay>(
        given, of_->axis, is_forward ? of_->splits : of_->splits.swapped(), of_->where, direction);
    given_ = given;
    return rows_->arriving();
  }
  at::Tensor finish(Direction direction) {
    TESSERA_INVARIANT(rows_, of_->where, ": rows that were not sent");
    if (direction == Direction::kBackward && meanwhile_back_) {
      // A separate turn, also where there is nothing to do, so that every rank takes as many.
      if (of_->axis.gives_turn) comm::Turns::pass();
      meanwhile_back_();
    }
    rows_->finish();
    const at::Tensor arrived = std::exchange(rows_, nullptr)->arriving();
    note_transition(*of_, direction, std::exchange(given_, at::Tensor()), arrived);
    return arrived;
  }

 private:
  const c10::intrusive_ptr<AllToAll> of_;
  const std::function<void()> meanwhile_back_;
  std::unique_ptr<RowsUnderWay> rows_;
  at::Tensor given_;
};

c10::intrusive_ptr<UnderWay> under_way_of(AutogradContext* ctx) {
  return c10::dynamic_intrusive_pointer_cast<UnderWay>(ctx->saved_data["under way"].toCapsule());
}

struct BeginFunction : torch::autograd::Function<BeginFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows,
                            const c10::intrusive_ptr<UnderWay>& under_way) {
    grad::refuse_recording("a transition between placements");
    ctx->saved_data["under way"] = c10::IValue::make_capsule(under_way);
    // The result gets a history, but the rows under way do not: with it they would hold the graph,
    // which holds them, where an error comes before the wait.
    return under_way->begin(Direction::kForward, rows.detach()).detach();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& /*grads*/) {
    base::refuse_double_backward();
    return {under_way_of(ctx)->finish(Direction::kBackward), at::Tensor()};
  }
};

/// Waits for the rows. Undefined gradients become zeros. [Note: left-out results]
struct FinishFunction : torch::autograd::Function<FinishFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& /*arriving*/,
                            const c10::intrusive_ptr<UnderWay>& under_way) {
    grad::refuse_recording("a transition between placements");
    ctx->saved_data["under way"] = c10::IValue::make_capsule(under_way);
    return under_way->finish(Direction::kForward).detach();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    under_way_of(ctx)->begin(Direction::kBackward, grads[0]);
    // It only has the sizes that Begin expects; Begin returns the rows that arrive.
    return {grads[0], at::Tensor()};
  }
};

}  // namespace

at::Tensor MovingRows::finish() {
  if (!under_way_) return std::exchange(arriving_, at::Tensor());
  const auto under_way = c10::dynamic_intrusive_pointer_cast<UnderWay>(std::move(under_way_));
  return FinishFunction::apply(std::exchange(arriving_, at::Tensor()), under_way);
}

MovingRows begin_all_to_all(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                            const std::string& where, std::function<void()> meanwhile_back) {
  MovingRows moving;
  if (axis.alone()) {
    moving.arriving_ = rows;
    return moving;
  }
  auto transition = c10::make_intrusive<AllToAll>(axis, splits, where);
  // Tests see both ends of a transition as one.
  if (test_hooks::transition_forward.get() != nullptr ||
      test_hooks::transition_backward.get() != nullptr) {
    moving.arriving_ = apply_transition(rows, std::move(transition));
    return moving;
  }
  const auto under_way =
      c10::make_intrusive<UnderWay>(std::move(transition), std::move(meanwhile_back));
  moving.arriving_ = BeginFunction::apply(rows, under_way);
  moving.under_way_ = under_way;
  return moving;
}

at::Tensor all_to_all(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                      const std::string& where) {
  return begin_all_to_all(rows, axis, splits, where).finish();
}

}  // namespace tessera::parallel
