// One call of a sharded module: what the hooks of FSDP2 do around a forward. Also the autograd
// nodes at the borders of a unit's forward, which tell the runtime when its backward begins and
// ends.
//
// They are identity nodes that are made by hand: a custom Function would make its outputs views,
// which users may not change in place. There is one for each tensor: with one node for all results,
// autograd would also run the nodes of results that the backward does not use, with undefined
// gradients, of which some functions make zeros. The nodes of results run before everything inside,
// since autograd runs the newest nodes first, and those of arguments (the markers of [Note:
// readiness]) after everything inside. The first node of either kind that runs acts for all.
//
// [Note: in-place changes] A tensor that crosses a unit's border is an alias: it has the memory and
// the version counter of the original, but another history. A change in place on one side gives the
// tensor on the other side new values with an old history: the right loss, a wrong gradient, and no
// error of autograd. So the counter of an argument may not change while the module runs, nor that
// of a result between forward and backward where anything but the caller holds the original. A
// result that only the caller holds may be changed as usual.
//
// Autograd has one thread for each device: nodes of tensors on two devices would reach the unit at
// the same time, whose backward takes no locks. So all tensors that require grad are on the device
// of the parameters.
#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "base/interrupt.h"
#include "base/pass_local.h"
#include "base/threads/backward_pass.h"
#include "comm/torch_compat.h"
#include "fsdp/call_watch.h"
#include "fsdp/dtype_observer.h"
#include "fsdp/runtime/recompute_scopes.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/region.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"
#include "tessera/shard.h"

namespace tessera::fsdp {
namespace {

using WatchHere = base::PassLocal<base::PassValue::kCallWatch, CallWatch*>;

}  // namespace

CallWatchScope::CallWatchScope(CallWatch& watch)
    : outer_(std::exchange(WatchHere::here(), &watch)) {}
CallWatchScope::~CallWatchScope() { WatchHere::here() = outer_; }

/// Tensors that crossed a border, and their version counters at that time.
class Crossed {
 public:
  /// `position`: index among all tensors of the call. Inference tensors have no counter; they are
  /// left out.
  void add(std::size_t position, const at::Tensor& tensor);
  /// Errors: kUsage naming the unit and the first argument that changed.
  void require_arguments_unchanged(const Unit& unit) const;
  /// Errors: kUsage naming the unit and the first result that changed.
  void require_results_unchanged(const Unit& unit) const;

 private:
  struct One {
    std::size_t position;
    c10::VariableVersion counter;  ///< the tensor itself may be destroyed
    std::uint32_t version;
  };
  const One* first_changed() const;
  std::vector<One> tensors_;
};

void Crossed::add(std::size_t position, const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (counter.enabled()) tensors_.push_back({position, counter, counter.current_version()});
}

const Crossed::One* Crossed::first_changed() const {
  const auto found = std::find_if(tensors_.begin(), tensors_.end(), [](const One& one) {
    return one.counter.current_version() != one.version;
  });
  return found == tensors_.end() ? nullptr : &*found;
}

void Crossed::require_arguments_unchanged(const Unit& unit) const {
  const auto* changed = first_changed();
  if (changed == nullptr) return;
  throw Error(ErrorKind::kUsage,
              concat("unit ", unit.shown_name(), ": found that its forward changed argument ",
                     changed->position,
                     " in place, expected it as it came: the caller's tensor would have the new "
                     "values and a gradient without them; change a clone in the module"));
}

void Crossed::require_results_unchanged(const Unit& unit) const {
  const auto* changed = first_changed();
  if (changed == nullptr) return;
  throw Error(
      ErrorKind::kUsage,
      concat("unit ", unit.shown_name(), ": found that result ", changed->position,
             " was changed in place after the forward, expected it as it was returned: it is an "
             "argument or another result too, or the module or its graph keeps it, and there the "
             "gradient would be without the change; change a clone, or return one"));
}

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::impl::get_view_autograd_meta;

class Boundary : public Node {
 public:
  enum class Side { kBeforeBackward, kAfterBackward };
  Boundary(std::shared_ptr<Entry> entry, Side side, std::shared_ptr<const Crossed> held = nullptr)
      : entry_(std::move(entry)), side_(side), held_(std::move(held)) {
    places().add(this);
  }
  ~Boundary() override { places().remove(this); }
  Boundary(const Boundary&) = delete;
  Boundary& operator=(const Boundary&) = delete;

  variable_list apply(variable_list&& grads) override {
    if (side_ == Side::kBeforeBackward) {
      if (held_ != nullptr) {
        entry_->runtime->begin_backward(entry_.get());  // what throws from here on all ranks know
        held_->require_results_unchanged(*entry_->unit);
      }
      entry_->runtime->pre_backward(*entry_);
    } else {
      entry_->runtime->post_backward(*entry_);
    }
    return std::move(grads);
  }

  std::string name() const override {
    return side_ == Side::kBeforeBackward ? "TesseraPreBackward" : "TesseraPostBackward";
  }

  bool is_marker_of(const Entry& entry) const {
    return side_ == Side::kAfterBackward && entry_.get() == &entry;
  }

 private:
  LivingNodes& places() const {
    return side_ == Side::kBeforeBackward ? entry_->at_results : entry_->at_arguments;
  }

  std::shared_ptr<Entry> entry_;
  Side side_;
  std::shared_ptr<const Crossed> held_;  ///< the results whose originals are held elsewhere
};

bool is_wrapped(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

/// Replaces each tensor that requires grad by an alias with a separate node.
void wrap(const std::vector<at::Tensor*>& tensors, const std::shared_ptr<Entry>& entry,
          Boundary::Side side, const std::shared_ptr<const Crossed>& held = nullptr) {
  for (auto* tensor : tensors) {
    if (!is_wrapped(*tensor)) continue;
    const auto node = compat::make_node<Boundary>(entry, side, held);
    node->set_next_edges({torch::autograd::impl::gradient_edge(*tensor)});
    auto alias = tensor->detach();  // shares storage and version counter
    torch::autograd::set_history(alias, node);
    *tensor = std::move(alias);
  }
}

/// Returns the base of a view, else the tensor: a change in place would become part of its history.
const at::Tensor& root_of(const at::Tensor& tensor) {
  const auto* view = get_view_autograd_meta(tensor);
  return view != nullptr && view->has_bw_view() ? view->get_backward_view().base_ : tensor;
}

/// Returns how many references to `tensor` come from these tensors and their bases.
std::size_t references(const at::Tensor& tensor, const std::vector<at::Tensor*>& from) {
  std::size_t count = 0;
  for (auto place = from.begin(); place != from.end(); ++place) {
    const at::Tensor& other = **place;
    if (!other.defined()) continue;
    if (other.is_same(tensor)) ++count;
    const auto* view = get_view_autograd_meta(other);
    if (view == nullptr || std::any_of(from.begin(), place, [&](const at::Tensor* before) {
          return before->is_same(other);
        })) {
      continue;
    }
    if (view->has_bw_view() && view->get_backward_view().base_.is_same(tensor)) ++count;
    if (!view->shared_view_info() && view->has_fw_view() &&
        view->get_forward_view().base_.is_same(tensor)) {
      ++count;
    }
  }
  return count;
}

/// The results of a call, and how many references to them a front end holds only for this call.
struct Results {
  const std::vector<at::Tensor*>& tensors;
  const std::vector<std::size_t>& wrappers;       ///< by result; empty: none
  const std::vector<std::size_t>& base_wrappers;  ///< to the base of each result

  static std::size_t at(const std::vector<std::size_t>& counts, std::size_t i) {
    return i < counts.size() ? counts[i] : 0;
  }
};

/// Whether result `i` can be reached in another way than by the caller's reference, so that the
/// caller may not change it in place. [Note: in-place changes]
bool is_held_elsewhere(const Results& all, std::size_t i, const std::vector<at::Tensor*>& arguments,
                       const Entry& entry) {
  const auto& results = all.tensors;
  const at::Tensor& result = *results[i];
  const at::Tensor& root = root_of(result);
  const auto* made_by = dynamic_cast<const Boundary*>(torch::autograd::impl::grad_fn_unsafe(root));
  if (made_by != nullptr && made_by->is_marker_of(entry)) return true;  // an argument of the caller
  const bool is_view = !root.is_same(result);
  const auto wrappers = Results::at(all.wrappers, i);
  if (result.use_count() <= 1 + wrappers && !is_view) return false;
  for (std::size_t j = 0; j < results.size(); ++j) {
    const at::Tensor& other = *results[j];
    if (j == i || !other.defined() || !root_of(other).is_same(root)) continue;
    if (at::get_overlap_status(result, other) != at::MemOverlapStatus::No) return true;
  }
  const auto others_hold = [&](const at::Tensor& tensor, std::size_t given_up) {
    return tensor.use_count() >
           references(tensor, results) + references(tensor, arguments) + given_up;
  };
  return others_hold(result, wrappers) ||
         (is_view && others_hold(root, Results::at(all.base_wrappers, i)));
}

/// The role of tensors that cross a unit's border.
enum class Border : std::uint8_t { kArgument, kResult };

/// Requires the arguments of a model on the device where it computes, except numbers, which have no
/// dims, and tensors without values. Inner units may take tensors that the model around them keeps
/// on the host. Errors: as require_device().
void require_inputs_here(const std::vector<at::Tensor*>& inputs, const Unit& outermost) {
  const at::Device device = outermost.runtime().device();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = *inputs[i];
    if (!input.defined() || input.dim() == 0 || input.is_meta()) continue;
    TESSERA_CHECK(input.device() == device, ErrorKind::kUsage, "unit ", outermost.shown_name(),
                  ": found argument ", i, " on ", input.device().str(), ", expected ", device.str(),
                  " where its World computes; move it there by to(world.device())");
  }
}

/// Requires the tensors that require grad on the unit's device. Errors: kUsage naming the unit, the
/// first such tensor on another device, and both devices.
void require_device(const std::vector<at::Tensor*>& tensors, Border border, const Unit& unit) {
  const bool leaves = border == Border::kResult;
  const at::Device device = unit.runtime().device();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!is_wrapped(*tensors[i])) continue;
    TESSERA_CHECK(tensors[i]->device() == device, ErrorKind::kUsage, "unit ", unit.shown_name(),
                  ": found ", leaves ? "result " : "argument ", i, ", which requires grad, on ",
                  tensors[i]->device().str(), ", expected ", device.str(),
                  " where the unit's parameters are, since autograd runs devices at the same time; "
                  "move it before it ",
                  leaves ? "leaves" : "enters", " the unit, or detach() it");
  }
}

/// Requires that no result is a parameter or a view of one, whose memory is released when the
/// forward ends. Errors: kUsage naming unit, result and parameter.
void require_no_parameters(const std::vector<at::Tensor*>& outputs, const Unit& unit) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& result = *outputs[i];
    if (!result.defined() || !result.has_storage() || result.numel() == 0) continue;
    const auto* const storage = result.storage().unsafeGetStorageImpl();
    const auto& buckets = unit.buckets();
    const auto home = std::find_if(buckets.begin(), buckets.end(), [&](const auto& bucket) {
      return bucket->unsharded().storage() == storage;
    });
    if (home == buckets.end()) continue;
    const auto begins_in = [&](const auto& parameter) {
      const auto at = result.storage_offset() - parameter->placed().offset;
      return buckets[parameter->bucket] == *home && at >= 0 &&
             at < parameter->contract.local_numel();
    };
    const auto& parameters = unit.parameters();
    const auto found = std::find_if(parameters.begin(), parameters.end(), begins_in);
    throw Error(ErrorKind::kUsage,
                concat("unit ", unit.shown_name(), ": found its parameter ",
                       found == parameters.end() ? "" : (*found)->contract.name,
                       " itself, or a view of it, as result ", i,
                       ", expected a tensor with memory of its own, as that of parameters is given "
                       "back when the forward ends; return a clone()"));
  }
}

/// Replaces the tensors among `inputs` that require grad by aliases with markers. Returns them;
/// null where there are none.
std::shared_ptr<const Crossed> mark_inputs(const std::vector<at::Tensor*>& inputs,
                                           const std::shared_ptr<Entry>& entry) {
  std::shared_ptr<Crossed> crossed;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!is_wrapped(*inputs[i])) continue;
    if (crossed == nullptr) crossed = std::make_shared<Crossed>();
    crossed->add(i, *inputs[i]);
  }
  if (crossed != nullptr) wrap(inputs, entry, Boundary::Side::kAfterBackward);
  return crossed;
}

/// Replaces the results that require grad by aliases with pre-backward nodes. Each node checks all
/// results that are held elsewhere. `inputs`: the tensors that the call itself still holds.
void mark_outputs(const Results& results, const std::vector<at::Tensor*>& inputs,
                  const std::shared_ptr<Entry>& entry) {
  const auto& outputs = results.tensors;
  std::shared_ptr<Crossed> held;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!is_wrapped(*outputs[i]) || !is_held_elsewhere(results, i, inputs, *entry)) continue;
    if (held == nullptr) held = std::make_shared<Crossed>();
    held->add(i, *outputs[i]);
  }
  wrap(outputs, entry, Boundary::Side::kBeforeBackward, held);
}

}  // namespace
}  // namespace tessera::fsdp

namespace tessera {
namespace {

void cast_floating(const std::vector<at::Tensor*>& tensors, DType dtype) {
  const WideScope boundary;  // as the contract says
  for (auto* tensor : tensors) {
    if (tensor->defined() && tensor->is_floating_point())
      *tensor = tensor->to(to_scalar_type(dtype));
  }
}

/// checkpoint() switches grad mode off for the first run. A call for which the function switches it
/// on would look like one of a plain forward, whose graph is dropped.
void require_grad_mode_of_checkpoint(const fsdp::Unit& unit) {
  TESSERA_CHECK(fsdp::first_forward() == nullptr || !at::GradMode::is_enabled(), ErrorKind::kUsage,
                "unit ", unit.shown_name(),
                ": found grad mode switched on by the function of a checkpoint() around the call, "
                "expected it off in the first run, as checkpoint() leaves it; end the "
                "AutoGradMode(true) before the unit is called");
}

}  // namespace

bool ShardedBase::replays() { return grad::regions_here() != nullptr; }

std::vector<at::Tensor> ShardedBase::run_region(const std::vector<at::Tensor>& inputs,
                                                const RegionBody& body) const {
  return grad::in_region(grad::regions_here(), held_, "", inputs, body);
}

ShardedBase::Call::Call(ShardedBase& handle, CallKind kind)
    : handle_(handle), kind_(kind), exceptions_(std::uncaught_exceptions()) {
  fsdp::unit_of_handle(handle.unit_);
}

ShardedBase::CallKind ShardedBase::Call::kind_here() {
  const bool is_in_backward = base::in_backward_pass();
  return is_in_backward && fsdp::recomputing() == nullptr ? CallKind::kRecomputed
                                                          : CallKind::kForward;
}

/// Closes all that the call has opened on this thread.
void ShardedBase::Call::close() noexcept {
  regions_.reset();
  auto* watch = watched_ ? DtypeWatch::Observer::of(handle_.unit_->runtime()) : nullptr;
  watched_ = false;
  if (watch != nullptr) watch->leave();
}

ShardedBase::Call::~Call() {
  const base::NoInterrupts until_the_others_know;
  close();
  if (left_ || std::uncaught_exceptions() == exceptions_) return;
  fail(concat("an exception left the forward of unit ", handle_.unit_->shown_name()));
}

void ShardedBase::Call::fail(const std::string& why) noexcept {
  close();
  if (std::exchange(left_, true)) return;
  try {
    handle_.unit_->runtime().fail(why);
  } catch (const std::exception&) {
    // The abort failed too; the exception under way tells the reason.
  }
}

void ShardedBase::Call::stop() noexcept {
  if (left_) return;
  const auto& unit = *handle_.unit_;
  if (kind_ != CallKind::kRecomputed) {
    return fail(concat("the forward of unit ", unit.shown_name(),
                       " was stopped, which is no recomputation"));
  }
  close();
  left_ = true;
  auto& runtime = handle_.unit_->runtime();
  // After a failure inside, nothing is under way any more.
  if (entered_ && runtime.generation() == generation_) runtime.leave_repeated(*handle_.unit_);
}

void ShardedBase::Call::enter(const std::vector<at::Tensor*>& inputs) {
  auto& unit = *handle_.unit_;
  auto& runtime = unit.runtime();
  const bool again = fsdp::recomputing() != nullptr;
  TESSERA_CHECK(
      !again || kind_ == CallKind::kForward, ErrorKind::kUsage, "unit ", unit.shown_name(),
      ": found a checkpoint of another library around a call that a tessera::checkpoint() "
      "runs again, expected one of them; leave one out");
  if (!again) require_grad_mode_of_checkpoint(unit);
  if (runtime.regions() != grad::regions_here()) {
    regions_ = std::make_shared<grad::RegionsScope>(runtime.regions());
  }
  if (kind_ == CallKind::kRecomputed && !runtime.enter_repeated(unit)) kind_ = CallKind::kForward;
  const bool repeats = kind_ == CallKind::kRecomputed;
  if (!repeats) entry_ = again ? runtime.enter_recompute(unit) : runtime.enter_forward(unit);
  entered_ = true;
  generation_ = runtime.generation();
  if (at::GradMode::is_enabled()) fsdp::require_device(inputs, fsdp::Border::kArgument, unit);
  if (!again && !repeats && runtime.is_in_outermost()) fsdp::require_inputs_here(inputs, unit);
  // The marker comes before the cast, so that the cast's backward is part of the unit's.
  inputs_ = &inputs;
  if (entry_ && at::GradMode::is_enabled()) crossed_ = fsdp::mark_inputs(inputs, entry_);
  if (unit.contract.input) cast_floating(inputs, *unit.contract.input);
  if (auto* watch = DtypeWatch::Observer::of(runtime)) {
    watch->enter(unit, inputs);
    watched_ = true;
  }
  if (entry_ && !again && fsdp::WatchHere::here() != nullptr) {
    fsdp::WatchHere::here()->entered(unit.shown_name(), inputs);
  }
}

void ShardedBase::Call::leave(const std::vector<at::Tensor*>& outputs,
                              const std::vector<std::size_t>& wrappers,
                              const std::vector<std::size_t>& base_wrappers) {
  auto& runtime = handle_.unit_->runtime();
  const bool repeats = kind_ == CallKind::kRecomputed;
  TESSERA_CHECK(!runtime.has_failed() && runtime.generation() == generation_, ErrorKind::kUsage,
                "unit ", handle_.unit_->shown_name(),
                ": found that an exception of a unit inside was caught in its forward, expected it "
                "to leave the "
                "sharded step; catch it where the outermost module is called");
  if (auto* watch = watched_ ? DtypeWatch::Observer::of(runtime) : nullptr) watch->leave();
  watched_ = false;
  if (crossed_ != nullptr) crossed_->require_arguments_unchanged(*handle_.unit_);
  const auto& output = handle_.unit_->contract.output;
  if (output) cast_floating(outputs, *output);
  if (!repeats && runtime.reshards_after(*handle_.unit_))
    fsdp::require_no_parameters(outputs, *handle_.unit_);
  if (at::GradMode::is_enabled())
    fsdp::require_device(outputs, fsdp::Border::kResult, *handle_.unit_);
  // In a recomputation the unit is gathered already: the entry's backward has begun.
  if (entry_ && at::GradMode::is_enabled() && fsdp::recomputing() == nullptr) {
    fsdp::mark_outputs({outputs, wrappers, base_wrappers}, *inputs_, entry_);
  }
  if (entry_ && fsdp::recomputing() == nullptr && fsdp::WatchHere::here() != nullptr) {
    fsdp::WatchHere::here()->left(handle_.unit_->shown_name(), outputs);
  }
  repeats ? runtime.leave_repeated(*handle_.unit_) : runtime.leave_forward(*handle_.unit_);
  left_ = true;
}

}  // namespace tessera
