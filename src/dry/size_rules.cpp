#include "dry/size_rules.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>

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

/// Results of the first argument's sizes and dtype.
void like_first(c10::Stack& stack) { give(stack, {meta_like(stack[0].toTensor())}); }
/// The last argument is the result, and becomes like the first.
void out_like_first(c10::Stack& stack) {
  const at::Tensor out = stack.back().toTensor();
  out.unsafeGetTensorImpl()->set_sizes_contiguous(stack[0].toTensor().sizes());
  give(stack, {out});
}
/// The last argument is the result, and becomes as large as both others together.
void out_of_both(c10::Stack& stack) {
  const at::Tensor out = stack.back().toTensor();
  out.unsafeGetTensorImpl()->set_sizes_contiguous(
      at::infer_size(stack[0].toTensor().sizes(), stack[1].toTensor().sizes()));
  give(stack, {out});
}
/// One element of the first argument's dtype.
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

struct Row {
  std::string_view name, overload;
  SizeRule rule;
};

constexpr std::array kRules{
    Row{"aten::index_select", "", index_select},
    Row{"aten::where", "self", where},
    Row{"aten::copy_", "", like_first},
    Row{"aten::flip", "", like_first},
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
