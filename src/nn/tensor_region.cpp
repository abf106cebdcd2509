#include "nn/tensor_region.h"

#include <utility>

#include "parallel/transitions.h"
#include "tessera/error.h"
#include "tessera/mesh.h"

namespace tessera::nn {
namespace {

constexpr int kPositions = 1;  // the dim of [B, T, H]

/// One rank declares nothing.
ParameterLayout layout_of(AxisPlacement placement) {
  ParameterLayout layout;
  if (placement.size > 1) layout.axes.push_back(std::move(placement));
  return layout;
}

}  // namespace

TensorRegion::TensorRegion(parallel::Axis axis, SequenceParallel sequence)
    : axis_(std::move(axis)), sequence_(sequence) {}

at::Tensor TensorRegion::enter(const at::Tensor& x) const {
  if (size() == 1) return x;
  return sequence_ == SequenceParallel::kYes
             ? parallel::all_gather(x, axis_, {kPositions}, parallel::To::kReplicate, "enter")
             : parallel::copy(x, axis_, "enter");
}

at::Tensor TensorRegion::leave(const at::Tensor& addend) const {
  if (size() == 1) return addend;
  return sequence_ == SequenceParallel::kYes
             ? parallel::reduce_scatter(addend, axis_, {kPositions}, "leave")
             : parallel::all_reduce(addend, axis_, parallel::To::kInvariant, "leave");
}

at::Tensor TensorRegion::into_stream(const at::Tensor& x) const {
  if (size() == 1 || sequence_ == SequenceParallel::kNo) return x;
  return parallel::slice(x, axis_, {kPositions}, parallel::From::kInvariant, "into the stream");
}

ParameterLayout TensorRegion::column(int dim) const {
  return layout_of(AxisPlacement::shard(axis::kTensor, size(), dim));
}

ParameterLayout TensorRegion::sections(std::vector<std::int64_t> rows) const {
  ParameterLayout layout = column();
  if (size() > 1) layout.sections = std::move(rows);
  return layout;
}

ParameterLayout TensorRegion::row() const { return column(1); }

ParameterLayout TensorRegion::inside() const {
  return layout_of(AxisPlacement::partial(axis::kTensor, size()));
}

ParameterLayout TensorRegion::everywhere() const {
  return layout_of(AxisPlacement::invariant(axis::kTensor, size()));
}

ParameterLayout TensorRegion::on_stream() const {
  return sequence_ == SequenceParallel::kYes ? inside() : everywhere();
}

ParameterLayout TensorRegion::heads(std::int64_t heads) const {
  if (size() == 1) return {};
  const HeadAxes axes = tensor_axis_of_heads(size(), static_cast<int>(heads));
  ParameterLayout layout = layout_of(AxisPlacement::shard(axes.heads.name, axes.heads.size, 0));
  if (axes.copies.size > 1) {
    layout.axes.push_back(AxisPlacement::partial(axes.copies.name, axes.copies.size));
  }
  return layout;
}

std::int64_t heads_of_rank(std::int64_t heads, int ranks) {
  return heads % ranks == 0 ? heads / ranks : 1;
}

}  // namespace tessera::nn
