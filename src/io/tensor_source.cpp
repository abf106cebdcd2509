#include "io/tensor_source.h"

namespace tessera {

std::int64_t SourceTensor::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

const SourceTensor* TensorSource::find(std::string_view name) const {
  const auto found = tensors().find(name);
  return found == tensors().end() ? nullptr : &found->second;
}

std::optional<DType> TensorSource::bulk_dtype() const {
  std::map<DType, std::int64_t> elements;
  for (const auto& [name, tensor] : tensors()) {
    if (!tensor.unpacked) elements[tensor.original] += tensor.numel();
  }
  return tessera::bulk_dtype(elements);
}

std::optional<DType> bulk_dtype(const std::map<DType, std::int64_t>& elements) {
  std::optional<DType> bulk;
  for (const auto& [dtype, count] : elements) {
    if (!is_floating(dtype)) continue;
    const bool narrower = bulk && size_of(dtype) < size_of(*bulk);
    if (!bulk || count > elements.at(*bulk) || (count == elements.at(*bulk) && narrower)) {
      bulk = dtype;
    }
  }
  return bulk;
}

}  // namespace tessera
