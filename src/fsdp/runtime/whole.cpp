#include "fsdp/runtime/whole.h"

#include <ATen/ATen.h>

#include "fsdp/runtime/runtime.h"
#include "layout/local_part.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// The elements of `whole` that lie in the box, as a view.
at::Tensor narrow_to(at::Tensor whole, const TensorBox& box) {
  for (std::size_t d = 0; d < box.size.size(); ++d) {
    whole = whole.narrow(static_cast<std::int64_t>(d), box.offset[d], box.size[d]);
  }
  return whole;
}

}  // namespace

at::Tensor whole_of(Runtime& runtime, const Unit& unit, const Bucket& bucket,
                    const at::Tensor& slice, const char* what) {
  auto* group = bucket.groups().gather;
  if (group == nullptr) return slice;
  auto flat = at::empty({bucket.plan().numel}, slice.options());
  const auto own = bucket.plan().slice(bucket.rank());
  flat.narrow(0, own.begin, own.size()).copy_(slice);
  comm::Batch batch;
  batch.label = {comm::Kind::kAllGather, concat(unit.shown_name(), " (", what, ")"), unit.id(), 0,
                 runtime.model_name()};
  batch.ops.emplace_back(comm::AllGather{flat});
  runtime.queue().submit(*group, std::move(batch)).wait();
  return flat;
}

at::Tensor whole_of(Runtime& runtime, const Parameter& parameter, const at::Tensor& local) {
  const auto& [layout, shape] = std::tie(parameter.contract.layout, parameter.contract.shape);
  std::vector<std::string_view> cut;
  for (const auto& axis : layout.axes) {
    if (axis.parameter.kind == PlacementKind::kShard) cut.push_back(axis.axis);
  }
  if (cut.empty() || local.numel() == 0) return local.view(shape);
  const auto& shapes = runtime.mesh().shapes();
  const auto members = shapes.of(layout.mesh).group_of(runtime.world().rank(), cut);
  const auto group = runtime.world().group(members, "whole");
  const auto count = local.numel();
  const auto parts = at::empty({group->size() * count}, local.options());
  parts.narrow(0, group->rank() * count, count).copy_(local);
  comm::Batch batch;
  batch.label = {comm::Kind::kAllGather, parameter.contract.name + " (its parts)",
                 parameter.unit->id(), 0, runtime.model_name()};
  batch.ops.emplace_back(comm::AllGather{parts});
  runtime.queue().submit(*group, std::move(batch)).wait();
  const auto whole = at::empty(layout::sharded_shape(layout, shape), local.options());
  std::int64_t begin = 0;
  for (const int member : members) {
    for (const auto& box : layout::local_boxes(layout, shape, shapes.coordinates(member, layout))) {
      narrow_to(whole, box).copy_(parts.narrow(0, begin, box.numel()).view(box.size));
      begin += box.numel();
    }
  }
  return whole.view(shape);
}

bool has_values(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() && tensor.layout() == at::kStrided;
}

at::Tensor local_part(const at::Tensor& whole, const ParameterLayout& layout,
                      const std::vector<std::int64_t>& shape, const std::vector<int>& coordinates) {
  const auto cut = whole.reshape(layout::sharded_shape(layout, shape));
  std::vector<at::Tensor> parts;
  for (const auto& box : layout::local_boxes(layout, shape, coordinates)) {
    parts.push_back(narrow_to(cut, box).reshape(-1));
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

}  // namespace tessera::fsdp
