#include "tessera/recompute.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <mutex>
#include <optional>
#include <ostream>
#include <utility>

#include "base/first_derivative.h"
#include "base/pass_local.h"
#include "base/random.h"
#include "comm/device.h"
#include "fsdp/runtime/recompute_scopes.h"
#include "fsdp/runtime/runtime.h"
#include "grad/region.h"
#include "tessera/error.h"

namespace tessera {
namespace fsdp {
namespace {

// A forward reads more than its inputs and parameters: the default generators of the CPU and of the
// device where it computes, and autocast. A recomputation must find them as the first forward did.

/// The state of libtorch's default generators, all of it on the host.
struct RandomState {
  at::Device device = at::kCPU;
  at::Tensor of_cpu;     ///< 5 KB
  at::Tensor of_device;  ///< seed and offset; undefined on the CPU

  static RandomState now(at::Device device);
  void set() const;
  bool operator==(const RandomState& other) const;
};

/// Sets the random state of the first forward while it lives, and restores the present one at its
/// end. Does nothing without a state: nothing was drawn then.
class RandomStateScope {
 public:
  explicit RandomStateScope(const std::optional<RandomState>& state);
  ~RandomStateScope();
  RandomStateScope(const RandomStateScope&) = delete;
  RandomStateScope& operator=(const RandomStateScope&) = delete;

 private:
  std::optional<RandomState> before_;
};

/// Returns the device where a function of these inputs computes: that of its inputs, or the
/// thread's where none is on a device.
at::Device device_of(const std::vector<at::Tensor>& inputs);

/// This thread's autocast settings, for the CPU and for the device where it computes.
struct Autocast {
  struct OfDevice {
    at::DeviceType type = at::kCPU;
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
  };
  std::array<OfDevice, 2> devices;
  static Autocast now(at::DeviceType device);
};

/// Sets autocast as given, without its cache of casted weights: a cast that was made without grad
/// in the first forward must not replace one with grad, here or later in the same autocast region.
class AutocastScope {
 public:
  explicit AutocastScope(const Autocast& state);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  Autocast before_;
  bool cached_before_;
};

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state_of(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// Whether libtorch has a generator for the device; a dry run's device has none.
bool has_generator(at::Device device) { return at::isAccelerator(device.type()); }

RandomState RandomState::now(at::Device device) {
  RandomState state{device, state_of(at::detail::getDefaultCPUGenerator()), {}};
  if (has_generator(device))
    state.of_device = state_of(at::globalContext().defaultGenerator(device));
  return state;
}

void RandomState::set() const {
  set_state_of(at::detail::getDefaultCPUGenerator(), of_cpu);
  if (has_generator(device)) set_state_of(at::globalContext().defaultGenerator(device), of_device);
}

bool RandomState::operator==(const RandomState& other) const {
  return at::equal(of_cpu, other.of_cpu) &&
         (!has_generator(device) || at::equal(of_device, other.of_device));
}

RandomStateScope::RandomStateScope(const std::optional<RandomState>& state) {
  if (!state) return;
  before_ = RandomState::now(state->device);
  state->set();
}

RandomStateScope::~RandomStateScope() {
  if (before_) before_->set();
}

at::Device device_of(const std::vector<at::Tensor>& inputs) {
  for (const auto& input : inputs) {
    if (!input.is_cpu()) return input.device();
  }
  const auto accelerator = comm::backward_stays_here() ? at::getAccelerator() : std::nullopt;
  if (!accelerator) return at::kCPU;
  return c10::impl::VirtualGuardImpl(*accelerator).getDevice();
}

Autocast Autocast::now(at::DeviceType device) {
  // Also on the CPU, where nothing computes under the other device's settings, those are kept.
  Autocast state;
  state.devices[0].type = at::kCPU;
  state.devices[1].type = device == at::kCPU ? at::kCUDA : device;
  for (auto& one : state.devices) {
    one.enabled = at::autocast::is_autocast_enabled(one.type);
    one.dtype = at::autocast::get_autocast_dtype(one.type);
  }
  return state;
}

void set_autocast(const Autocast& state) {
  for (const auto& one : state.devices) {
    at::autocast::set_autocast_enabled(one.type, one.enabled);
    at::autocast::set_autocast_dtype(one.type, one.dtype);
  }
}

AutocastScope::AutocastScope(const Autocast& state)
    : before_(Autocast::now(state.devices[1].type)),
      cached_before_(at::autocast::is_autocast_cache_enabled()) {
  set_autocast(state);
  at::autocast::set_autocast_cache_enabled(false);
}

AutocastScope::~AutocastScope() {
  set_autocast(before_);
  at::autocast::set_autocast_cache_enabled(cached_before_);
}

using FirstHere = base::PassLocal<base::PassValue::kFirstForward, Recorded*>;
using AgainHere = base::PassLocal<base::PassValue::kRecomputing, Recorded*>;
thread_local std::uint64_t t_drew = 0;

}  // namespace

FirstForwardScope::FirstForwardScope(Recorded& recorded)
    : keep_(recorded, grad::CheckpointRun::kFirst),
      outer_(std::exchange(FirstHere::here(), &recorded)) {}
FirstForwardScope::~FirstForwardScope() { FirstHere::here() = outer_; }
RecomputeScope::RecomputeScope(Recorded& recorded)
    : keep_(recorded, grad::CheckpointRun::kAgain),
      outer_(std::exchange(AgainHere::here(), &recorded)) {
  recorded.next = 0;
}
RecomputeScope::~RecomputeScope() { AgainHere::here() = outer_; }
void note_draw() { ++t_drew; }
std::uint64_t checkpoints_that_drew() { return t_drew; }
Recorded* first_forward() { return FirstHere::here(); }
Recorded* recomputing() { return AgainHere::here(); }

}  // namespace fsdp

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Run = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// The shape that a result of the second run must have: its gradients have arrived already, and a
/// sum or an expansion would silently fit them to other sizes.
struct Result {
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype;

  friend bool operator==(const Result&, const Result&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Result& one) {
    return out << at::IntArrayRef(one.sizes) << ' ' << c10::toString(one.dtype);
  }
};

Result result_of(const at::Tensor& tensor) { return {tensor.sizes().vec(), tensor.scalar_type()}; }

/// The state of a checkpoint, in the context's saved_data. It holds nothing of the size of an
/// activation: such tensors are among the context's saved variables, which the engine frees after
/// their use.
struct Block : torch::CustomClassHolder {
  Run run;
  std::vector<std::size_t> positions;  ///< of the defined inputs, among all inputs of the user
  std::size_t inputs = 0;              ///< number of saved inputs; kept results follow them
  std::vector<Result> outputs;         ///< shapes of the first forward's results
  fsdp::Recorded recorded;
  fsdp::Autocast autocast;
  at::Device device = at::kCPU;             ///< where it computes
  std::optional<fsdp::RandomState> random;  ///< before the first forward, if that drew numbers
  std::optional<SamplePlace> place = sample_place();
  std::shared_ptr<grad::Regions> regions = grad::regions_here();
  const torch::autograd::Node* node = nullptr;

  Block() = default;
  ~Block() override { replace_node(node, nullptr); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  /// Replaces the node where a checkpoint runs again inside another one. There the outer one's node
  /// stays, since a backward reaches it first.
  void replace_node(const torch::autograd::Node* before, const torch::autograd::Node* after) {
    for (const auto& entry : recorded.entries) {
      const auto* expected = before;
      entry->checkpoint.compare_exchange_strong(expected, after);
    }
    node = after;
  }
};

/// Saves the kept results, which must be unchanged since keep() returned them.
void save_kept(fsdp::Recorded& recorded, variable_list& saved) {
  for (auto& kept : recorded.kept) {
    TESSERA_CHECK(kept.value._version() == kept.version, ErrorKind::kUsage,
                  "checkpoint: found a kept result of sizes ", kept.value.sizes(),
                  " that was changed in place, expected it as keep() returned it; clone it before");
    saved.push_back(std::move(kept.value));
  }
  recorded.kept.clear();
}

/// Makes results different tensors: an input or parameter that is returned as it is would count as
/// an in-place result, and a tensor that is returned twice as two results of one node.
void separate(variable_list& outputs, const std::vector<at::Tensor>& inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    at::Tensor& output = outputs[i];
    TESSERA_CHECK(output.defined(), ErrorKind::kUsage, "checkpoint: found an undefined result (", i,
                  "), expected a tensor; leave it out of the results");
    const auto is_output = [&](const at::Tensor& other) { return output.is_same(other); };
    const auto before = outputs.begin() + static_cast<std::ptrdiff_t>(i);
    if (output.requires_grad() || std::any_of(inputs.begin(), inputs.end(), is_output) ||
        std::any_of(outputs.begin(), before, is_output)) {
      output = output.clone();
    }
  }
}

/// Returns the version counters; 0 for inference tensors, which have none.
std::vector<std::int64_t> versions_of(const variable_list& inputs) {
  std::vector<std::int64_t> versions;
  for (const auto& input : inputs) {
    versions.push_back(input.is_inference() ? 0 : input._version());
  }
  return versions;
}

/// Requires that the function has not changed its inputs in place. It runs without grad mode, so
/// that no history would show the change, and it would change them a second time in the
/// recomputation.
void require_unchanged(const Block& block, const variable_list& inputs,
                       const std::vector<std::int64_t>& before) {
  const auto now = versions_of(inputs);
  for (std::size_t i = 0; i < block.positions.size(); ++i) {
    TESSERA_CHECK(now[i] == before[i], ErrorKind::kUsage, "checkpoint: found that argument ",
                  block.positions[i], ", of sizes ", inputs[i].sizes(),
                  ", was changed in place, expected it as it came, since the function runs twice; "
                  "change a clone in the function");
  }
}

/// A backward towards chosen tensors forms no other gradients. The nested backward of a
/// recomputation would form those of all parameters, and leave them to the next step.
void refuse_chosen_targets() {
  TESSERA_CHECK(torch::autograd::Engine::get_default_engine().is_checkpoint_valid(),
                ErrorKind::kUsage,
                "checkpoint: found torch::autograd::grad, or a backward() with inputs, through a "
                "recomputed function, expected a backward() without inputs, since every parameter "
                "inside gets its gradient; call backward(), or the function without checkpoint()");
}

class Recompute : public torch::autograd::Function<Recompute> {
 public:
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Block>& block,
                               at::TensorList arguments) {
    auto saved = arguments.vec();
    context->saved_data["block"] = c10::IValue::make_capsule(block);
    context->set_materialize_grads(false);  // an unused result has no gradient, not zeros
    const at::NoGradGuard no_grad;
    auto random = fsdp::RandomState::now(block->device);
    const auto versions = versions_of(saved);
    variable_list outputs;
    {
      const fsdp::FirstForwardScope scope(block->recorded);
      const fsdp::AutocastScope autocast(block->autocast);
      outputs = block->run(saved);
    }
    require_unchanged(*block, saved, versions);
    if (random != fsdp::RandomState::now(block->device)) {
      block->random = std::move(random);
      fsdp::note_draw();
    }
    separate(outputs, saved);
    block->inputs = saved.size();
    for (const auto& output : outputs) block->outputs.push_back(result_of(output));
    save_kept(block->recorded, saved);
    context->save_for_backward(std::move(saved));
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_chosen_targets();
    const auto block =
        c10::static_intrusive_pointer_cast<Block>(context->saved_data["block"].toCapsule());
    // The outermost graph task begins the backward of each runtime before the nested one reaches
    // it.
    for (const auto& entry : block->recorded.entries) entry->runtime->begin_backward(entry.get());
    base::refuse_double_backward();  // also where no unit is inside
    const auto inputs = inputs_of(*block, context->get_saved_variables());
    variable_list roots, root_grads;
    {
      const auto outputs = run_again(*block, inputs);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (!grads.at(i).defined() || !outputs[i].requires_grad()) continue;
        roots.push_back(outputs[i]);
        root_grads.push_back(grads[i]);
      }
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_grads);
    variable_list result{at::Tensor()};  // for the block itself
    for (const auto& input : inputs) {
      result.push_back(input.requires_grad() ? input.grad() : at::Tensor());
    }
    return result;
  }

 private:
  /// Returns the inputs as leaves of the nested graph, and restores the kept results for keep().
  static std::vector<at::Tensor> inputs_of(Block& block, variable_list saved) {
    block.recorded.kept.clear();
    for (std::size_t i = block.inputs; i < saved.size(); ++i) {
      block.recorded.kept.push_back({std::move(saved[i]), 0});
    }
    saved.resize(block.inputs);
    for (auto& input : saved) {
      input = input.detach().set_requires_grad(input.requires_grad());
    }
    return saved;
  }

  static variable_list run_again(Block& block, const std::vector<at::Tensor>& inputs) {
    const fsdp::RecomputeScope scope(block.recorded);
    const fsdp::RandomStateScope random(block.random);
    const fsdp::AutocastScope autocast(block.autocast);
    const at::AutoGradMode grad(true);
    const SampleScope place(block.place);
    const grad::RegionsScope regions(block.regions);
    auto outputs = block.run(inputs);
    constexpr auto kAsBefore = " as in the first forward";
    TESSERA_CHECK(outputs.size() == block.outputs.size() &&
                      block.recorded.next_kept == block.recorded.kept.size() &&
                      block.recorded.next == block.recorded.entries.size(),
                  ErrorKind::kUsage, "recomputation: found ", outputs.size(), " results, ",
                  block.recorded.next_kept, " calls of keep() and ", block.recorded.next,
                  " calls of units, expected ", block.outputs.size(), ", ",
                  block.recorded.kept.size(), " and ", block.recorded.entries.size(), kAsBefore,
                  grad::kMakeDeterministic);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      TESSERA_CHECK(outputs[i].defined(), ErrorKind::kUsage, "recomputation: found result ", i,
                    " undefined, expected ", block.outputs[i], kAsBefore, grad::kMakeDeterministic);
      const auto found = result_of(outputs[i]);
      TESSERA_CHECK(found == block.outputs[i], ErrorKind::kUsage, "recomputation: found result ", i,
                    " as ", found, ", expected ", block.outputs[i], kAsBefore,
                    grad::kMakeDeterministic);
    }
    return outputs;
  }
};

/// Restores the positions of the inputs, without the undefined ones that autograd does not take.
void restore_places(Block& block, const std::vector<at::Tensor>& inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined()) block.positions.push_back(i);
  }
  block.run = [run = std::move(block.run), positions = block.positions,
               count = inputs.size()](const std::vector<at::Tensor>& arguments) {
    variable_list all(count);
    for (std::size_t i = 0; i < positions.size(); ++i) all[positions[i]] = arguments[i];
    return run(all);
  };
}

}  // namespace

std::vector<at::Tensor> checkpoint(Run function, const std::vector<at::Tensor>& inputs,
                                   RecomputeMode mode) {
  if (mode == RecomputeMode::kNone || !at::GradMode::is_enabled()) return function(inputs);
  auto block = c10::make_intrusive<Block>();
  block->run = std::move(function);
  static thread_local std::uint64_t serial = 0;
  block->recorded.mode = mode;
  block->recorded.serial = ++serial;
  variable_list arguments;
  std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(arguments),
               [](const at::Tensor& input) { return input.defined(); });
  block->device = fsdp::device_of(arguments);
  block->autocast = fsdp::Autocast::now(block->device.type());
  if (std::none_of(arguments.begin(), arguments.end(),
                   [](const at::Tensor& input) { return input.requires_grad(); })) {
    // Parameters alone do not make the node part of the graph; an empty input that requires grad
    // does.
    arguments.push_back(at::empty({0}, at::TensorOptions(block->device)).set_requires_grad(true));
  }
  restore_places(*block, inputs);
  // A TensorList, since the engine finds no tensors in a vector and would silently cut the graph.
  auto outputs = Recompute::apply(block, at::TensorList(arguments));
  for (const auto& output : outputs) {
    if (const auto* node = torch::autograd::impl::grad_fn_unsafe(output)) {
      block->replace_node(nullptr, node);
      break;
    }
  }
  return outputs;
}

at::Tensor checkpoint(std::function<at::Tensor(const std::vector<at::Tensor>&)> function,
                      const std::vector<at::Tensor>& inputs, RecomputeMode mode) {
  return checkpoint(
             Run([run = std::move(function)](const std::vector<at::Tensor>& all) -> variable_list {
               return {run(all)};
             }),
             inputs, mode)
      .front();
}

}  // namespace tessera
