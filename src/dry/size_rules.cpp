#include "dry/size_rules.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::dry {
namespace {

at::Tensor meta(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_meta(sizes, dtype);
}
at::Tensor meta_like(const at::Tensor& tensor) {
  return meta(tensor.sizes(), tensor.scalar_type());
}

void give(c10::Stack& stack, std::vector<c10::IValue> results) {
  stack.assign(std::make_move_iterator(results.begin()), std::make_move_iterator(results.end()));
}

void index_select(c10::Stack& stack) {
  const at::Tensor self = stack[0].toTensor();
  std::vector<std::int64_t> sizes = self.sizes().vec();
  sizes[static_cast<std::size_t>(c10::maybe_wrap_dim(stack[1].toInt(), self.dim()))] =
      stack[2].toTensor().numel();
  give(stack, {meta(sizes, self.scalar_type())});
}

/// The result has the first argument's sizes and dtype.
void like_first(c10::Stack& stack) { give(stack, {meta_like(stack[0].toTensor())}); }
void bool_like_first(c10::Stack& stack) {
  give(stack, {meta(stack[0].toTensor().sizes(), at::kBool)});
}
/// The last argument is the result; it gets the first argument's sizes.
void out_like_first(c10::Stack& stack) {
  const at::Tensor out = stack.back().toTensor();
  out.unsafeGetTensorImpl()->set_sizes_contiguous(stack[0].toTensor().sizes());
  give(stack, {out});
}
/// The last argument is the result; it gets the sizes of the other two, broadcast.
void out_of_both(c10::Stack& stack) {
  const at::Tensor out = stack.back().toTensor();
  out.unsafeGetTensorImpl()->set_sizes_contiguous(
      at::infer_size(stack[0].toTensor().sizes(), stack[1].toTensor().sizes()));
  give(stack, {out});
}
/// The result is one element of the first argument's dtype.
void one_element(c10::Stack& stack) { give(stack, {meta({}, stack[0].toTensor().scalar_type())}); }

void where(c10::Stack& stack) {
  const at::Tensor condition = stack[0].toTensor(), a = stack[1].toTensor(),
                   b = stack[2].toTensor();
  const auto sizes = at::infer_size(at::infer_size(condition.sizes(), a.sizes()), b.sizes());
  give(stack, {meta(sizes, at::result_type(a, b))});
}

void broadcast_both(c10::Stack& stack) {
  const at::Tensor a = stack[0].toTensor(), b = stack[1].toTensor();
  give(stack, {meta(at::infer_size(a.sizes(), b.sizes()), at::result_type(a, b))});
}

void searchsorted(c10::Stack& stack) {
  give(stack, {meta(stack[1].toTensor().sizes(), stack[2].toBool() ? at::kInt : at::kLong)});
}

void native_layer_norm(c10::Stack& stack) {
  const at::Tensor x = stack[0].toTensor();
  const auto normed = stack[1].toIntVector().size();
  auto rows = x.sizes().slice(0, static_cast<std::size_t>(x.dim()) - normed).vec();
  rows.resize(static_cast<std::size_t>(x.dim()), 1);
  give(stack, {meta_like(x), meta(rows, x.scalar_type()), meta(rows, x.scalar_type())});
}

void native_layer_norm_backward(c10::Stack& stack) {
  const at::Tensor x = stack[1].toTensor();
  const auto mask = stack[7].toBoolList();
  const auto like = [&](const c10::IValue& of) {
    return of.isTensor() && of.toTensor().defined() ? meta_like(of.toTensor()) : at::Tensor();
  };
  std::vector<c10::IValue> results{mask[0] ? meta_like(x) : at::Tensor(),
                                   mask[1] ? like(stack[5]) : at::Tensor(),
                                   mask[2] ? like(stack[6]) : at::Tensor()};
  give(stack, std::move(results));
}

void embedding_dense_backward(c10::Stack& stack) {
  const at::Tensor grad = stack[0].toTensor();
  give(stack, {meta({stack[2].toInt(), grad.size(-1)}, grad.scalar_type())});
}

// GPUs have one kernel for each of these.

void fused_rms_norm(c10::Stack& stack) {
  const at::Tensor x = stack[0].toTensor();
  auto rows = x.sizes().vec();
  rows.back() = 1;
  give(stack,
       {meta_like(x), meta(rows, x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)});
}

void fused_rms_norm_backward(c10::Stack& stack) {
  const at::Tensor x = stack[1].toTensor();
  const auto mask = stack[5].toBoolList();
  const bool of_weight = mask[1] && stack[4].isTensor() && stack[4].toTensor().defined();
  give(stack, {mask[0] ? meta_like(x) : at::Tensor(),
               of_weight ? meta_like(stack[4].toTensor()) : at::Tensor()});
}

/// The results of products by groups: of rows or columns of one argument that `offs` cuts, or of
/// whole matrices of both. Rows of the result begin at multiples of 16 bytes.
void grouped_mm(c10::Stack& stack) {
  const at::Tensor a = stack[0].toTensor(), b = stack[1].toTensor();
  const at::ScalarType dtype = stack[4].isInt() ? stack[4].toScalarType() : a.scalar_type();
  std::vector<std::int64_t> sizes{a.size(-2), b.size(-1)};
  if (a.dim() == 3 && b.dim() == 3) sizes.insert(sizes.begin(), a.size(0));
  if (a.dim() == 2 && b.dim() == 2) sizes.insert(sizes.begin(), stack[2].toTensor().numel());
  const auto piece = static_cast<std::int64_t>(16 / c10::elementSize(dtype));
  const std::int64_t width = (sizes.back() + piece - 1) / piece * piece;
  std::vector<std::int64_t> strides{width, 1};
  if (sizes.size() == 3) strides.insert(strides.begin(), width * sizes[1]);
  give(stack, {at::detail::empty_strided_meta(sizes, strides, dtype)});
}

/// The results are one in the order of the queries' memory, a sum of each row, seed and offset.
void flash_attention(c10::Stack& stack) {
  const at::Tensor q = stack[0].toTensor(), k = stack[1].toTensor();
  const at::Tensor none;
  give(stack,
       {at::empty_like(q), meta(q.sizes().slice(0, 3), at::kFloat), none, none, q.size(2),
        k.size(2), meta({2}, at::kUInt64), meta({0}, at::kUInt64), meta({0}, q.scalar_type())});
}

void flash_attention_backward(c10::Stack& stack) {
  give(stack, {at::empty_like(stack[1].toTensor()), at::empty_like(stack[2].toTensor()),
               at::empty_like(stack[3].toTensor())});
}

/// The results are a sum of rows of the first argument for each bag, and the tensors of its
/// backward.
void embedding_bag(c10::Stack& stack) {
  const at::Tensor rows = stack[0].toTensor(), indices = stack[1].toTensor(),
                   offsets = stack[2].toTensor();
  const std::int64_t bags = offsets.numel() - (stack[7].toBool() ? 1 : 0);
  give(stack, {meta({bags, rows.size(1)}, rows.scalar_type()), meta_like(indices),
               meta_like(offsets), meta({0}, indices.scalar_type())});
}

struct Row {
  std::string_view name, overload;
  SizeRule rule;
};

constexpr std::array kRules{
    Row{"aten::index_select", "", index_select},
    Row{"aten::where", "self", where},
    Row{"aten::copy_", "", like_first},
    Row{"aten::flip", "", like_first},
    Row{"aten::isnan", "", bool_like_first},
    Row{"aten::roll", "", like_first},
    Row{"aten::abs", "out", out_like_first},
    Row{"aten::logical_and", "out", out_of_both},
    Row{"aten::masked_fill_", "Scalar", like_first},
    Row{"aten::masked_fill_", "Tensor", like_first},
    Row{"aten::floor_divide", "", broadcast_both},
    Row{"aten::max", "", one_element},
    Row{"aten::min", "", one_element},
    Row{"aten::searchsorted", "Tensor", searchsorted},
    Row{"aten::native_layer_norm", "", native_layer_norm},
    Row{"aten::native_layer_norm_backward", "", native_layer_norm_backward},
    Row{"aten::embedding_dense_backward", "", embedding_dense_backward},
    Row{"aten::_embedding_bag_forward_only", "", embedding_bag},
    Row{"aten::_fused_rms_norm", "", fused_rms_norm},
    Row{"aten::_fused_rms_norm_backward", "", fused_rms_norm_backward},
    Row{"aten::_grouped_mm", "", grouped_mm},
    Row{"aten::_scaled_dot_product_flash_attention", "", flash_attention},
    Row{"aten::_scaled_dot_product_flash_attention_backward", "", flash_attention_backward},
};

}  // namespace

SizeRule size_rule(const c10::OperatorHandle& operation) {
  const auto& name = operation.operator_name();
  for (const Row& row : kRules) {
    if (row.name == name.name && row.overload == name.overload_name) return row.rule;
  }
  return nullptr;
}

}  // namespace tessera::dry
