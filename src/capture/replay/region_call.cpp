// Calls of a region: recorded, compared with what was recorded before, or replayed.
#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <span>
#include <utility>

#include "base/first_derivative.h"
#include "base/test_hooks.h"
#include "capture/replay/comparison.h"
#include "capture/replay/helper_thread.h"
#include "capture/replay/inner_graph.h"
#include "capture/replay/variants.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kOtherModes = "another backward than forward: autocast, threads or dtypes";
constexpr auto kOutlives = "a tensor that outlives the call and is no result";

/// Switches autocast off while it is alive.
class AutocastOff {
 public:
  AutocastOff() : was_(at::autocast::is_autocast_enabled(at::kCPU)) { set(false); }
  ~AutocastOff() { set(was_); }
  AutocastOff(const AutocastOff&) = delete;
  AutocastOff& operator=(const AutocastOff&) = delete;

 private:
  static void set(bool on) { at::autocast::set_autocast_enabled(at::kCPU, on); }
  bool was_;
};

std::vector<std::int64_t> versions_of(const variable_list& tensors) {
  std::vector<std::int64_t> versions;
  for (const auto& tensor : tensors) versions.push_back(tensor.defined() ? tensor._version() : 0);
  return versions;
}

void switch_off(Region& region, Variant& variant, const std::string& why) {
  variant.forget();
  variant.refused = why;
  region.say_once(why);
}

/// One call of a region, kept in the node's saved_data.
struct LiveCall : torch::CustomClassHolder {
  enum class Kind : std::uint8_t { kRecorded, kReplayed };
  Kind kind = Kind::kRecorded;
  std::shared_ptr<Region> region;
  std::shared_ptr<Variant> variant;
  grad::RegionBody body;
  variable_list inputs;  ///< as they came, without history; for an inner graph as they enter it
  std::shared_ptr<const Outside> outside;  ///< the variant's
  InnerGraph graph;                        ///< of kRecorded, or of a body that runs again
  variable_list results;  ///< of kRecorded: of the graph inside; of kReplayed: what backward reads
  variable_list taken;    ///< what keep() took out of a checkpoint
  std::vector<std::size_t> positions;        ///< of the node's arguments among the inputs
  bool has_place_holder = false;             ///< behind them
  std::vector<std::int64_t> versions;        ///< of what backward reads, when forward had ended
  std::vector<Version> outside_of_backward;  ///< the same of what is outside
  /// The same versions for all that the body reads, which runs again where the backward is another
  /// one.
  std::vector<std::int64_t> versions_of_inputs;
  std::vector<Version> outside_of_body;
  std::vector<Hash128> data;  ///< of kRecorded: its arguments
  std::shared_ptr<Tape> tape;
  TapeEnds ends;
  std::vector<WeakStorage> inner;  ///< memory that may not outlive it
  std::shared_ptr<LiveEntry> entry;
  bool has_ended = false;
  bool is_under_way = false;  ///< of kRecorded
  std::string leads_out;      ///< of the graph inside

  LiveCall() = default;
  ~LiveCall() override { end(); }
  LiveCall(const LiveCall&) = delete;
  LiveCall& operator=(const LiveCall&) = delete;

  /// Frees what it holds; it is no longer needed.
  void end() {
    has_ended = true;
    if (tape != nullptr) variant->is_recording = false;
    tape.reset();
    entry.reset();
    body = nullptr;  // it may hold tensors whose holders are counted (outside.h)
    inputs.clear();
    graph.clear();
    taken.clear();
    results.clear();
    if (std::exchange(is_under_way, false)) region->shared().recording_ends();
    const bool is_left = std::ranges::any_of(inner, [](const auto& one) { return !one.expired(); });
    inner.clear();
    if (is_left) switch_off(*region, *variant, kOutlives);
  }

  variable_list all_inputs() const {
    variable_list all = inputs;
    all.insert(all.end(), taken.begin(), taken.end());
    return all;
  }

  /// Returns the inputs and results that backward reads.
  variable_list kept() const {
    variable_list all;
    const auto& program = entry->program();
    const auto given = all_inputs();
    for (const auto i : program.kept_inputs) all.push_back(given[static_cast<std::size_t>(i)]);
    all.insert(all.end(), results.begin(), results.end());
    return all;
  }
};

/// Whether the program is a single product. It has no memory to lay out, and comparing it would
/// hold its result and its weight's gradient twice: for a head these are the largest of a model.
bool is_one_product(const Program& program) {
  const auto forward = std::span(program.steps).first(program.forward_steps);
  const auto calls = std::ranges::count_if(forward, [](const ProgramStep& step) {
    return step.call && step.call->form != ProgramCall::Form::kNothing;
  });
  return calls == 1 && std::ranges::any_of(program.steps, [](const ProgramStep& step) {
           return step.call && step.call->direct;
         });
}

/// Makes the program from the first tape; compares a later one with it. `data`: the hashes of
/// `arguments` when the call began.
void end_recording(Region& region, Variant& variant, const std::shared_ptr<Tape>& tape,
                   const TapeEnds& ends, const variable_list& arguments,
                   const std::vector<Hash128>& data) {
  tape->close();
  if (!tape->refused().empty()) return switch_off(region, variant, tape->refused());
  if (variant.tape == nullptr) {
    auto [program, why] = run_on_helper_thread([&] {
      auto made = std::make_shared<Program>();
      auto refused = make_program(*tape, ends, *made);
      return std::pair(std::move(made), std::move(refused));
    });
    if (!why.empty()) return switch_off(region, variant, why);
    if (const auto change = test_hooks::made_program.get()) (*change)(*program);
    if (is_one_product(*program)) return switch_off(region, variant, "a product alone");
    variant.tape = tape;
    program->while_deferring = region.defers_weight_gradients();
    variant.outside = std::make_shared<Outside>(*program, *tape, region.modules());
    variant.program = std::move(program);
    variant.ends = ends;
    variant.data = data;
    variant.varied.assign(data.size(), false);
    return;
  }
  if (const auto why = difference_of(*variant.tape, *tape); !why.empty()) {
    return switch_off(region, variant, why);
  }
  if (ends != variant.ends) return switch_off(region, variant, "found other results than before");
  variant.outside->keep_read_again(*tape, region.holders());
  if (const auto why = variant.outside->refused(); !why.empty()) {
    return switch_off(region, variant, why);
  }
  ++variant.compared;
  bool all_varied = true;
  for (std::size_t i = 0; i < data.size(); ++i) {
    variant.varied[i] = variant.varied[i] || data[i] != variant.data[i];
    all_varied = all_varied && variant.varied[i];
  }
  if (!variant.is_compared()) return;
  if (all_varied) {
    variant.tape.reset();  // nothing is compared any more
  } else {
    variant.keep_same(arguments);
  }
}

/// Returns what `run` gives, while `tape` records it. Refuses memory that changes though no
/// operation writes it: the body has written through a pointer, which a replay would not do.
variable_list recorded(const Variant& variant, Tape& tape,
                       const std::function<variable_list()>& run) {
  const auto outside =
      variant.tape == nullptr ? std::vector<c10::Storage>() : outside_of(*variant.tape);
  const auto before = bits_of(outside);
  variable_list results;
  {
    const TapeScope scope(tape);
    results = run();
  }
  if (bits_of(outside) != before) {
    tape.refuse("memory from outside that a call changes by no operation");
  }
  return results;
}

/// Refuses an argument that the body also reads as a parameter or buffer: the argument would take
/// its place in the program.
void refuse_own(const Region& region, Tape& tape, const variable_list& inputs) {
  const auto is_own = [&](const at::Tensor& input) {
    return input.defined() && input.has_storage() && region.owns(input);
  };
  if (std::ranges::any_of(inputs, is_own)) {
    tape.refuse("an argument that is a parameter or a buffer");
  }
}

void refuse_chosen_targets() {
  TESSERA_CHECK(torch::autograd::Engine::get_default_engine().is_checkpoint_valid(),
                ErrorKind::kUsage,
                "compile: found torch::autograd::grad, or a backward() with inputs, through a "
                "replayed region, expected a backward() without inputs, since every parameter "
                "inside gets its gradient; call backward(), or compile(handle, {})");
}

/// Compares each step of the program's forward with what was recorded.
void compare_forward(const Region& region, const std::shared_ptr<Variant>& variant, Tape& tape,
                     const variable_list& inputs) {
  // Differences between the operations are reported when the whole was recorded.
  if (variant->tape == nullptr || !tape.refused().empty()) return;
  if (!difference_of(*variant->tape, tape).empty()) return;
  const auto entry = region.entry_to_compare(*variant);
  Comparison comparison(tape, *entry);
  entry->forward(inputs, comparison.seen());
  if (!comparison.difference().empty()) tape.refuse(comparison.difference());
}

/// Compares backward in the same way. It needs what forward leaves, which is formed again, so that
/// no call keeps it twice.
void compare_backward(const Region& region, const std::shared_ptr<Variant>& variant, Tape& tape,
                      const variable_list& inputs, const variable_list& grads) {
  if (variant->tape == nullptr || !tape.refused().empty()) return;
  if (!difference_of(*variant->tape, tape).empty()) return;
  const auto entry = region.entry_to_compare(*variant);
  entry->forward(inputs);
  Comparison comparison(tape, *entry);
  entry->backward(grads, LiveEntry::Gradients::kLeft, comparison.seen());
  if (!comparison.difference().empty()) tape.refuse(comparison.difference());
}

bool match(const std::vector<InputLike>& alike, const variable_list& tensors) {
  return std::equal(alike.begin(), alike.end(), tensors.begin(), tensors.end(),
                    [](const InputLike& like, const at::Tensor& one) { return like.matches(one); });
}

std::vector<InputLike> alike_of(const variable_list& tensors) {
  std::vector<InputLike> alike;
  for (const auto& tensor : tensors) alike.push_back(InputLike::of(tensor));
  return alike;
}

/// Returns what keep() would take for the program's arguments after the first `inputs`.
variable_list taken_from_checkpoint(const Program& program, std::size_t inputs) {
  variable_list taken;
  for (std::size_t i = inputs; i < program.inputs.size(); ++i) {
    taken.push_back(
        grad::next_kept(program.values[static_cast<std::size_t>(program.inputs[i])].sizes));
  }
  return taken;
}

/// Returns what the node gives to autograd: copies of results that share memory with arguments.
variable_list handed_out(AutogradContext& context, const LiveCall& call) {
  variable_list outputs, without;
  for (const auto& result : call.results) {
    TESSERA_CHECK(result.defined(), ErrorKind::kUsage, "region ", call.region->name(),
                  ": found an undefined result, expected a tensor; leave it out");
    const bool is_argument = std::ranges::any_of(call.inputs, [&](const at::Tensor& input) {
      return input.defined() && result.is_alias_of(input);
    });
    outputs.push_back(is_argument ? result.detach().clone() : result.detach());
    if (!result.requires_grad()) without.push_back(outputs.back());
  }
  context.mark_non_differentiable(without);
  return outputs;
}

class RegionNode : public torch::autograd::Function<RegionNode> {
 public:
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<LiveCall>& call,
                               at::TensorList /*arguments*/) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->set_materialize_grads(false);
    return call->kind == LiveCall::Kind::kReplayed ? replay(*context, *call)
                                                   : record(*context, *call);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_chosen_targets();
    base::refuse_double_backward();
    const auto call =
        c10::static_intrusive_pointer_cast<LiveCall>(context->saved_data["call"].toCapsule());
    call->region->shared().backward_runs();
    TESSERA_CHECK(!call->has_ended, ErrorKind::kUsage, "region ", call->region->name(),
                  ": found a second backward of a graph that the first one did not keep, expected "
                  "one; call the first one with retain_graph");
    const variable_list of_inputs = call->kind == LiveCall::Kind::kReplayed
                                        ? backward_of_replay(*call, grads)
                                        : backward_of_recording(*call, grads);
    variable_list result{at::Tensor()};  // the call itself
    for (const auto position : call->positions) result.push_back(of_inputs[position]);
    if (call->has_place_holder) result.emplace_back();
    if (!torch::autograd::get_current_graph_task_keep_graph()) call->end();
    return result;
  }

 private:
  static variable_list record(AutogradContext& context, LiveCall& call) {
    call.graph.enter(call.inputs);
    refuse_own(*call.region, *call.tape, call.inputs);
    call.tape->add(MemoryKind::kInput, call.inputs);
    call.ends.inputs = call.tape->values_of(call.inputs);
    {
      const at::AutoGradMode grad(true);
      const auto begin = at::sequence_number::peek();
      call.results = recorded(*call.variant, *call.tape, [&] { return call.body(call.inputs); });
      call.leads_out = leads_out(call.results, begin);
      if (!call.leads_out.empty()) return {};
    }
    const auto& taken = call.tape->taken();
    call.ends.arguments = call.inputs.size();
    const auto more = call.tape->values_of(taken);
    call.ends.inputs.insert(call.ends.inputs.end(), more.begin(), more.end());
    call.taken = taken;
    call.ends.results = call.tape->values_of(call.results);
    call.variant->results_need_gradient.clear();
    for (const auto& result : call.results) {
      call.variant->results_need_gradient.push_back(result.defined() && result.requires_grad());
    }
    compare_forward(*call.region, call.variant, *call.tape, call.all_inputs());
    call.tape->drop_values();
    // Other calls run forward, and are compared, before the backward of this one.
    call.region->shared().trim();
    return handed_out(context, call);
  }

  static variable_list backward_of_recording(LiveCall& call, const variable_list& grads) {
    const auto tape = std::exchange(call.tape, nullptr);
    if (tape == nullptr) return call.graph.backward(call.results, grads);  // a second backward
    auto& variant = *call.variant;
    variant.is_recording = false;
    if (!call.region->is_set_as(variant.guards) || at::autocast::is_autocast_enabled(at::kCPU)) {
      ++call.region->calls().eager[kOtherModes];
      return call.graph.backward(call.results, grads);
    }
    const bool defers = call.region->defers_weight_gradients();
    if (defers && variant.tape != nullptr && !variant.program->while_deferring) variant.forget();
    // A backward without deferred gradients is recorded alike in both modes.
    const bool is_as_recorded = variant.tape == nullptr || (match(variant.gradients, grads) &&
                                                            (defers || !variant.program->defers));
    if (!is_as_recorded) {
      ++call.region->calls().eager["other gradients than were recorded"];
      return call.graph.backward(call.results, grads);
    }
    if (!tape->refused().empty()) {
      // Runs eagerly, so that slots are shared again.
      switch_off(*call.region, variant, tape->refused());
      return call.graph.backward(call.results, grads);
    }
    tape->begin_backward();
    tape->add(MemoryKind::kGradient, grads);
    call.ends.gradients = tape->values_of(grads);
    const auto of_inputs =
        recorded(variant, *tape, [&] { return call.graph.backward(call.results, grads); });
    call.ends.input_gradients = tape->values_of(of_inputs);
    if (variant.tape == nullptr) variant.gradients = alike_of(grads);
    compare_backward(*call.region, call.variant, *tape, call.all_inputs(), grads);
    tape->drop_values();
    // Deferred gradients hold what their products read.
    if (!defers) call.inner = tape->names_of_inner({call.ends.results, call.ends.input_gradients});
    end_recording(*call.region, variant, tape, call.ends, call.inputs, call.data);
    call.region->shared().trim();
    return of_inputs;
  }

  static variable_list replay(AutogradContext& context, LiveCall& call) {
    ++call.region->calls().replayed;
    call.entry = call.region->take_entry(call.variant);
    call.taken = taken_from_checkpoint(call.entry->program(), call.inputs.size());
    auto outputs = call.entry->forward(call.all_inputs());
    call.region->shared().forward_ran(*call.region);
    for (const auto i : call.entry->program().kept_results) {
      call.results.push_back(outputs[static_cast<std::size_t>(i)].detach());
    }
    // Without history, which the node has; it also knows whether each needs a gradient.
    for (auto& input : call.inputs) {
      if (input.defined()) input = input.detach().set_requires_grad(input.requires_grad());
    }
    call.versions = versions_of(call.kept());
    call.outside_of_backward = call.outside->versions_of_backward();
    call.versions_of_inputs = versions_of(call.inputs);
    call.outside_of_body = call.outside->versions();
    variable_list without;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!call.variant->results_need_gradient[i]) without.push_back(outputs[i]);
    }
    context.mark_non_differentiable(without);
    return outputs;
  }

  static variable_list backward_of_replay(LiveCall& call, const variable_list& grads) {
    TESSERA_CHECK(
        versions_of(call.kept()) == call.versions && are_unchanged(call.outside_of_backward),
        ErrorKind::kUsage, "region ", call.region->name(),
        ": found that an argument, a result or a tensor from outside that its backward reads was "
        "changed in place since its forward, expected it as it was; change a clone");
    const auto why = why_body_runs_again(call, grads);
    if (why.empty()) {
      return call.entry->backward(grads, LiveEntry::Gradients::kAccepted, {}, call.entry);
    }
    ++call.region->calls().eager[why];
    TESSERA_CHECK(versions_of(call.inputs) == call.versions_of_inputs &&
                      are_unchanged(call.outside_of_body) && call.outside->lies_as_before() &&
                      call.region->is_set_as(call.variant->guards),
                  ErrorKind::kUsage, "region ", call.region->name(),
                  ": found that an argument or a tensor from outside was changed in place since "
                  "its forward, or replaced, or training mode, threads or dtypes were set "
                  "otherwise, and a backward that is not the recorded one (",
                  why, "), expected all as it was; change a clone");
    {
      const at::AutoGradMode grad(true);
      // in the mode of forward
      const AutocastOff no_casts;
      call.graph.enter(call.inputs);
      call.results = call.body(call.inputs);
    }
    return call.graph.backward(call.results, grads);
  }

  /// Returns why the body runs again; empty: the recorded backward is the one that is asked for.
  static std::string why_body_runs_again(LiveCall& call, const variable_list& grads) {
    if (!call.region->is_set_as(call.variant->guards) ||
        at::autocast::is_autocast_enabled(at::kCPU)) {
      return kOtherModes;
    }
    if (call.region->defers_weight_gradients() && !call.entry->program().while_deferring) {
      // It was recorded before they were deferred.
      call.variant->forget();
      return "weight gradients are deferred";
    }
    // A pending product reads what another backward would overwrite.
    if (call.entry.use_count() > 1) return "weight gradients of the backward before are pending";
    if (!match(call.variant->gradients, grads)) return "other gradients than were recorded";
    return {};
  }
};

}  // namespace

std::vector<at::Tensor> call_with_gradients(const std::shared_ptr<Region>& region,
                                            const std::shared_ptr<Variant>& variant,
                                            const std::vector<at::Tensor>& inputs,
                                            const grad::RegionBody& body) {
  auto call = c10::make_intrusive<LiveCall>();
  call->region = region;
  call->variant = variant;
  call->body = body;
  call->inputs = inputs;
  call->kind = variant->replays(inputs) ? LiveCall::Kind::kReplayed : LiveCall::Kind::kRecorded;
  call->outside = variant->outside;
  if (call->kind == LiveCall::Kind::kRecorded) {
    call->data = hashes_of(inputs);
    ++region->calls().recorded;
    variant->is_recording = true;
    region->shared().recording_begins();
    call->is_under_way = true;
    call->tape = std::make_shared<Tape>(/*keeps_bits=*/variant->tape != nullptr);
  }
  variable_list arguments;
  bool wants = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;  // autograd takes none
    call->positions.push_back(i);
    arguments.push_back(inputs[i]);
    wants = wants || inputs[i].requires_grad();
  }
  if (!wants) {
    // Parameters alone would not make the node part of the graph.
    call->has_place_holder = true;
    arguments.push_back(at::empty({0}).set_requires_grad(true));
  }
  const auto results = RegionNode::apply(call, at::TensorList(arguments));
  if (call->leads_out.empty()) return results;
  // The node cannot pass such a gradient on; the graph of an eager call can.
  switch_off(*region, *variant, call->leads_out);
  ++region->calls().eager[call->leads_out];
  return body(inputs);
}

std::vector<at::Tensor> call_without(Region& region, const std::shared_ptr<Variant>& of,
                                     const std::vector<at::Tensor>& inputs,
                                     const grad::RegionBody& body) {
  Variant& variant = *of;
  if (variant.replays(inputs)) {
    ++region.calls().replayed;
    const auto entry = region.take_entry(of);
    auto outputs = entry->forward(inputs);
    region.shared().forward_ran(region);
    // The results that keep() would have kept follow the others.
    for (std::size_t i = variant.results; i < outputs.size(); ++i) grad::add_kept(outputs[i]);
    outputs.resize(variant.results);
    return outputs;
  }
  ++region.calls().recorded;
  const auto tape = std::make_shared<Tape>(/*keeps_bits=*/variant.tape != nullptr);
  const auto data = hashes_of(inputs);
  TapeEnds ends;
  refuse_own(region, *tape, inputs);
  tape->add(MemoryKind::kInput, inputs);
  ends.inputs = tape->values_of(inputs);
  ends.arguments = inputs.size();
  const auto outputs = recorded(variant, *tape, [&] { return body(inputs); });
  variant.results = outputs.size();
  variable_list all = outputs;
  all.insert(all.end(), tape->kept_results().begin(), tape->kept_results().end());
  ends.results = tape->values_of(all);
  compare_forward(region, of, *tape, inputs);
  tape->drop_values();
  const auto inner = tape->names_of_inner({ends.results});
  end_recording(region, variant, tape, ends, inputs, data);
  if (std::ranges::any_of(inner, [](const auto& one) { return !one.expired(); })) {
    switch_off(region, variant, kOutlives);
  }
  region.shared().trim();
  return outputs;
}

}  // namespace tessera::capture
