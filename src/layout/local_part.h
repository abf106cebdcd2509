// Local parts: the elements of a global parameter, and of the tensors of a file, that a rank's
// local tensor holds when the parameter is cut along axes of a mesh.
//
// Pure. The data axes are not part of this: they cut the flattened local tensor (bucket_plan.h).
// The local tensor is row-major in the shape that is cut. A *piece* is a range of it that is also a
// range of a box in one tensor of the file. Next: tensor_box.h, tessera/placement.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "layout/bucket_plan.h"
#include "layout/tensor_box.h"
#include "tessera/placement.h"

namespace tessera::layout {

/// Throws kContract, naming `what`, unless sharded_shape has the elements of `shape`; sections have
/// the rows of dim 0 (and there is no sharded_shape); every pair of placements is one of the three;
/// dims exist and are divisible by the ranks that cut them, as is each section; each axis is named
/// once; and no axis has fewer than two ranks.
void validate(const ParameterLayout& layout, const std::vector<std::int64_t>& shape,
              const std::string& what);

/// Returns the shape whose dims are sharded: layout.sharded_shape, else `shape`.
const std::vector<std::int64_t>& sharded_shape(const ParameterLayout& layout,
                                               const std::vector<std::int64_t>& shape);

/// Returns the shape of the tensor that each rank holds; `shape` itself where nothing is cut, so
/// that a module sees the sizes of the file. Where a cut goes through several dims of the global
/// shape (gate and up in one) the local shape is folded back: [E, 2I/n, H]. The layout must be
/// valid.
std::vector<std::int64_t> local_shape(const ParameterLayout& layout,
                                      const std::vector<std::int64_t>& shape);

/// Returns the shape of the whole parameter whose ranks hold `local` tensors. Errors: kContract,
/// naming `what`, where sharded_shape has no such parts.
std::vector<std::int64_t> global_shape(const ParameterLayout& layout,
                                       const std::vector<std::int64_t>& local,
                                       const std::string& what);

/// Returns the boxes of sharded_shape() that the rank at `coordinates` (one for each of
/// layout.axes) holds: one of each section, or one in all. The flattened local tensor is these
/// boxes, one after the other. Two axes may cut one dim: the first in `axes` makes the larger
/// parts.
std::vector<TensorBox> local_boxes(const ParameterLayout& layout,
                                   const std::vector<std::int64_t>& shape,
                                   const std::vector<int>& coordinates);

/// A parameter in a file: `count` tensors of `shape`, whose elements, one tensor after the other,
/// are the parameter's.
struct FileShape {
  std::int64_t count = 1;
  std::vector<std::int64_t> shape;
};

/// A range of the flattened local tensor, and its place in the file.
struct Piece {
  Range local;             ///< elements of the flattened local tensor
  std::size_t tensor = 0;  ///< index below FileShape::count
  TensorBox box;           ///< in FileShape::shape
  Range in_box;            ///< elements of the flattened box
  bool operator==(const Piece&) const = default;
};

/// Returns the pieces of the elements `range` of the flattened local tensor, in their order, each
/// as long as possible: a part that is whole rows of the file is one range of the whole tensor, a
/// part of each row is a box. The last dim of the file's tensors is that of the shape that is cut,
/// or several of them side by side, parts of which are a box each. Errors: kInternal where it is
/// neither, or for sizes that do not fit.
std::vector<Piece> pieces(const ParameterLayout& layout, const std::vector<std::int64_t>& shape,
                          const FileShape& file, const std::vector<int>& coordinates, Range range);

}  // namespace tessera::layout
