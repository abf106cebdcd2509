#include "capture/replay/outside.h"

#include <algorithm>
#include <utility>

namespace tessera::capture {
namespace {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

/// Graphs that come and go often change the number of holders of a tensor. From this many losses on
/// the number no longer rises, so that only a new minimum counts as a loss.
constexpr int kMostTimesFewer = 16;

std::vector<at::Tensor> parameters_of(const Modules& modules) {
  std::vector<at::Tensor> all;
  for (const auto& module : modules) {
    const auto own = module->parameters(/*recurse=*/false);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

/// Returns the tensor, undefined where it no longer exists.
at::Tensor held(const WeakTensor& tensor) {
  auto there = tensor.lock();
  return there ? at::Tensor(std::move(there)) : at::Tensor();
}

bool lies_in(const at::Tensor& tensor, const WeakStorage& memory) {
  return tensor.defined() && tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == memory._unsafe_get_target();
}

}  // namespace

// ---------------------------------------------------------------------------------------- holders

void Holders::look(bool has_graphs) {
  std::erase_if(entries_, [](const Entry& one) { return one.tensor.expired(); });
  for (auto& one : entries_) {
    const std::size_t now = one.tensor.use_count();
    const bool are_fewer = now < one.holders;
    if (are_fewer) ++one.times_fewer;
    const bool rises = !has_graphs && (one.times_fewer < kMostTimesFewer || one.holders == 0);
    if (are_fewer || rises) one.holders = now;
  }
}

int Holders::times_fewer(const WeakTensor& tensor) {
  const auto found = std::ranges::find(entries_, tensor._unsafe_get_target(), [](const Entry& one) {
    return one.tensor._unsafe_get_target();
  });
  if (found != entries_.end()) return found->times_fewer;
  entries_.push_back({tensor});
  return 0;
}

// ---------------------------------------------------------------------------------------- outside

Outside::Outside(const Program& program, const Tape& tape, const Modules& modules) {
  const auto parameters = parameters_of(modules);
  for (std::size_t i = 0; i < program.memories.size(); ++i) {
    const auto& memory = program.memories[i].outside;
    if (!memory) continue;
    const auto is_here = [&](const at::Tensor& tensor) { return lies_in(tensor, *memory); };
    const bool is_of_backward = std::ranges::find(program.kept_outside, static_cast<MemoryId>(i)) !=
                                program.kept_outside.end();
    const auto add = [&](const at::Tensor& tensor, Value place) {
      known_.push_back({.tensor = WeakTensor(tensor.getIntrusivePtr()),
                        .place = std::move(place),
                        .memory = memory->_unsafe_get_target(),
                        .requires_grad = tensor.requires_grad(),
                        .is_of_backward = is_of_backward});
    };
    for (const auto& [name, id] : tape.outside_tensors()) {
      const at::Tensor tensor = held(name);
      const auto& value = program.values[static_cast<std::size_t>(id)];
      const bool is_parameter = std::ranges::any_of(
          parameters, [&](const at::Tensor& one) { return one.is_same(tensor); });
      if (!tensor.defined() || is_parameter || std::cmp_not_equal(value.memory, i)) continue;
      add(tensor, value);
    }
    for (const auto& module : modules) {
      for (const at::Tensor& buffer : module->buffers(/*recurse=*/false)) {
        if (!is_here(buffer)) continue;
        if (find(buffer) == nullptr) {
          add(buffer, {kNone, buffer.scalar_type(), buffer.sizes().vec(), buffer.strides().vec(),
                       buffer.storage_offset()});
        }
        find(buffer)->is_buffer = true;
      }
    }
    memories_.push_back(*memory);
    is_of_parameters_.push_back(std::ranges::any_of(parameters, is_here));
  }
}

Outside::Known* Outside::find(const at::Tensor& tensor) {
  const auto found = std::ranges::find(known_, tensor.unsafeGetTensorImpl(), &Known::name);
  return found == known_.end() ? nullptr : &*found;
}

void Outside::keep_read_again(const Tape& tape, Holders& holders) {
  std::erase_if(known_, [&](const Known& one) {
    return !one.is_buffer &&
           std::ranges::none_of(tape.outside_tensors(), [&](const OutsideTensor& read) {
             return read.tensor._unsafe_get_target() == one.name();
           });
  });
  for (auto& one : known_) one.times_fewer = holders.times_fewer(one.tensor);
}

std::string Outside::refused() const {
  for (std::size_t i = 0; i < memories_.size(); ++i) {
    const auto* memory = memories_[i]._unsafe_get_target();
    if (is_of_parameters_[i] || std::ranges::find(known_, memory, &Known::memory) != known_.end()) {
      continue;
    }
    return "memory from outside that each call reads by another tensor, as variable_data() makes "
           "one";
  }
  return {};
}

bool Outside::Known::lies_as_before() const {
  const at::Tensor now = held(tensor);
  return now.defined() && now.has_storage() && now.storage().unsafeGetStorageImpl() == memory &&
         now.scalar_type() == place.dtype && now.storage_offset() == place.offset &&
         now.sizes() == place.sizes && now.strides() == place.strides &&
         now.requires_grad() == requires_grad;
}

bool Outside::has_buffers() const {
  return std::ranges::all_of(
      known_, [](const Known& one) { return !one.is_buffer || one.lies_as_before(); });
}

bool Outside::lies_as_before() const {
  return std::ranges::none_of(memories_, [](const auto& memory) { return memory.expired(); }) &&
         std::ranges::all_of(known_, &Known::lies_as_before);
}

bool Outside::is_there(Holders& holders) const {
  return lies_as_before() && std::ranges::all_of(known_, [&](const Known& one) {
           return holders.times_fewer(one.tensor) == one.times_fewer;
         });
}

std::vector<Version> Outside::versions(bool of_backward) const {
  std::vector<Version> versions;
  for (const auto& one : known_) {
    if (of_backward && !one.is_of_backward) continue;
    const at::Tensor now = held(one.tensor);
    if (!now.defined() || now.is_inference()) continue;
    const auto& counter = now.unsafeGetTensorImpl()->version_counter();
    versions.emplace_back(counter, counter.current_version());
  }
  return versions;
}

bool are_unchanged(const std::vector<Version>& versions) {
  return std::ranges::all_of(versions, [](const Version& version) {
    return version.first.current_version() == version.second;
  });
}

}  // namespace tessera::capture
