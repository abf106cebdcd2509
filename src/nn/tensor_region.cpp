#include "nn/tensor_region.h"

#include <string>
#include <utility>

#include "parallel/transitions.h"
#include "tessera/error.h"
#include "tessera/mesh.h"

namespace tessera::nn {
namespace {

constexpr int kPositions = 1;  // the dim of [B, T, H]

}  // namespace

TensorRegion::TensorRegion(parallel::Axis axis, Stream stream)
    : axis_(std::move(axis)), stream_(stream) {}

at::Tensor TensorRegion::enter(const at::Tensor& x) const {
  if (size() == 1) return x;
  return stream_ == Stream::kShards
             ? parallel::all_gather(x, axis_, {kPositions}, parallel::To::kReplicate, "enter")
             : parallel::copy(x, axis_, "enter");
}

at::Tensor TensorRegion::leave(const at::Tensor& addend) const {
  if (size() == 1) return addend;
  return stream_ == Stream::kShards
             ? parallel::reduce_scatter(addend, axis_, {kPositions}, "leave")
             : parallel::all_reduce(addend, axis_, parallel::To::kInvariant, "leave");
}

at::Tensor TensorRegion::into_stream(const at::Tensor& x) const {
  if (size() == 1 || stream_ == Stream::kWhole) return x;
  return parallel::slice(x, axis_, {kPositions}, parallel::From::kInvariant, "into the stream");
}

ParameterLayout TensorRegion::one(Placement parameter, Placement gradient) const {
  ParameterLayout layout;
  if (size() > 1) {
    layout.axes.push_back({std::string(axis::kTensor), size(), parameter, gradient});
  }
  return layout;
}

ParameterLayout TensorRegion::column(int dim) const {
  return one({PlacementKind::kShard, dim}, {PlacementKind::kShard, dim});
}

ParameterLayout TensorRegion::row() const { return column(1); }

ParameterLayout TensorRegion::inside() const {
  return one({PlacementKind::kReplicate}, {PlacementKind::kPartial});
}

ParameterLayout TensorRegion::everywhere() const {
  return one({PlacementKind::kInvariant}, {PlacementKind::kInvariant});
}

ParameterLayout TensorRegion::on_stream() const {
  return stream_ == Stream::kShards ? inside() : everywhere();
}

ParameterLayout TensorRegion::heads(std::int64_t heads) const {
  if (heads % size() == 0) return column();
  if (heads == 1) return inside();
  const int groups = static_cast<int>(heads);
  const int copies = size() / groups;
  ParameterLayout layout;
  layout.axes.push_back(
      {concat("tp_kv/", groups), groups, {PlacementKind::kShard, 0}, {PlacementKind::kShard, 0}});
  layout.axes.push_back(
      {concat("tp_rep/", copies), copies, {PlacementKind::kReplicate}, {PlacementKind::kPartial}});
  return layout;
}

std::int64_t heads_of_rank(std::int64_t heads, int ranks) {
  return heads % ranks == 0 ? heads / ranks : 1;
}

}  // namespace tessera::nn
