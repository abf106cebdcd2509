#include "tessera/data_axes.h"

#include <algorithm>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {

DataAxes::DataAxes(ReductionPlan data) : dense(std::move(data)) {}

DataAxes::DataAxes(const MeshShapes& shapes, std::optional<double> divide_factor) : mesh(shapes) {
  const auto ranks = [&](std::string_view name) { return mesh.size_of(name); };
  for (const auto name : {axis::kShard, axis::kContext}) {
    if (ranks(name) > 1) dense.shard_axes.emplace_back(name);
  }
  if (ranks(axis::kReplicate) > 1) dense.replica_axes.emplace_back(axis::kReplicate);
  dense.divide_factor = divide_factor.value_or(
      static_cast<double>(ranks(axis::kShard) * ranks(axis::kContext) * ranks(axis::kReplicate)));
}

namespace {

/// Returns the axes on which a layer has to declare a placement.
std::vector<std::string_view> model_axes(MeshKind kind) {
  if (kind == MeshKind::kDense) return {axis::kTensor};
  return {axis::kExpert, axis::kExpertTensor};
}

/// "tp_kv/2" is a part of "tp".
bool is_part_of(std::string_view name, std::string_view axis) {
  return name == axis || (name.starts_with(axis) && name.substr(axis.size()).starts_with("_"));
}

void check_axis(const AxisPlacement& one, MeshKind kind, const MeshShape& shape,
                const std::string& what) {
  const auto axes = model_axes(kind);
  const bool known =
      std::any_of(axes.begin(), axes.end(), [&](auto axis) { return is_part_of(one.axis, axis); });
  TESSERA_CHECK(known && shape.has(one.axis) && shape.size_of(one.axis) == one.size,
                ErrorKind::kContract, what, ": found the placement ", to_string(one),
                ", expected one on ", kind == MeshKind::kDense ? "tp" : "ep or etp",
                " as the mesh has it, ", to_string(shape),
                "; change what the layer declares, or the mesh");
}

/// Only the layer knows whether its gradient is whole on the ranks of such an axis.
void check_all_declared(const ParameterLayout& layout, const MeshShape& shape,
                        const std::string& what) {
  for (const std::string_view name : model_axes(layout.mesh)) {
    int declared = 1;
    for (const AxisPlacement& one : layout.axes) {
      if (is_part_of(one.axis, name)) declared *= one.size;
    }
    TESSERA_CHECK(declared == shape.size_of(name), ErrorKind::kContract, what, ": found ",
                  declared == 1 ? "no placement" : concat("a placement over ", declared, " ranks"),
                  " on the axis ", name, " of ", shape.size_of(name),
                  " ranks, expected the layer to declare one (DeclaresLayouts, or "
                  "ShardOptions::layouts): R with gradient P where each rank makes a part of the "
                  "gradient, S(d) where each holds a part of the parameter, I where all make the "
                  "same");
  }
}

/// Over any other axis the gradient would not be summed: each rank of it would train a separate
/// model.
void check_known_axes(MeshKind kind, const MeshShape& shape, const std::string& what) {
  const bool dense = kind == MeshKind::kDense;
  const std::vector<std::string_view> known =
      dense ? std::vector{axis::kPipeline, axis::kReplicate, axis::kShard, axis::kContext,
                          axis::kTensor}
            : std::vector{axis::kPipeline, axis::kReplicate, axis::kExpertData, axis::kExpert,
                          axis::kExpertTensor};
  for (const MeshAxis& one : shape.axes()) {
    TESSERA_CHECK(one.size == 1 || std::find(known.begin(), known.end(), one.name) != known.end(),
                  ErrorKind::kContract, what, ": found the axis ", one.name, " of ", one.size,
                  " ranks in the mesh ", to_string(shape), ", expected one of ", joined(known),
                  "; name axes as MeshShape::dense and MeshShape::sparse do, and give the sparse "
                  "reading of a mesh in addition to its dense one");
  }
}

void check_distinct(const MeshShape& shape, const std::vector<std::string_view>& names,
                    const std::string& what) {
  try {
    if (!names.empty()) (void)shape.group_of(0, names);
  } catch (const Error& error) {
    throw Error(ErrorKind::kContract, concat(what, ": ", error.what()));
  }
}

}  // namespace

ReductionPlan reductions_of(const ParameterLayout& layout, const DataAxes& data,
                            const std::string& what) {
  const MeshShape& shape = data.mesh.of(layout.mesh);
  std::vector<std::string_view> names;
  for (const AxisPlacement& one : layout.axes) {
    check_axis(one, layout.mesh, shape, what);
    names.push_back(one.axis);
  }
  check_known_axes(layout.mesh, shape, what);
  check_all_declared(layout, shape, what);
  check_distinct(shape, names, what);
  ReductionPlan plan = data.dense;
  if (layout.mesh == MeshKind::kSparse) {
    plan.shard_axes.clear();
    if (shape.size_of(axis::kExpertData) > 1) plan.shard_axes.emplace_back(axis::kExpertData);
  }
  for (const AxisPlacement& one : layout.axes) {
    if (one.gradient.kind == PlacementKind::kPartial) plan.shard_axes.push_back(one.axis);
  }
  return plan;
}

}  // namespace tessera
