// Tensors in memory, as a folder has them.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/tensor_source.h"

namespace tessera::testing {

class TensorsInMemory : public TensorSource {
 public:
  template <class T>
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape,
           const std::vector<T>& values) {
    tensors_[name] = {dtype, std::move(shape), dtype};
    auto& bytes = bytes_[name];
    bytes.resize(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  const std::filesystem::path& path() const override { return path_; }
  const Tensors& tensors() const override { return tensors_; }
  void read(std::string_view name, std::int64_t begin, std::int64_t /*end*/,
            std::span<std::byte> out) const override {
    const auto size = size_of(find(name)->dtype);
    std::memcpy(out.data(), bytes_.find(name)->second.data() + begin * size, out.size());
  }

 private:
  std::filesystem::path path_ = "folder";
  Tensors tensors_;
  std::map<std::string, std::vector<std::byte>, std::less<>> bytes_;
};

/// Elements [begin, end) of a tensor that is shown in bfloat16.
inline std::vector<std::uint16_t> read_bfloat16(const TensorSource& source, const std::string& name,
                                                std::int64_t begin, std::int64_t end) {
  std::vector<std::uint16_t> found(static_cast<std::size_t>(end - begin));
  source.read(name, begin, end, std::as_writable_bytes(std::span(found)));
  return found;
}
inline float value_of_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

}  // namespace tessera::testing
