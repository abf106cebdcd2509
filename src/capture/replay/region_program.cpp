#include "capture/replay/region_program.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "tessera/error.h"

namespace tessera::capture {
namespace {

/// The steps from the first to the last one that needs a memory.
struct Use {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  std::int64_t last = -1;
  void at(std::int64_t step) {
    first = std::min(first, step);
    last = std::max(last, step);
  }
  bool is_used() const { return last >= 0; }
};

template <class T>
T& in(std::vector<T>& list, std::int32_t id) {
  return list[static_cast<std::size_t>(id)];
}
template <class T>
const T& in(const std::vector<T>& list, std::int32_t id) {
  return list[static_cast<std::size_t>(id)];
}

class Maker {
 public:
  Maker(const Tape& tape, const TapeEnds& ends, Program& program)
      : tape_(tape), ends_(ends), program_(program), uses_(tape.memories().size()) {}

  std::string make() {
    program_.values = tape_.values();
    program_.inputs = ends_.inputs;
    program_.gradients = ends_.gradients;
    program_.forward_steps = tape_.forward_steps();
    for (const auto& memory : tape_.memories()) {
      program_.memories.push_back(
          {MemoryPlace::kNowhere, memory.bytes, 0, 0, memory.number, memory.outside});
    }
    if (program_.forward_steps == 0) return "no operation";
    for (const auto& step : tape_.steps()) {
      program_.steps.push_back(step.call ? ProgramStep{call_of(*step.call), {}}
                                         : ProgramStep{std::nullopt, step.gradient});
    }
    find_uses();
    place_what_comes_in();
    hand_out(ends_.results, program_.results, static_cast<std::int64_t>(program_.forward_steps));
    hand_out(ends_.input_gradients, program_.input_gradients,
             static_cast<std::int64_t>(program_.steps.size()));
    if (!why_.empty()) return why_;
    find_direct_slots();
    keep_for_later();
    if (!why_.empty()) return why_;
    lay_out();
    find_what_is_kept();
    return {};
  }

 private:
  ProgramMemory& memory_of(ValueId value) { return in(program_.memories, memory_id(value)); }
  MemoryId memory_id(ValueId value) const { return in(program_.values, value).memory; }

  ProgramCall call_of(const TapeCall& call);
  void find_uses();
  void place_what_comes_in();
  void hand_out(const std::vector<ValueId>& values, std::vector<HandedValue>& handed,
                std::int64_t end);
  bool is_of_results(MemoryId memory, const std::vector<HandedValue>& handed) const;
  void lay_out();
  void find_direct_slots();
  void keep_for_later();
  void find_what_is_kept();

  const Tape& tape_;
  const TapeEnds& ends_;
  Program& program_;
  std::vector<Use> uses_;
  std::string why_;
};

std::vector<ValueId> tensors_of(const std::vector<Slot>& slots) {
  std::vector<ValueId> all;
  for (const auto& slot : slots) all.insert(all.end(), slot.values.begin(), slot.values.end());
  return all;
}

bool takes_results(const c10::FunctionSchema& out, const c10::FunctionSchema& plain) {
  const auto &more = out.arguments(), &less = plain.arguments();
  if (more.size() != less.size() + 1 || out.returns().size() != 1) return false;
  for (std::size_t i = 0; i < less.size(); ++i) {
    if (more[i].name() != less[i].name() || *more[i].type() != *less[i].type()) return false;
  }
  const auto& last = more.back();
  return last.is_out() && last.alias_info() != nullptr && last.alias_info()->isWrite();
}

/// Returns the form of an operation that writes its one result to a given place, unless it forms it
/// elsewhere first, as those that libtorch generates do.
std::optional<c10::OperatorHandle> out_form(const c10::OperatorHandle& operation) {
  const auto& plain = operation.schema();
  if (plain.returns().size() != 1) return std::nullopt;
  const auto& name = operation.operator_name();
  // The out form of sum.dim_IntList is sum.IntList_out.
  for (const std::string& overload :
       {std::string("out"), name.overload_name + "_out",
        name.overload_name.substr(name.overload_name.find('_') + 1) + "_out"}) {
    const auto found = c10::Dispatcher::singleton().findSchema({name.name, overload});
    if (!found || found->hasTag(at::Tag::generated)) continue;
    if (takes_results(found->schema(), plain)) return found;
  }
  return std::nullopt;
}

/// Casts and clones are a copy to where the result lies.
bool is_copy(const c10::OperatorHandle& operation) {
  const auto& name = operation.operator_name().name;
  return name == "aten::_to_copy" || name == "aten::clone";
}

/// Whether the value is all of a memory of that size, each byte once: an expanded part may have as
/// many elements as the whole.
bool is_all_of(const Value& value, std::int64_t bytes) {
  std::int64_t numel = 1, reach = 1;
  for (std::size_t i = 0; i < value.sizes.size(); ++i) {
    numel *= value.sizes[i];
    reach += (value.sizes[i] - 1) * value.strides[i];
  }
  return value.offset == 0 && reach == numel &&
         numel * static_cast<std::int64_t>(c10::elementSize(value.dtype)) == bytes;
}

Slot constant(c10::IValue value) { return {Slot::Form::kConstant, {}, std::move(value)}; }

ProgramCall Maker::call_of(const TapeCall& call) {
  ProgramCall made{call.operation,    ProgramCall::Form::kPlain, call.arguments, {}, {}, 0,
                   call.on_one_thread};
  if (only_finds_memory(call.operation)) made.form = ProgramCall::Form::kNothing;
  if (call.makes.empty() || made.form == ProgramCall::Form::kNothing) return made;
  const auto results = tensors_of(call.results);
  const bool makes_all = call.writes.empty() && results.size() == 1 && results[0] != kNone;
  if (makes_all && is_copy(call.operation)) {
    made.operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    made.arguments = {call.results[0], call.arguments[0], constant(false)};
    return made;
  }
  if (const auto out = makes_all ? out_form(call.operation) : std::nullopt) {
    made.operation = *out;
    made.arguments.push_back(call.results[0]);
    return made;
  }
  made.form = call.operation.operator_name().name.starts_with("tessera::")
                  ? ProgramCall::Form::kResults
                  : ProgramCall::Form::kCopied;
  for (const ValueId value : results) {
    const bool is_made =
        value != kNone && std::ranges::find(call.makes, memory_id(value)) != call.makes.end();
    made.made.push_back(is_made ? value : kNone);
  }
  return made;
}

void Maker::find_uses() {
  for (std::size_t i = 0; i < program_.steps.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const auto& step = program_.steps[i];
    const auto use = [&](ValueId value) {
      if (value != kNone) in(uses_, memory_id(value)).at(at);
    };
    if (!step.call) {
      use(step.gradient.raw);
      continue;
    }
    for (const ValueId value : tensors_of(step.call->arguments)) use(value);
    for (const ValueId value : step.call->made) use(value);
    for (const ValueId value : tensors_of(tape_.steps()[i].call->results)) use(value);
  }
}

void Maker::place_what_comes_in() {
  for (std::size_t i = 0; i < program_.memories.size(); ++i) {
    const auto kind = tape_.memories()[i].kind;
    auto& memory = program_.memories[i];
    if (kind == MemoryKind::kOutside) memory.place = MemoryPlace::kOutside;
    if (kind == MemoryKind::kInput || kind == MemoryKind::kGradient) {
      memory.place = MemoryPlace::kGiven;
    }
  }
  for (const auto* list : {&program_.inputs, &program_.gradients}) {
    for (const ValueId value : *list) {
      if (value == kNone) continue;
      const auto& whole = in(program_.values, value);
      memory_of(value).first_byte =
          whole.offset * static_cast<std::int64_t>(c10::elementSize(whole.dtype));
    }
  }
}

/// Whether the memory was handed out as a result, and `handed` are gradients of inputs.
bool Maker::is_of_results(MemoryId memory, const std::vector<HandedValue>& handed) const {
  return &handed != &program_.results &&
         std::ranges::any_of(program_.results, [&](const HandedValue& result) {
           return result.is_fresh && in(program_.values, result.value).memory == memory;
         });
}

void Maker::hand_out(const std::vector<ValueId>& values, std::vector<HandedValue>& handed,
                     std::int64_t end) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == kNone) {
      handed.push_back({});
      continue;
    }
    const auto& value = in(program_.values, values[i]);
    auto& memory = memory_of(values[i]);
    HandedValue one{.value = values[i]};
    const auto kind = tape_.memories()[static_cast<std::size_t>(value.memory)].kind;
    const bool is_taken =
        kind == MemoryKind::kInput && std::cmp_greater_equal(memory.number, ends_.arguments);
    if (kind == MemoryKind::kGradient || is_taken) {
      one.given = memory.number;
      handed.push_back(one);
      continue;
    }
    if (kind != MemoryKind::kMade) {
      why_ = "a result that is an argument or a parameter, or a view of one";
      return;
    }
    if (memory.place == MemoryPlace::kHanded && !is_of_results(value.memory, handed)) {
      one.same_as = memory.number;
      handed.push_back(one);
      continue;
    }
    one.is_fresh = memory.place == MemoryPlace::kNowhere && is_all_of(value, memory.bytes);
    if (one.is_fresh) {
      memory.place = MemoryPlace::kHanded;
      memory.number = static_cast<std::int32_t>(i);
    } else {
      in(uses_, value.memory).at(end - 1);  // it is cloned after that
    }
    handed.push_back(one);
  }
}

void Maker::lay_out() {
  struct Arena {
    std::vector<Lifetime> lifetimes;
    std::vector<std::size_t> memories;
  };
  Arena entry, scratch;
  const auto forward = static_cast<std::int64_t>(program_.forward_steps);
  for (std::size_t i = 0; i < program_.memories.size(); ++i) {
    auto& memory = program_.memories[i];
    const Use& use = uses_[i];
    if (memory.place != MemoryPlace::kNowhere || !use.is_used()) continue;
    const bool outlives_run = (use.first < forward && use.last >= forward) ||
                              use.last == static_cast<std::int64_t>(program_.steps.size());
    auto& arena = outlives_run ? entry : scratch;
    memory.place = outlives_run ? MemoryPlace::kEntry : MemoryPlace::kScratch;
    arena.lifetimes.push_back({memory.bytes, use.first, use.last});
    arena.memories.push_back(i);
  }
  const auto place = [&](const Arena& arena) {
    const ArenaPlan plan = plan_arena(arena.lifetimes);
    const auto faults = faults_of(plan, arena.lifetimes);
    TESSERA_INVARIANT(faults.empty(), "memory of a region: ", faults.front());
    for (std::size_t i = 0; i < arena.memories.size(); ++i) {
      program_.memories[arena.memories[i]].offset = plan.offsets[i];
    }
    return plan.bytes;
  };
  program_.entry_bytes = place(entry);
  program_.scratch_bytes = place(scratch);
}

/// Finds products that write the whole of a memory, which then only goes to a slot.
void Maker::find_direct_slots() {
  constexpr auto kNoWriter = static_cast<std::size_t>(-1);
  std::vector<std::size_t> writers(program_.memories.size(), kNoWriter);
  std::vector<int> uses(program_.memories.size(), 0);
  for (std::size_t i = 0; i < program_.steps.size(); ++i) {
    const auto& step = program_.steps[i];
    const auto values =
        step.call ? tensors_of(step.call->arguments) : std::vector<ValueId>{step.gradient.raw};
    for (const ValueId value : values) {
      if (value != kNone) ++uses[static_cast<std::size_t>(memory_id(value))];
    }
    if (!step.call) continue;
    for (const ValueId value : step.call->made) {
      if (value != kNone) ++uses[static_cast<std::size_t>(memory_id(value))];
    }
    if (step.call->operation.operator_name().name == "aten::mm" &&
        step.call->form == ProgramCall::Form::kPlain) {
      writers[static_cast<std::size_t>(memory_id(step.call->arguments.back().values.at(0)))] = i;
    }
  }
  for (std::size_t i = 0; i < program_.steps.size(); ++i) {
    const auto& step = program_.steps[i];
    if (step.call || step.gradient.raw == kNone) continue;
    const auto memory = static_cast<std::size_t>(memory_id(step.gradient.raw));
    const std::size_t writer = writers[memory];
    // Its own write, and the read of the gradient.
    if (writer == kNoWriter || uses[memory] != 2) continue;
    auto& call = *program_.steps[writer].call;
    if (call.arguments.back().values.at(0) != step.gradient.raw) continue;
    const auto& value = in(program_.values, step.gradient.raw);
    const bool is_contiguous =
        value.strides.size() == 2 && value.strides[1] == 1 && value.strides[0] == value.sizes[1];
    if (!is_contiguous || program_.memories[memory].place != MemoryPlace::kNowhere) continue;
    call.direct = step.gradient;
    call.gradient_step = i;
  }
}

/// Keeps what deferred products read beyond the backward.
void Maker::keep_for_later() {
  const auto end = static_cast<std::int64_t>(program_.steps.size());
  for (std::size_t i = 0; i < program_.steps.size(); ++i) {
    const auto& gradient = program_.steps[i].gradient;
    if (program_.steps[i].call || !gradient.may_wait) continue;
    program_.defers = true;
    const auto product = std::ranges::find_if(program_.steps, [&](const ProgramStep& step) {
      return step.call && step.call->direct && step.call->gradient_step == i;
    });
    if (product == program_.steps.end()) {
      why_ = "a weight gradient that is deferred and is no plain product";
      return;
    }
    const auto& arguments = product->call->arguments;
    for (std::size_t j = 0; j + 1 < arguments.size(); ++j) {
      for (const ValueId value : arguments[j].values) {
        if (value == kNone) continue;
        in(uses_, memory_id(value)).at(end);
      }
    }
  }
}

void Maker::find_what_is_kept() {
  const auto forward = static_cast<std::int64_t>(program_.forward_steps);
  for (std::size_t i = 0; i < program_.memories.size(); ++i) {
    const auto& memory = program_.memories[i];
    if (uses_[i].last < forward) continue;
    if (tape_.memories()[i].kind == MemoryKind::kInput) {
      program_.kept_inputs.push_back(memory.number);
    }
    if (memory.place == MemoryPlace::kOutside) {
      program_.kept_outside.push_back(static_cast<MemoryId>(i));
    }
    const bool is_result = memory.place == MemoryPlace::kHanded && uses_[i].first < forward;
    if (is_result) program_.kept_results.push_back(memory.number);
  }
}

}  // namespace

at::Tensor tensor_of(const c10::Storage& storage, const Value& value) {
  const at::NoGradGuard no_grad;
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(value.dtype));
  return tensor.set_(storage, value.offset, value.sizes, value.strides);
}

std::string make_program(const Tape& tape, const TapeEnds& ends, Program& program) {
  return Maker(tape, ends, program).make();
}

}  // namespace tessera::capture
