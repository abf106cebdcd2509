#include "io/hf_tensors.h"

#include <cstring>
#include <utility>

#include "tessera/error.h"

namespace tessera {

HfTensors::HfTensors(HfFolder folder) : folder_(std::move(folder)) {
  for (const auto& [name, tensor] : folder_.tensors()) {
    tensors_[name] = {tensor.info->dtype, tensor.info->shape, tensor.info->dtype};
  }
}

void HfTensors::read(std::string_view name, std::int64_t begin, std::int64_t end,
                     std::span<std::byte> out) const {
  const auto bytes = folder_.range(name, begin, end);
  TESSERA_INVARIANT(bytes.size() == out.size(), "a buffer of another size");
  if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  folder_.release(name, bytes);
}

}  // namespace tessera
