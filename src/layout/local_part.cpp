#include "layout/local_part.h"

#include <algorithm>
#include <set>
#include <span>

#include "tessera/error.h"

namespace tessera::layout {
namespace {

using Shape = std::vector<std::int64_t>;

bool is_sharded(const AxisPlacement& axis) { return axis.parameter.kind == PlacementKind::kShard; }

void check_pair(const AxisPlacement& axis, const std::string& what) {
  const Placement& own = axis.parameter;
  const Placement& grad = axis.gradient;
  const bool summed = own.kind == PlacementKind::kReplicate && grad.kind == PlacementKind::kPartial;
  const bool own_part = is_sharded(axis) && grad == own;
  const bool same_everywhere =
      own.kind == PlacementKind::kInvariant && grad.kind == PlacementKind::kInvariant;
  TESSERA_CHECK(summed || own_part || same_everywhere, ErrorKind::kContract, what,
                ": found the placement ", to_string(axis),
                ", expected R with gradient P (the sink sums it over the axis), S(d) with gradient "
                "S(d), or I with gradient I: any other gradient would be summed twice or not at "
                "all; change what the layer declares");
}

/// Returns the dims that count rows: all but the last.
std::span<const std::int64_t> rows_of(const Shape& shape) {
  return std::span(shape).first(shape.size() - 1);
}

std::size_t sharded_dim(const AxisPlacement& axis, std::size_t dims, const std::string& what) {
  const auto dim = static_cast<std::size_t>(axis.parameter.dim);
  TESSERA_CHECK(axis.parameter.dim >= 0 && dim < dims, ErrorKind::kContract, what,
                ": found the placement ", to_string(axis), ", expected a dim below ", dims);
  return dim;
}

void check_sections(const ParameterLayout& layout, const Shape& shape, const std::string& what) {
  if (layout.sections.empty()) return;
  TESSERA_CHECK(
      layout.sharded_shape.empty() && !shape.empty(), ErrorKind::kContract, what,
      ": found sections of a shape that is folded or has no dims, expected rows of dim 0");
  std::int64_t rows = 0;
  for (const std::int64_t section : layout.sections) rows += section;
  TESSERA_CHECK(rows == shape.front(), ErrorKind::kContract, what, ": found sections of ", rows,
                " rows in all, expected ", shape.front());
}

/// Returns the sections, before any axis cuts them; the whole where there are none.
std::vector<TensorBox> sections_of(const ParameterLayout& layout, const Shape& shape) {
  const TensorBox whole = TensorBox::whole(sharded_shape(layout, shape));
  if (layout.sections.empty()) return {whole};
  std::vector<TensorBox> boxes;
  std::int64_t begin = 0;
  for (const std::int64_t rows : layout.sections) {
    TensorBox box = whole;
    box.offset[0] = begin;
    box.size[0] = rows;
    boxes.push_back(std::move(box));
    begin += rows;
  }
  return boxes;
}

}  // namespace

const Shape& sharded_shape(const ParameterLayout& layout, const Shape& shape) {
  return layout.sharded_shape.empty() ? shape : layout.sharded_shape;
}

void validate(const ParameterLayout& layout, const Shape& shape, const std::string& what) {
  const Shape& cut = sharded_shape(layout, shape);
  TESSERA_CHECK(product(cut) == product(shape), ErrorKind::kContract, what, ": found ",
                product(cut), " elements in the shape that is cut, expected ", product(shape));
  check_sections(layout, shape, what);
  const bool has_sections = !layout.sections.empty();
  std::set<std::string> axes;
  Shape parts(cut.size(), 1);
  for (const AxisPlacement& axis : layout.axes) {
    TESSERA_CHECK(axis.size > 1, ErrorKind::kContract, what, ": found the axis ", axis.axis,
                  " of size ", axis.size, ", expected only axes of several ranks");
    TESSERA_CHECK(axes.insert(axis.axis).second, ErrorKind::kContract, what, ": found the axis ",
                  axis.axis, " twice, expected each once");
    check_pair(axis, what);
    if (!is_sharded(axis)) continue;
    const std::size_t dim = sharded_dim(axis, cut.size(), what);
    parts[dim] *= axis.size;
    const Shape whole{cut[dim]};
    for (const std::int64_t size : dim == 0 && has_sections ? layout.sections : whole) {
      TESSERA_CHECK(size % parts[dim] == 0, ErrorKind::kContract, what, ": found ", size,
                    " elements along dim ", dim, " over ", parts[dim], " ranks of ", axis.axis,
                    ", expected a multiple of the ranks; change the degree of that axis");
    }
  }
}

std::vector<TensorBox> local_boxes(const ParameterLayout& layout, const Shape& shape,
                                   const std::vector<int>& coordinates) {
  TESSERA_INVARIANT(coordinates.size() == layout.axes.size(), "a coordinate an axis");
  std::vector<TensorBox> boxes = sections_of(layout, shape);
  for (std::size_t i = 0; i < layout.axes.size(); ++i) {
    const AxisPlacement& axis = layout.axes[i];
    if (!is_sharded(axis)) continue;
    const auto dim = static_cast<std::size_t>(axis.parameter.dim);
    for (TensorBox& box : boxes) {
      box.size[dim] /= axis.size;
      box.offset[dim] += box.size[dim] * coordinates[i];
    }
  }
  return boxes;
}

Shape local_shape(const ParameterLayout& layout, const Shape& shape) {
  const auto boxes = local_boxes(layout, shape, std::vector<int>(layout.axes.size(), 0));
  const TensorBox& box = boxes.front();
  if (layout.sharded_shape.empty()) {
    Shape local = box.size;
    for (std::size_t i = 1; i < boxes.size(); ++i) local[0] += boxes[i].size[0];
    return local;
  }
  Shape local;
  std::size_t d = 0;
  for (const std::int64_t size : shape) {
    std::int64_t whole = 1;
    local.push_back(1);
    for (; whole < size && d < box.size.size(); ++d) {
      whole *= layout.sharded_shape[d];
      local.back() *= box.size[d];
    }
    TESSERA_INVARIANT(whole == size,
                      "a shape that is cut, but does not split the parameter's dims");
  }
  return local;
}

Shape global_shape(const ParameterLayout& layout, const Shape& local, const std::string& what) {
  Shape parts(sharded_shape(layout, local).size(), 1);  // ranks along each dim
  for (const AxisPlacement& axis : layout.axes) {
    if (!is_sharded(axis)) continue;
    const std::size_t dim = sharded_dim(axis, parts.size(), what);
    parts[dim] *= axis.size;
  }
  Shape whole = local;
  if (layout.sharded_shape.empty()) {
    for (std::size_t d = 0; d < whole.size(); ++d) whole[d] *= parts[d];
    return whole;
  }
  std::size_t d = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::int64_t& size = whole[i];
    std::int64_t held = 1;
    std::int64_t of = 1;
    // A dim is one or several dims of sharded_shape. Those of which this rank holds one element
    // belong to the dim before them, as long as enough dims are left for the others.
    const std::size_t end = parts.size() - std::min(parts.size(), whole.size() - i - 1);
    for (bool first = true; d < end; ++d, first = false) {
      const std::int64_t own = layout.sharded_shape[d] / parts[d];
      if (!first && held * own > size) break;
      held *= own;
      of *= layout.sharded_shape[d];
    }
    TESSERA_CHECK(held == size, ErrorKind::kContract, what, ": found a tensor of ", size,
                  " elements along a dim, expected ", held,
                  " as its layer declares the shape that is cut; change one of them");
    size = of;
  }
  return whole;
}

namespace {

/// The rows of a box in the order of the local tensor, and their places in the file. pieces() walks
/// along them.
class Walk {
 public:
  Walk(const TensorBox& box, const Shape& cut, const FileShape& file)
      : box_(box), cut_(cut), file_(file), length_(box.size.back()) {
    TESSERA_INVARIANT(!file.shape.empty() && file.shape.back() % cut.back() == 0 &&
                          file.count * product(file.shape) == product(cut),
                      "tensors of a file that are not the parameter's");
    in_row_ = file.shape.back() / cut.back();
    rows_of_tensor_ = product(rows_of(file.shape)) * in_row_;
  }

  std::int64_t length() const { return length_; }
  bool rows_are_whole() const { return length_ == cut_.back(); }

  /// Returns the number of row `index` of the local tensor among all rows of the global one.
  std::int64_t global_row(std::int64_t index) const {
    std::int64_t row = 0;
    std::int64_t stride = 1;
    for (std::size_t d = cut_.size() - 1; d-- > 0;) {
      row += (index % box_.size[d] + box_.offset[d]) * stride;
      index /= box_.size[d];
      stride *= cut_[d];
    }
    return row;
  }

  /// Returns how many rows from `index` (at most `most`) follow one another in one plane of one
  /// tensor of the file; whole rows may continue in the next plane.
  std::int64_t run(std::int64_t index, std::int64_t most) const {
    const std::int64_t first = global_row(index);
    std::int64_t room = rows_of_tensor_ - first % rows_of_tensor_;
    if (!rows_are_whole() && in_row_ > 1) return 1;
    if (!rows_are_whole() && file_.shape.size() > 1) {
      const std::int64_t plane = file_.shape[file_.shape.size() - 2];
      room = std::min(room, plane - first % plane);
    }
    std::int64_t rows = 1;
    const std::int64_t end = std::min(room, most);
    while (rows < end && global_row(index + rows) == first + rows) ++rows;
    return rows;
  }

  /// Returns `rows` rows from `index` as a piece without its ranges.
  Piece piece(std::int64_t index, std::int64_t rows) const {
    const std::int64_t first = global_row(index);
    Piece piece;
    piece.tensor = static_cast<std::size_t>(first / rows_of_tensor_);
    if (rows_are_whole()) {
      piece.box = TensorBox::whole(file_.shape);
      return piece;
    }
    const Shape& shape = file_.shape;
    piece.box.offset.assign(shape.size(), 0);
    piece.box.size.assign(shape.size(), 1);
    std::int64_t row = first % rows_of_tensor_;
    piece.box.offset.back() = row % in_row_ * cut_.back() + box_.offset.back();
    row /= in_row_;
    for (std::size_t d = shape.size() - 1; d-- > 0;) {
      piece.box.offset[d] = row % shape[d];
      row /= shape[d];
    }
    if (shape.size() > 1) piece.box.size[shape.size() - 2] = rows;
    piece.box.size.back() = length_;
    return piece;
  }

  /// Returns where row `index` of a piece of whole rows begins in its tensor.
  std::int64_t begin_in_tensor(std::int64_t index) const {
    return global_row(index) % rows_of_tensor_ * cut_.back();
  }

 private:
  const TensorBox& box_;
  const Shape& cut_;
  const FileShape& file_;
  std::int64_t length_;
  std::int64_t in_row_ = 1;  // rows of sharded_shape in one row of the file
  std::int64_t rows_of_tensor_ = 1;
};

}  // namespace

namespace {

/// Appends the pieces of one box, whose elements begin at `begin` of the flattened local tensor.
void add_pieces(const Walk& walk, const TensorBox& box, std::int64_t begin, Range range,
                std::vector<Piece>& found) {
  const std::int64_t rows = box.numel() / walk.length();
  // Starts at the beginning, so that a box has the same edges for every range.
  for (std::int64_t row = 0; row < rows && begin + row * walk.length() < range.end;) {
    const std::int64_t run = walk.run(row, rows - row);
    const Range all{begin + row * walk.length(), begin + (row + run) * walk.length()};
    const Range local = intersect(all, range);
    if (!local.empty()) {
      Piece piece = walk.piece(row, run);
      const std::int64_t first = walk.rows_are_whole() ? walk.begin_in_tensor(row) : 0;
      piece.local = local;
      piece.in_box = {first + local.begin - all.begin, first + local.end - all.begin};
      found.push_back(std::move(piece));
    }
    row += run;
  }
}

}  // namespace

std::vector<Piece> pieces(const ParameterLayout& layout, const Shape& shape, const FileShape& file,
                          const std::vector<int>& coordinates, Range range) {
  const Shape& cut = sharded_shape(layout, shape);
  TESSERA_INVARIANT(!cut.empty(), "a parameter without dims has no parts");
  std::vector<Piece> found;
  std::int64_t begin = 0;
  for (const TensorBox& box : local_boxes(layout, shape, coordinates)) {
    if (box.numel() > 0) add_pieces(Walk(box, cut, file), box, begin, range, found);
    begin += box.numel();
  }
  TESSERA_INVARIANT(range.begin >= 0 && range.end <= begin, "a range outside the local part");
  return found;
}

}  // namespace tessera::layout
