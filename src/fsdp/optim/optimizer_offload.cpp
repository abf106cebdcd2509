// Optimizer state outside of memory: which parameters', how it goes there and comes back, and the
// update that streams through it.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "base/text/wildcard.h"
#include "base/trace.h"
#include "comm/group.h"
#include "fsdp/agreed/step_plan.h"
#include "fsdp/optim/offloaded_state.h"
#include "fsdp/optim/optimizer_shards.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/resolve_steps.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"
#include "tessera/optim.h"

namespace tessera {
namespace {

/// What `states` tensors and a master of a parameter are.
fsdp::KeptForm form_of(const ShardView& view, std::size_t states) {
  fsdp::KeptForm form;
  form.dtypes.assign(states, to_scalar_type(view.contract->state));
  if (const auto master = fsdp::MasterOfShard::dtype(view.contract->master)) {
    form.dtypes.push_back(to_scalar_type(*master));
  }
  form.numel = view.end - view.begin;
  return form;
}

/// Elements of a shard as a shard of their own, whose versions count by themselves: what one window
/// writes is no change to the next one.
ShardView window_of(const ShardView& view, const layout::Range& elements) {
  ShardView window = view;
  window.shard = view.shard.variable_data().narrow(0, elements.begin, elements.size());
  window.shard.mutable_grad() =
      view.shard.grad().variable_data().narrow(0, elements.begin, elements.size());
  window.begin = view.begin + elements.begin;
  window.end = view.begin + elements.end;
  return window;
}

}  // namespace

void Optimizer::offload(const OffloadOptions& options) {
  const at::NoGradGuard no_grad;
  auto& runtime = unit_->runtime();
  TESSERA_CHECK(runtime.device().is_cpu(), ErrorKind::kConfig,
                "Optimizer::offload: found shards on ", runtime.device().str(),
                ", expected them on the CPU: state of devices stays there so far");
  TESSERA_CHECK(is_elementwise(), ErrorKind::kConfig, "Optimizer::offload: found ", name(),
                ", which takes matrices whole, expected an optimizer that goes element by element; "
                "take AdamW or SGD, or keep its state in memory (compile.offload_folder = \"\")");
  std::vector<const GradContract*> contracts;
  for (const auto& [contract, scoped] : scope_) contracts.push_back(&scoped.named);
  for (const auto& pattern : options.match) {
    TESSERA_CHECK(std::ranges::any_of(
                      contracts, [&](const auto* one) { return grad::matches(pattern, *one); }),
                  ErrorKind::kContract,
                  unmatched("Optimizer::offload", in_quotes(pattern),
                            concat(", which matches none of ", contracts.size(), " parameters"),
                            "at least one"));
  }
  if (outside_ == nullptr) {
    std::shared_ptr<fsdp::OffloadedState> made;
    comm::on_all_or_none(runtime.world(), "folder for offloaded optimizer state", [&] {
      made = std::make_shared<fsdp::OffloadedState>(
          fsdp::make_file_tier(options.folder, concat("rank ", runtime.world().rank())));
    });
    outside_ = std::move(made);
  }
  const bool goes_on = by_plan_ && options.by_plan && options.match.empty();
  by_plan_ = options.by_plan;
  planned_out_.reset();
  if (goes_on) return;  // until the next plan
  const bool all = options.match.empty() && !options.by_plan;
  place_outside([this, all, patterns = options.match](const GradContract& contract) {
    return all || std::ranges::any_of(patterns, [&](const auto& pattern) {
             return grad::matches(pattern, scope_.at(&contract).named);
           });
  });
}

void Optimizer::place_outside(GoesOut goes_out) {
  const auto is_wanted = [&](const Item& item) {
    return goes_out(*item.view.contract) && !form_of(item.view, states().size()).dtypes.empty();
  };
  comm::on_all_or_none(unit_->runtime().world(), "room for offloaded optimizer state", [&] {
    for (auto& item : items_) {
      if (!is_wanted(item) && item.is_out) bring_back(item);
      if (!is_wanted(item) || item.goes_out) continue;
      item.place = outside_->add(form_of(item.view, states().size()));
    }
    std::vector<std::size_t> in_use;
    for (const auto& item : items_) {
      if (is_wanted(item)) in_use.push_back(item.place);
    }
    outside_->reserve(in_use);
    for (auto& item : items_) item.goes_out = is_wanted(item);
    put_away();
  });
  goes_out_ = std::move(goes_out);
}

/// After parameters were laid out anew, so that places fit none of them.
void Optimizer::place_anew() {
  if (outside_ == nullptr) return;
  for (auto& item : items_) {
    if (item.is_out) bring_back(item);
    item.goes_out = false;
  }
  outside_->clear();
  place_outside(goes_out_);
}

void Optimizer::follow_plan() {
  if (!by_plan_) return;
  auto& runtime = unit_->runtime();
  const auto& plan = runtime.followed_plan();
  if (plan == nullptr || plan->choices.offload == planned_out_) return;
  std::map<const GradContract*, fsdp::UnitId> units;
  for (auto* unit : runtime.units()) {
    for (const auto& parameter : unit->parameters())
      units.emplace(&parameter->contract, unit->id());
  }
  place_outside([units, out = plan->choices.offload](const GradContract& contract) {
    const auto found = units.find(&contract);
    return found != units.end() && std::ranges::find(out, found->second) != out.end();
  });
  planned_out_ = plan->choices.offload;
}

void Optimizer::bring_back(Item& item) const {
  const auto& form = outside_->form(item.place);
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < form.dtypes.size(); ++i) {
    tensors.push_back(at::empty({form.numel}, form.dtypes[i]));
    outside_->read(item.place, i, 0, tensors.back());
  }
  if (tensors.size() > states().size()) {
    item.master = std::move(tensors.back());
    tensors.pop_back();
  }
  item.state = std::move(tensors);
  item.is_out = false;
}

void Optimizer::put_away(Item& item) const {
  std::vector<at::Tensor> tensors(item.state.begin(), item.state.begin() + std::ssize(states()));
  if (item.master.defined()) tensors.push_back(item.master);
  outside_->write(item.place, tensors);
  item.state.clear();
  item.master = at::Tensor();
  item.is_out = true;
}

void Optimizer::put_away() {
  for (auto& item : items_) {
    if (item.goes_out && item.has_state && !item.is_out) put_away(item);
  }
}

std::vector<OptimizerState::Kept> Optimizer::unread_kept_of(const Item& item) const {
  std::vector<OptimizerState::Kept> kept;
  const auto& form = outside_->form(item.place);
  const auto named = states();
  for (std::size_t i = 0; i < form.dtypes.size(); ++i) {
    auto name =
        i < named.size() ? named[i].name : fsdp::MasterOfShard::name(item.view.contract->master);
    kept.push_back(
        {std::move(name),
         at::empty({form.numel}, at::TensorOptions().dtype(form.dtypes[i]).device(at::kMeta)),
         [outside = outside_, place = item.place, i](std::int64_t begin, const at::Tensor& to) {
           outside->read(place, i, begin, to);
         }});
  }
  return kept;
}

void Optimizer::update_through(const std::vector<Item*>& items) {
  const TraceScope traced(TraceRow::kOptimizer, "update of offloaded state");
  put_away();
  std::vector<Item*> here, out;
  for (auto* item : items) (item->goes_out ? out : here).push_back(item);
  const auto kept_states = states().size();
  std::vector<fsdp::OffloadedState::Updated> updated;
  std::vector<std::uint32_t> changed;
  for (auto* item : out) {
    updated.push_back({item->place, !item->has_state});
    changed.push_back(item->has_state && was_changed(*item) ? 1 : 0);
  }
  // Until the last one is written some have made the update and others have not.
  for (auto* item : items) item->is_torn = true;
  outside_->stream(
      updated, [&] { update(here); },
      [&](std::span<const fsdp::OffloadedState::Window> windows) {
        std::vector<Item> parts;
        parts.reserve(windows.size());
        for (const auto& window : windows) {
          const auto& item = *out[window.index];
          Item part;
          part.view = window_of(item.view, window.elements);
          part.decays = item.decays;
          part.lr_scale = item.lr_scale;
          part.weight_decay = item.weight_decay;
          part.steps = item.steps;
          part.has_state = true;
          part.state.assign(window.kept.begin(),
                            window.kept.begin() + static_cast<std::ptrdiff_t>(kept_states));
          if (window.kept.size() > kept_states) part.master = window.kept.back();
          if (!item.has_state) {
            for (auto& kept : part.state) kept.zero_();
            if (part.master.defined()) {
              part.master.copy_(fsdp::MasterOfShard::make(part.view));
            }
          }
          part.seen_version =
              static_cast<std::uint32_t>(part.view.shard._version()) + changed[window.index];
          parts.push_back(std::move(part));
        }
        std::vector<Item*> pointers;
        for (auto& part : parts) pointers.push_back(&part);
        update(pointers);
      });
  for (auto* item : out) item->has_state = item->is_out = true;
  for (auto* item : items) item->is_torn = false;
}

bool Optimizer::is_offloaded(std::string_view parameter) { return find(parameter).goes_out; }

const OffloadTraffic& Optimizer::offload_traffic() const {
  static const OffloadTraffic kNothing;
  return outside_ == nullptr ? kNothing : outside_->traffic();
}

std::int64_t Optimizer::resident_bytes() const {
  std::size_t bytes = outside_ == nullptr ? 0 : outside_->buffer_bytes();
  const auto kept = states().size();
  for (const auto& item : items_) {
    for (std::size_t i = 0; i < std::min(kept, item.state.size()); ++i) {
      bytes += item.state[i].nbytes();
    }
    if (item.master.defined()) bytes += item.master.nbytes();
  }
  return static_cast<std::int64_t>(bytes);
}

void Optimizer::require_whole(const char* what) const {
  const auto torn = std::ranges::find_if(items_, [](const Item& item) { return item.is_torn; });
  TESSERA_CHECK(torn == items_.end(), ErrorKind::kUsage, what,
                ": found that an error has ended an update in its midst, of ",
                torn == items_.end() ? "" : torn->view.contract->name,
                " among others, expected a whole one; load a checkpoint");
}

}  // namespace tessera
