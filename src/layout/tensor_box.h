// TensorBox: a part of a tensor with edges along its dims, and the places of its elements in the
// whole.
//
// Flattened means row-major, for the box as for the tensor. Positions in the tensor grow with the
// index in the box, so that any range of the tensor is one range of the box. Pure arithmetic on
// values that were checked (io/checkpoint_manifest.h, local_part.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// Shapes: both [dims of the tensor].
struct TensorBox {
  std::vector<std::int64_t> offset;
  std::vector<std::int64_t> size;

  static TensorBox whole(std::span<const std::int64_t> shape);
  std::int64_t numel() const;
  bool operator==(const TensorBox&) const = default;
};

/// Returns the number of elements of a tensor or box of this size.
std::int64_t product(std::span<const std::int64_t> dims);

/// Whether two non-empty boxes of one tensor have an element in common.
bool overlap(const TensorBox& a, const TensorBox& b);

/// Returns how many elements of `box` come before element `position` of the tensor.
std::int64_t elements_before(const TensorBox& box, std::span<const std::int64_t> shape,
                             std::int64_t position);
/// Returns the position of element `index` of the box in the tensor.
std::int64_t position_in_tensor(const TensorBox& box, std::span<const std::int64_t> shape,
                                std::int64_t index);
/// Returns how many elements follow one another in both the box and the tensor: the box is rows of
/// this length.
std::int64_t row_length(const TensorBox& box, std::span<const std::int64_t> shape);

/// Elements that follow one another in both the box and the tensor.
struct BoxRow {
  std::int64_t index = 0;     ///< of the first one, in the box
  std::int64_t position = 0;  ///< of the first one, in the tensor
  std::int64_t count = 0;
};

/// Calls take(BoxRow) for the elements [first, last) of the flattened box, row after row.
template <class Take>
void for_each_row(const TensorBox& box, std::span<const std::int64_t> shape, std::int64_t first,
                  std::int64_t last, const Take& take) {
  const std::int64_t row = row_length(box, shape);
  for (std::int64_t at = first; at < last;) {
    const std::int64_t count = std::min(row - at % row, last - at);
    take(BoxRow{at, position_in_tensor(box, shape, at), count});
    at += count;
  }
}

}  // namespace tessera
