#include "capture/replay/regions.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/threads/backward_pass.h"
#include "capture/replay/helper_thread.h"
#include "capture/replay/variants.h"
#include "fsdp/handle.h"
#include "fsdp/runtime/recompute_scopes.h"
#include "grad/keep.h"
#include "grad/leaf.h"
#include "tessera/recompute_mode.h"
#include "tessera/shard.h"

namespace tessera::capture {
namespace {

constexpr std::size_t kVariants = 4;
/// After so many calls of other variants a variant is not expected again: it belongs to an earlier
/// plan, or is a validation's last batch.
constexpr std::int64_t kForgotten = 64;

/// The kernels of attention that libtorch may choose; each runs other operations.
std::array<bool, 3> attention_kernels() {
  const auto& context = at::globalContext();
  return {context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(),
          context.userEnabledMathSDP()};
}

}  // namespace

InputLike InputLike::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.requires_grad(), tensor.scalar_type(), tensor.sizes().vec(),
          tensor.strides().vec()};
}

std::vector<Hash128> hashes_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<Hash128> all;
  for (const auto& tensor : tensors) all.push_back(tensor.defined() ? bits_of(tensor) : Hash128());
  return all;
}

/// Keeps copies, except of arguments that have changed since the call began and are not what was
/// recorded.
void Variant::keep_same(const std::vector<at::Tensor>& arguments) {
  const at::NoGradGuard no_grad;
  same.assign(data.size(), {});
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (varied[i] || !arguments[i].defined() || !arguments[i].is_contiguous()) continue;
    const at::Tensor copy = arguments[i].detach().clone();
    if (bits_of(copy) == data[i]) same[i] = copy;
  }
}

bool Variant::replays(const std::vector<at::Tensor>& arguments) const {
  if (!is_compared()) return false;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const at::Tensor& given = arguments[i];
    if (varied[i] || !given.defined()) continue;
    const bool is_same =
        same[i].defined()
            ? std::memcmp(given.const_data_ptr(), same[i].const_data_ptr(), given.nbytes()) == 0
            : bits_of(given) == data[i];
    if (!is_same) return false;
  }
  return true;
}

bool InputLike::matches(const at::Tensor& tensor) const {
  if (!defined || !tensor.defined()) return defined == tensor.defined();
  if (tensor.is_neg() || tensor.is_conj()) return false;
  return tensor.requires_grad() == requires_grad && tensor.scalar_type() == dtype &&
         tensor.sizes() == sizes && tensor.strides() == strides;
}

Region::Region(const std::shared_ptr<torch::nn::Module>& owner, std::string name,
               std::shared_ptr<SharedByRegions> shared)
    : owner_(owner),
      name_(std::move(name)),
      shared_(std::move(shared)),
      parameters_(owner->parameters()),
      modules_(owner->modules()) {
  const bool holds_units = std::ranges::any_of(modules_, [](const auto& module) {
    return dynamic_cast<const ShardedBase*>(module.get()) != nullptr;
  });
  const bool has_others = std::ranges::any_of(parameters_, [](const at::Tensor& parameter) {
    const auto leaf = grad::find_leaf(parameter);
    return parameter.requires_grad() && (leaf == nullptr || leaf->sink == nullptr);
  });
  if (has_others) never_ = "a parameter that is not sharded";
  for (const auto& parameter : parameters_) {
    if (unit_.empty()) unit_ = fsdp::unit_of(parameter);
  }
  if (!holds_units) return;
  never_ = "a unit inside";
  modules_.clear();  // a handle holds this object's owner
  parameters_.clear();
}

void SharedByRegions::forward_ran(const Region& region) {
  // A region that runs again in a backward is not the forward's last.
  if (base::in_backward_pass()) return;
  ran_last_ = &region;
  ++ran_;
  if (ends_forward_ == &region && ran_ > 1) blocks->decommit(BlockKind::kScratch);
}

void SharedByRegions::backward_runs() {
  if (ran_last_ != nullptr) ends_forward_ = std::exchange(ran_last_, nullptr);
  ran_ = 0;
}

void SharedByRegions::recording_begins() {
  if (recordings_ == 0) look_at_holders(/*has_graphs=*/false);
  ++recordings_;
}

void SharedByRegions::recording_ends() {
  if (--recordings_ == 0) look_at_holders(eager_graphs_);
}

void SharedByRegions::look_at_holders(bool has_graphs) const {
  for (const auto& one : regions_) {
    if (const auto region = one.lock()) region->holders().look(has_graphs);
  }
}

void SharedByRegions::trim() const {
  blocks->decommit(BlockKind::kEntry);
  blocks->decommit(BlockKind::kScratch);
  ::malloc_trim(0);
}

std::shared_ptr<LiveEntry> Region::take_entry(const std::shared_ptr<Variant>& variant) const {
  std::unique_ptr<LiveEntry> entry;
  if (variant->free.empty()) {
    entry = run_on_helper_thread(
        [&] { return std::make_unique<LiveEntry>(variant->program, shared_->blocks, unit_); });
  } else {
    entry = std::move(variant->free.back());
    variant->free.pop_back();
  }
  return {entry.release(), [variant](LiveEntry* used) {
            std::unique_ptr<LiveEntry> back(used);
            back->release();
            // An entry of a program that was forgotten meanwhile is of no use.
            if (variant->program.get() == &back->program())
              variant->free.push_back(std::move(back));
          }};
}

std::shared_ptr<LiveEntry> Region::entry_to_compare(const Variant& variant) const {
  return std::make_shared<LiveEntry>(variant.program, shared_->blocks, unit_);
}

/// Asks any leaf: the store is one of the whole model.
bool Region::defers_weight_gradients() const {
  for (const auto& parameter : parameters_) {
    const auto leaf = grad::find_leaf(parameter);
    if (leaf && leaf->sink != nullptr) return leaf->sink->store() != nullptr;
  }
  return false;
}

bool Region::owns(const at::Tensor& tensor) const {
  const auto is_in = [&](const at::Tensor& own) {
    return own.defined() && own.is_alias_of(tensor);
  };
  if (std::ranges::any_of(parameters_, is_in)) return true;
  const auto owner = owner_.lock();
  return owner != nullptr && std::ranges::any_of(owner->buffers(), is_in);
}

void Region::say_once(const std::string& why) {
  if (shared_->said.insert(why).second) log::info("compile: ", name_, " stays eager: ", why);
}

Guards Region::guards_of(const std::vector<at::Tensor>& inputs) const {
  Guards guards;
  for (const auto& input : inputs) guards.inputs.push_back(InputLike::of(input));
  for (const auto& each : parameters_) guards.needs_gradient.push_back(each.requires_grad());
  for (const auto& each : modules_) guards.training.push_back(each->is_training());
  guards.grad_mode = c10::GradMode::is_enabled();
  guards.keeps = grad::kept_results(grad::CheckpointRun::kFirst) != nullptr;
  guards.takes = grad::kept_results(grad::CheckpointRun::kAgain) != nullptr;
  guards.default_dtype = c10::get_default_dtype_as_scalartype();
  guards.threads = at::get_num_threads();
  guards.deterministic = at::globalContext().deterministicAlgorithms();
  guards.attention = attention_kernels();
  return guards;
}

bool Region::is_set_as(const Guards& guards) const {
  if (guards.threads != at::get_num_threads() ||
      guards.deterministic != at::globalContext().deterministicAlgorithms() ||
      guards.default_dtype != c10::get_default_dtype_as_scalartype() ||
      guards.attention != attention_kernels()) {
    return false;
  }
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    if (guards.training[i] != modules_[i]->is_training()) return false;
  }
  return true;
}

bool Region::recomputes_inside() const {
  if (!c10::GradMode::is_enabled() || fsdp::recomputing() != nullptr) return false;
  return std::ranges::any_of(modules_, [](const auto& module) {
    const auto* one = dynamic_cast<const Recomputable*>(module.get());
    return one != nullptr && one->recompute() != RecomputeMode::kNone;
  });
}

bool Region::matches(const Guards& guards, const std::vector<at::Tensor>& inputs) const {
  if (guards.grad_mode != c10::GradMode::is_enabled() || guards.inputs.size() != inputs.size() ||
      !is_set_as(guards)) {
    return false;
  }
  if (guards.keeps != (grad::kept_results(grad::CheckpointRun::kFirst) != nullptr) ||
      guards.takes != (grad::kept_results(grad::CheckpointRun::kAgain) != nullptr)) {
    return false;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!guards.inputs[i].matches(inputs[i])) return false;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (guards.needs_gradient[i] != parameters_[i].requires_grad()) return false;
  }
  return true;
}

std::shared_ptr<Variant> Region::variant_of(const std::vector<at::Tensor>& inputs) const {
  const auto found = std::ranges::find_if(
      variants_, [&](const auto& variant) { return matches(variant->guards, inputs); });
  return found == variants_.end() ? nullptr : *found;
}

bool Region::is_outside_there(const Variant& variant) {
  if (variant.program == nullptr) return true;
  return variant.is_compared() ? variant.outside->is_there(holders_)
                               : variant.outside->has_buffers();
}

bool Region::has_room() {
  if (variants_.size() < kVariants) return true;
  const auto oldest = std::ranges::min_element(
      variants_, {}, [](const auto& variant) { return variant->last_call; });
  if (calls_ - (*oldest)->last_call < kForgotten) return false;
  variants_.erase(oldest);
  return true;
}

std::string Region::why_eager(const std::vector<at::Tensor>& inputs) const {
  if (!never_.empty()) return never_;
  for (const auto& input : inputs) {
    if (!input.defined()) continue;
    if (!input.is_cpu()) return "another device than the CPU";
    if (input.scalar_type() == at::kDouble) return "fp64, which has second derivatives";
    if (input.numel() == 0) return "no rows";
    if (input.is_inference()) return "inference mode";
    if (input.is_neg() || input.is_conj()) return "an argument that is read negated or conjugated";
  }
  if (c10::InferenceMode::is_enabled()) return "inference mode";
  if (at::autocast::is_autocast_enabled(at::kCPU)) return "autocast";
  if (!parameters_.empty() && !fsdp::is_there_in_backward(parameters_.front())) {
    return "set_unshard_in_backward(false), since comparing runs forward in backward";
  }
  return {};
}

std::vector<at::Tensor> Region::eager(const std::string& why, const std::vector<at::Tensor>& inputs,
                                      const grad::RegionBody& body) {
  ++shared_->calls.eager[why];
  return body(inputs);
}

std::vector<at::Tensor> Region::run(const std::vector<at::Tensor>& inputs,
                                    const grad::RegionBody& body) {
  if (const auto why = why_eager(inputs); !why.empty()) return eager(why, inputs, body);
  const auto wants = [](const at::Tensor& each) { return each.defined() && each.requires_grad(); };
  if (c10::GradMode::is_enabled() && std::ranges::none_of(inputs, wants) &&
      std::ranges::none_of(parameters_, wants)) {
    const at::NoGradGuard no_graph;  // there would be none
    return run(inputs, body);
  }
  if (recomputes_inside()) return eager("a checkpoint inside of it", inputs, body);
  ++calls_;
  const auto variant = variant_of(inputs);
  if (variant == nullptr) {
    if (!has_room()) return eager("more than four variants", inputs, body);
    const Guards guards = guards_of(inputs);
    variants_.push_back(run_on_helper_thread([&] {
      auto made = std::make_shared<Variant>();
      made->guards = guards;
      return made;
    }));
    variants_.back()->last_call = calls_;
    shared_->look_at_holders(/*has_graphs=*/true);  // before this call makes a graph
    return eager("the first call, which makes what later ones find", inputs, body);
  }
  variant->last_call = calls_;
  if (!variant->refused.empty()) return eager(variant->refused, inputs, body);
  if (variant->is_recording) {
    shared_->makes_eager_graph();
    return eager("being recorded", inputs, body);
  }
  holders_.look(shared_->has_graphs());
  if (!is_outside_there(*variant)) variant->forget();
  if (!c10::GradMode::is_enabled()) return call_without(*this, variant, inputs, body);
  return call_with_gradients(shared_from_this(), variant, inputs, body);
}

std::vector<at::Tensor> ReplayedRegions::run(const std::shared_ptr<torch::nn::Module>& owner,
                                             std::string_view name,
                                             const std::vector<at::Tensor>& inputs,
                                             const grad::RegionBody& body) {
  auto& region = regions_[{owner.get(), std::string(name)}];
  // A new module may have the address of an earlier one.
  if (region == nullptr || !region->is_of(owner)) {
    region = run_on_helper_thread([&] {
      return std::make_shared<Region>(owner, concat(owner->name(), name.empty() ? "" : ", ", name),
                                      shared_);
    });
    shared_->add(region);
  }
  return region->run(inputs, body);
}

void ReplayedRegions::forget() { regions_.clear(); }

}  // namespace tessera::capture
