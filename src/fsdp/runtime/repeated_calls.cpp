#include "fsdp/runtime/repeated_calls.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <type_traits>
#include <utility>

namespace tessera::fsdp {
namespace {

const at::impl::SavedTensorDefaultHooksTLS& hooks_here() {
  return at::SavedTensorDefaultHooks::get_tls_state();
}

/// Returns the hook's address. Its ptr() needs an interpreter, which a program without Python
/// lacks.
const void* address_of(const c10::SafePyObject& hook) {
  static_assert(std::is_standard_layout_v<c10::SafePyObject>);  // its first member is the object
  return *reinterpret_cast<PyObject* const*>(&hook);
}

/// Whether the backward of this call has ended. A call that was not recorded, or of which no result
/// requires grad so that its record is destroyed, has no backward that could end.
bool is_over(const Segment& segment, std::size_t position) {
  for (const auto& weak : segment.entries) {
    const auto entry = weak.lock();
    if (entry != nullptr && entry->position == position) return !entry->pending.has_value();
  }
  return false;
}

}  // namespace

bool RepeatedCalls::is_under_way() { return !hooks_here().stack.empty(); }

void RepeatedCalls::forget() {
  hooks_.reset();
  node_ = nullptr;
  places_.clear();
}

bool RepeatedCalls::is_same_run() {
  const auto node = torch::autograd::get_current_node();
  const auto& hook = hooks_here().stack.top().second;
  const bool same =
      hooks_.has_value() && node_ == node.get() && address_of(*hooks_) == address_of(hook);
  hooks_.emplace(hook);
  node_ = node.get();
  return same;
}

RepeatedCalls::Verdict RepeatedCalls::begin(UnitId unit,
                                            const std::vector<std::shared_ptr<Segment>>& segments) {
  const bool grad = at::GradMode::is_enabled();
  bool was_without_grad = false;
  for (const auto& segment : segments) {
    if (segment->forward->forgotten) continue;
    const auto& units = segment->forward->trace.units;
    for (std::size_t position = 0; position < units.size(); ++position) {
      if (units[position] != unit) continue;
      const bool had_grad = segment->had_grad.at(position);
      was_without_grad = was_without_grad || (grad && !had_grad);
      if (grad == had_grad && !is_over(*segment, position)) places_.push_back({segment, position});
    }
  }
  if (!places_.empty()) return Verdict::kRepeats;
  forget();
  return was_without_grad ? Verdict::kWithoutGrad : Verdict::kUnknown;
}

RepeatedCalls::Verdict RepeatedCalls::follow(
    UnitId unit, const std::vector<std::shared_ptr<Segment>>& segments) {
  if (!is_same_run()) {
    places_.clear();
    return begin(unit, segments);
  }
  std::vector<Place> next;
  for (const auto& [segment, position] : places_) {
    const auto& units = segment->forward->trace.units;
    if (position + 1 < units.size() && units[position + 1] == unit) {
      next.push_back({segment, position + 1});
    }
  }
  if (next.empty()) return Verdict::kOtherOrder;
  places_ = std::move(next);
  return Verdict::kRepeats;
}

std::vector<UnitId> RepeatedCalls::expected() const {
  std::vector<UnitId> units;
  for (const auto& [segment, position] : places_) {
    const auto& trace = segment->forward->trace.units;
    if (position + 1 >= trace.size()) continue;
    if (std::ranges::count(units, trace[position + 1]) == 0) units.push_back(trace[position + 1]);
  }
  return units;
}

}  // namespace tessera::fsdp
