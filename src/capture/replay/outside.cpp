#include "capture/replay/outside.h"

#include <algorithm>

namespace tessera::capture {

Outside::Outside(const Program& program,
                 const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  for (std::size_t i = 0; i < program.memories.size(); ++i) {
    if (program.memories[i].place != MemoryPlace::kOutside) continue;
    const auto values = std::ranges::count_if(program.values, [&](const Value& value) {
      return static_cast<std::size_t>(value.memory) == i;
    });
    memories_.push_back({i, 1 + values});
  }
  const auto reads = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() &&
           std::ranges::any_of(memories_, [&](const Memory& memory) {
             return program.memories[memory.number].outside.unsafeGetStorageImpl() ==
                    tensor.storage().unsafeGetStorageImpl();
           });
  };
  for (const auto& module : modules) {
    for (const at::Tensor& buffer : module->buffers(/*recurse=*/false)) {
      if (reads(buffer)) buffers_.push_back({buffer, buffer.storage().unsafeGetStorageImpl()});
    }
  }
}

bool Outside::buffers_are_there() const {
  return std::ranges::all_of(buffers_, [](const Buffer& buffer) {
    return buffer.tensor.storage().unsafeGetStorageImpl() == buffer.storage;
  });
}

bool Outside::is_held(const Program& program, int held_elsewhere) const {
  return std::ranges::all_of(memories_, [&](const Memory& memory) {
    const auto& outside = program.memories[memory.number].outside;
    return static_cast<std::int64_t>(outside.use_count()) > memory.own_uses + held_elsewhere;
  });
}

std::vector<std::int64_t> Outside::versions() const {
  std::vector<std::int64_t> versions;
  for (const auto& buffer : buffers_) versions.push_back(buffer.tensor._version());
  return versions;
}

}  // namespace tessera::capture
