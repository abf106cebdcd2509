// Local parts: which elements of a global parameter, and of the tensors of a file, a rank's local
// tensor holds when the parameter is cut along axes of a mesh.
//
// Pure. The data axes are not known here: they cut the flattened local tensor (bucket_plan.h). The
// local tensor is row-major in the shape that is cut; a *piece* is a stretch of it that lies in one
// tensor of the file as a range of a box. Next: tensor_box.h, tessera/placement.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "layout/bucket_plan.h"
#include "layout/tensor_box.h"
#include "tessera/placement.h"

namespace tessera::layout {

/// Throws kContract, naming `what`, unless sharded_shape has the elements of `shape`, sections have
/// the rows of dim 0 (and there is no sharded_shape), every pair of placements is one of the three,
/// dims exist and divide by the ranks that cut them, as each section does, each axis stands once,
/// and no axis has fewer than two ranks.
void validate(const ParameterLayout& layout, const std::vector<std::int64_t>& shape,
              const std::string& what);

/// The shape whose dims are sharded: layout.sharded_shape, else `shape`.
const std::vector<std::int64_t>& sharded_shape(const ParameterLayout& layout,
                                               const std::vector<std::int64_t>& shape);

/// Of the tensor that each rank holds; `shape` itself where nothing is cut, so that a module sees
/// the sizes of the file. Where a cut goes through several dims of the global shape (gate and up in
/// one) the local shape is folded back: [E, 2I/n, H]. The layout is valid.
std::vector<std::int64_t> local_shape(const ParameterLayout& layout,
                                      const std::vector<std::int64_t>& shape);

/// The other way round: of the whole parameter whose ranks hold `local` tensors. Errors: kContract,
/// naming `what`, where sharded_shape has no such parts.
std::vector<std::int64_t> global_shape(const ParameterLayout& layout,
                                       const std::vector<std::int64_t>& local,
                                       const std::string& what);

/// The parts of sharded_shape() that the rank at `coordinates` (one per layout.axes) holds, one of
/// each section or one in all: the flattened local tensor is theirs, one after the other. Two axes
/// may cut one dim: the first in `axes` makes the larger parts.
std::vector<TensorBox> local_boxes(const ParameterLayout& layout,
                                   const std::vector<std::int64_t>& shape,
                                   const std::vector<int>& coordinates);

/// How the file holds a parameter: `count` tensors of `shape` whose elements, one tensor after the
/// other, are the parameter's.
struct FileShape {
  std::int64_t count = 1;
  std::vector<std::int64_t> shape;
};

/// A stretch of the flattened local tensor, and where it lies in the file.
struct Piece {
  Range local;             ///< elements of the flattened local tensor
  std::size_t tensor = 0;  ///< of FileShape::count
  TensorBox box;           ///< in FileShape::shape
  Range in_box;            ///< elements of the flattened box
  bool operator==(const Piece&) const = default;
};

/// The pieces of the elements `range` of the flattened local tensor, in their order, as long as
/// they can be: a part that is whole rows of the file is one range of the whole tensor, one that is
/// a part of each row is a box. The last dim of the file's tensors is that of the shape that is
/// cut, or several of them side by side, parts of which are a box each. Errors: kInternal where it is
/// neither, or for sizes that do not fit.
std::vector<Piece> pieces(const ParameterLayout& layout, const std::vector<std::int64_t>& shape,
                          const FileShape& file, const std::vector<int>& coordinates, Range range);

}  // namespace tessera::layout
