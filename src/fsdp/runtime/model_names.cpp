#include "fsdp/runtime/model_names.h"

#include <algorithm>

#include "tessera/dtype.h"

namespace tessera::fsdp {
namespace {

void add_once(std::vector<std::string>& names, const std::string& name) {
  if (std::ranges::count(names, name) == 0) names.push_back(name);
}

}  // namespace

ModelNames::ModelNames(const ShardedBase& model) {
  if (const auto& unit = model.unit()) add(*unit, unit->name());
}

/// Adds the names of the unit at one place in the model, where they begin with `prefix`. At the
/// first place `prefix` is the unit's own name.
void ModelNames::add(const Unit& unit, const std::string& prefix) {
  const auto here = [&](const std::string& name) {
    return prefix == unit.name() ? name : prefix + name.substr(unit.name().size());
  };
  for (const auto& [name, leaf, buffer, inside] : unit.registered) {
    if (const auto inner = inside.lock()) {
      add(*inner, name.empty() ? inner->name() : here(name));
    } else if (buffer.defined()) {
      add_once(buffers_[buffer.unsafeGetTensorImpl()], here(name));
    } else if (leaf != nullptr && leaf->owner != nullptr) {
      add_once(parameters_[&leaf->owner->contract], here(name));
    }
  }
}

std::vector<std::string> ModelNames::of(const GradContract& contract) const {
  const auto found = parameters_.find(&contract);
  if (found != parameters_.end()) return found->second;
  std::vector<std::string> names{contract.name};
  names.insert(names.end(), contract.aliases.begin(), contract.aliases.end());
  return names;
}

GradContract ModelNames::named(const GradContract& contract) const {
  const auto names = of(contract);
  auto result = contract;
  result.name = names.front();
  result.aliases.assign(names.begin() + 1, names.end());
  return result;
}

std::vector<std::string> ModelNames::of(const at::Tensor& buffer) const {
  const auto found = buffers_.find(buffer.unsafeGetTensorImpl());
  return found == buffers_.end() ? std::vector<std::string>() : found->second;
}

std::vector<NamedBuffer> ModelNames::stored_buffers(const ShardedBase& model) const {
  std::vector<NamedBuffer> all;
  std::map<const at::TensorImpl*, std::size_t> places;
  for (auto& view : model.buffers()) {
    if (!view.contract->stored) continue;
    auto names = of(view.tensor);
    if (names.empty()) {
      all.push_back({{view.contract->name}, std::move(view)});
      continue;
    }
    const auto [place, is_new] = places.emplace(view.tensor.unsafeGetTensorImpl(), all.size());
    if (is_new) {
      all.push_back({std::move(names), std::move(view)});
      continue;
    }
    // Keeps the wider storage dtype, of a unit that was sharded before a cast narrowed the buffer.
    auto& first = all[place->second].view;
    if (!represents(first.contract->storage, view.contract->storage)) first = std::move(view);
  }
  return all;
}

}  // namespace tessera::fsdp
