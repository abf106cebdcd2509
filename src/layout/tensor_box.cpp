#include "layout/tensor_box.h"

namespace tessera {
std::int64_t product(std::span<const std::int64_t> dims) {
  std::int64_t result = 1;
  for (const std::int64_t dim : dims) result *= dim;
  return result;
}

TensorBox TensorBox::whole(std::span<const std::int64_t> shape) {
  return {std::vector<std::int64_t>(shape.size(), 0), {shape.begin(), shape.end()}};
}

std::int64_t TensorBox::numel() const { return product(size); }

bool overlap(const TensorBox& a, const TensorBox& b) {
  for (std::size_t d = 0; d < a.offset.size(); ++d) {
    if (a.offset[d] >= b.offset[d] + b.size[d] || b.offset[d] >= a.offset[d] + a.size[d]) {
      return false;
    }
  }
  return true;
}

std::int64_t elements_before(const TensorBox& box, std::span<const std::int64_t> shape,
                             std::int64_t position) {
  std::int64_t left = box.numel();
  if (left == 0 || position >= product(shape)) return left;
  std::int64_t stride = product(shape);
  std::int64_t before = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    stride /= shape[d];
    left /= box.size[d];  // elements of the box in one slice along d
    const std::int64_t slice = position / stride - box.offset[d];
    position %= stride;
    if (slice < 0) return before;
    if (slice >= box.size[d]) return before + box.size[d] * left;
    before += slice * left;
  }
  return before;
}

std::int64_t position_in_tensor(const TensorBox& box, std::span<const std::int64_t> shape,
                                std::int64_t index) {
  std::int64_t position = 0;
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    position += (index % box.size[d] + box.offset[d]) * stride;
    index /= box.size[d];
    stride *= shape[d];
  }
  return position;
}

std::int64_t row_length(const TensorBox& box, std::span<const std::int64_t> shape) {
  std::int64_t length = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    length *= box.size[d];
    if (box.size[d] != shape[d]) break;
  }
  return length;
}

}  // namespace tessera
