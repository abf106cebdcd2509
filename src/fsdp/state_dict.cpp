#include "tessera/state_dict.h"

#include <ATen/ATen.h>

#include <map>
#include <set>

#include "base/text/printable.h"
#include "fsdp/load_refusals.h"
#include "fsdp/runtime/model_names.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "fsdp/runtime/whole.h"
#include "grad/finite_copy.h"
#include "grad/torch_dtype.h"
#include "layout/local_part.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// A tensor of the model that a dict is written from or loaded into.
struct Target {
  std::vector<std::string> names;          // the canonical one first
  const GradContract* contract = nullptr;  // null for a buffer
  at::Tensor values;                       // [end - begin] of a shard, or a whole buffer
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  // Whether wider values are cast when they are loaded, as the contract says: for frozen parameters
  // that are whole on every rank.
  bool is_cast = false;
  // Set where the values are a part of the tensor: begin and end count elements of the part.
  ParameterLayout layout = {};
  std::vector<int> coordinates = {};
  // Set for a buffer. Files have it in the storage dtype; in frozen parts it computes in a narrower
  // one.
  std::shared_ptr<const BufferContract> buffer = nullptr;
  at::Tensor stored = {};  // the buffer's values in the storage dtype

  /// Returns the tensor that a dict contains.
  const at::Tensor& in_file() const { return buffer ? stored : values; }
};

bool is_sharded(const ParameterLayout& layout) {
  return std::any_of(layout.axes.begin(), layout.axes.end(),
                     [](const auto& axis) { return axis.parameter.kind == PlacementKind::kShard; });
}

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t numel = 1;
  for (const auto size : shape) numel *= size;
  return numel;
}

std::vector<Target> targets_of(const ShardedBase& model) {
  const fsdp::ModelNames names(model);
  std::vector<Target> targets;
  for (const auto& view : model.shards()) {
    Target target{names.of(*view.contract),   view.contract, view.shard.detach(),
                  view.contract->shape,       view.begin,    view.end,
                  view.contract->replicated()};
    if (is_sharded(view.contract->layout)) {
      target.layout = view.contract->layout;
      target.coordinates = view.coordinates;
    }
    targets.push_back(std::move(target));
  }
  for (const auto& [all, view] : names.stored_buffers(model)) {
    Target target{all, nullptr, view.tensor, view.tensor.sizes().vec(), 0, view.tensor.numel()};
    target.buffer = {view.owner, view.contract};
    target.stored = view.stored;
    targets.push_back(std::move(target));
  }
  return targets;
}

std::string shown(const std::vector<std::int64_t>& shape) { return concat(at::IntArrayRef(shape)); }

std::string refusal_of_cast(const StateTensor& entry, at::ScalarType dtype) {
  if (entry.values.scalar_type() == dtype) return "";
  try {
    const auto cast = at::empty({entry.values.numel()}, entry.values.options().dtype(dtype));
    grad::finite_copy(cast, entry.values.reshape(-1), entry.name);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

/// Returns why `entry` cannot be loaded into `target`; empty where it can.
std::string refusal_of(const Target& target, const StateTensor& entry) {
  const auto found = [&](const auto&... words) { return concat(entry.name, ": found ", words...); };
  if (!fsdp::has_values(entry.values)) {
    return found("no tensor with values, expected a dense one that is not on the meta device");
  }
  if (entry.shape != target.shape) {
    return found("the shape ", shown(entry.shape), ", expected ", shown(target.shape));
  }
  const bool whole = entry.layout == ParameterLayout();
  if (!whole && (entry.layout != target.layout || entry.coordinates != target.coordinates)) {
    return found("a part of it (", to_string(entry.layout), "), expected that of this rank (",
                 to_string(target.layout), "); load a full state dict");
  }
  const auto held =
      whole ? numel_of(entry.shape) : numel_of(layout::local_shape(entry.layout, entry.shape));
  if (whole && is_sharded(target.layout) && (entry.begin != 0 || entry.end != held)) {
    return found("elements ", entry.begin, " to ", entry.end, ", expected all ", held,
                 " of a tensor that is cut (", to_string(target.layout),
                 "); load a full state dict");
  }
  if (entry.begin < 0 || entry.end > held || entry.values.numel() != entry.end - entry.begin) {
    return found(entry.values.numel(), " values for elements ", entry.begin, " to ", entry.end,
                 ", expected as many as elements");
  }
  // Rows of a part may have a shape of their own. A whole tensor with another shape, such as a
  // transposed weight, would be read in another order.
  const auto held_shape = whole ? entry.shape : layout::local_shape(entry.layout, entry.shape);
  if (entry.begin == 0 && entry.end == held && entry.values.dim() != 1 &&
      entry.values.sizes() != at::IntArrayRef(held_shape)) {
    return found("values of the shape ", entry.values.sizes(), " for ", shown(held_shape),
                 ", expected the same, or one dim");
  }
  const bool owns = target.end > target.begin;
  if (owns && !(whole && is_sharded(target.layout)) &&
      (entry.begin > target.begin || entry.end < target.end)) {
    return found("elements ", entry.begin, " to ", entry.end, ", expected at least ", target.begin,
                 " to ", target.end, ", which this rank owns; load a full state dict");
  }
  const auto from = entry.values.scalar_type();
  const auto to = target.in_file().scalar_type();
  if (target.is_cast && at::isFloatingType(from) && at::isFloatingType(to)) {
    return refusal_of_cast(entry, to);
  }
  const bool same_kind = at::isFloatingType(from) == at::isFloatingType(to) &&
                         at::isComplexType(from) == at::isComplexType(to);
  if (from != to && (!same_kind || c10::promoteTypes(from, to) != to)) {
    return found("the dtype ", c10::toString(from), ", which ", c10::toString(to),
                 " storage cannot hold exactly, expected ", c10::toString(to),
                 "; convert the values first");
  }
  const bool is_narrowed =
      target.buffer != nullptr && target.buffer->compute != target.buffer->storage;
  // The compute dtype has to hold the values, too, though with fewer digits.
  return is_narrowed ? refusal_of_cast(entry, to_scalar_type(target.buffer->compute)) : "";
}

bool same_values(const StateTensor& one, const StateTensor& other) {
  if (one.values.is_same(other.values)) return true;
  return one.values.defined() && one.values.scalar_type() == other.values.scalar_type() &&
         one.values.sizes() == other.values.sizes() && at::equal(one.values, other.values);
}

struct Plan : fsdp::LoadRefusals {
  std::vector<const StateTensor*> sources;  // by target; null where there is none
};

Plan plan_of(const std::vector<Target>& targets, const StateDict& entries) {
  Plan plan;
  std::map<std::string, const StateTensor*> by_name;
  for (const auto& entry : entries) {
    if (!by_name.emplace(entry.name, &entry).second) plan.add_second_entry(entry.name);
  }
  std::set<std::string> known;
  for (const auto& target : targets) {
    const StateTensor* source = nullptr;
    for (const auto& name : target.names) {
      known.insert(name);
      const auto found = by_name.find(name);
      if (found == by_name.end()) continue;
      auto refusal = refusal_of(target, *found->second);
      if (refusal.empty() && source != nullptr && !same_values(*source, *found->second)) {
        refusal = concat(name, ": found other values than in ", source->name,
                         ", expected the same, since the model has one tensor for both");
      }
      if (!refusal.empty()) plan.refusals.push_back(std::move(refusal));
      if (source == nullptr) source = found->second;
    }
    plan.sources.push_back(source);
    if (source == nullptr) plan.difference.missing.push_back(target.names.front());
  }
  for (const auto& entry : entries) {
    if (known.count(entry.name) == 0) plan.difference.unexpected.push_back(entry.name);
  }
  return plan;
}

/// Returns the reasons not to load, as text; "" for none.
std::string objections(const Plan& plan, Strict strict) {
  std::string text;
  const auto add = [&](const std::string& more) { text += concat(text.empty() ? "" : "; ", more); };
  const auto unexpected_are = "entries that the model does not have";
  for (const auto& one : plan.refused_difference(strict, unexpected_are)) add(one);
  for (const auto& refusal : plan.refusals) add(refusal);
  return text;
}

/// Makes all ranks load, or none. Collective.
void agree(fsdp::Runtime& runtime, const Plan& plan, const std::string& mine) {
  const auto message = [](const std::string& who, const std::string& what) {
    return concat("load_state_dict", who, ": ", what,
                  "; expected every tensor of the model once, in its shape (Strict::kNo leaves out "
                  "what is missing or unexpected)");
  };
  TESSERA_CHECK(runtime.data_group() != nullptr || mine.empty(), ErrorKind::kContract,
                message("", mine));
  if (runtime.data_group() == nullptr) return;
  const auto all = comm::all_gather_bytes(*runtime.data_group(), mine, "state dict objections");
  TESSERA_CHECK(mine.empty(), ErrorKind::kContract, message("", mine));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    TESSERA_CHECK(all[rank].empty(), ErrorKind::kContract,
                  message(concat(" (rank ", rank, ")"), all[rank]));
  }
  const auto missing = joined(plan.difference.missing);
  const auto others =
      comm::all_gather_bytes(*runtime.data_group(), missing, "names that are missing");
  for (std::size_t rank = 1; rank < others.size(); ++rank) {
    TESSERA_CHECK(others[rank] == others[0], ErrorKind::kContract,
                  "load_state_dict: found that rank 0 lacks entries for [", others[0],
                  "] and rank ", rank, " for [", others[rank],
                  "], expected the same names on every rank");
  }
}

/// Returns the target's elements of the entry, flat.
at::Tensor part_for(const Target& target, const StateTensor& entry) {
  if (!is_sharded(target.layout) || entry.layout == target.layout) {
    return entry.values.reshape(-1).narrow(0, target.begin - entry.begin,
                                           target.end - target.begin);
  }
  return fsdp::local_part(entry.values, target.layout, target.shape, target.coordinates)
      .narrow(0, target.begin, target.end - target.begin);
}

/// Loads the values into the module's tensor, in full precision; the cast comes later.
void load(const Target& target, const StateTensor& entry) {
  auto values = target.values;  // not const: copy_ writes through it
  if (values.scalar_type() != target.in_file().scalar_type()) {
    values.set_data(at::empty(values.sizes(), target.stored.options()));
  }
  values.copy_(part_for(target, entry).reshape(values.sizes()));
}

/// Copies sources whose memory is loaded into, before anything is overwritten: such as layers that
/// swap places in the model's own kSharded state.
std::vector<StateTensor> own_copies(const std::vector<Target>& targets, Plan& plan) {
  std::set<const void*> written;
  for (const auto& target : targets) {
    if (target.values.numel() > 0) written.insert(target.values.storage().data());
  }
  std::vector<StateTensor> copies;
  copies.reserve(targets.size());  // keeps pointers to them valid
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto* entry = plan.sources[i];
    if (entry == nullptr || entry->values.numel() == 0) continue;
    const bool itself = entry->values.data_ptr() == targets[i].values.data_ptr();
    if (itself || written.count(entry->values.storage().data()) == 0) continue;
    copies.push_back(*entry);
    copies.back().values = entry->values.clone();
    plan.sources[i] = &copies.back();
  }
  return copies;
}

/// Marks units of which all parameters were loaded as having values.
void mark_loaded(const ShardedBase& model, const std::vector<Target>& targets, const Plan& plan) {
  std::set<const GradContract*> missing;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (plan.sources[i] == nullptr) missing.insert(targets[i].contract);
  }
  for (auto* unit : model.unit()->runtime().units()) {
    const bool whole = std::none_of(
        unit->parameters().begin(), unit->parameters().end(),
        [&](const auto& parameter) { return missing.count(&parameter->contract) > 0; });
    if (whole) unit->set_has_values();
  }
}

}  // namespace

StateTensor whole_entry(const std::string& name, const at::Tensor& values) {
  return {name, values, values.sizes().vec(), 0, values.numel()};
}

StateDict state_dict(const ShardedBase& model, StateDictKind kind) {
  const at::NoGradGuard no_grad;
  fsdp::unit_of_handle(model.unit());
  std::map<std::string, at::Tensor> whole;
  const bool keeps = kind == StateDictKind::kFull || model.unit()->runtime().world().rank() == 0;
  if (kind != StateDictKind::kSharded) {
    model.visit_full_parameters([&](const std::string& name, const at::Tensor& values) {
      if (keeps) whole.emplace(name, values.clone());
    });
    if (!keeps) return {};
  }
  StateDict dict;
  for (const auto& target : targets_of(model)) {
    for (const auto& name : target.names) {
      if (kind == StateDictKind::kSharded) {
        dict.push_back({name, target.in_file(), target.shape, target.begin, target.end,
                        target.layout, target.coordinates});
      } else if (target.contract != nullptr) {
        dict.push_back(whole_entry(name, whole.at(target.contract->name)));
      } else {
        dict.push_back(whole_entry(name, target.stored.detach().clone()));
      }
    }
  }
  return dict;
}

StateDictDifference load_state_dict(ShardedBase& model, const StateDict& entries, Strict strict) {
  const at::NoGradGuard no_grad;
  auto& runtime = fsdp::unit_of_handle(model.unit()).runtime();
  runtime.renew_after_failure();
  runtime.require_idle("load_state_dict");
  const auto targets = targets_of(model);
  auto plan = plan_of(targets, entries);
  agree(runtime, plan, objections(plan, strict));
  const auto copies = own_copies(targets, plan);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (plan.sources[i] == nullptr || targets[i].values.numel() == 0) continue;
    load(targets[i], *plan.sources[i]);
  }
  for (auto* unit : runtime.units()) {
    if (!unit->buffers_are_cast()) continue;  // the first forward does
    unit->forget_cast();
    unit->cast_buffers();
  }
  mark_loaded(model, targets, plan);
  return std::move(plan.difference);
}

}  // namespace tessera
