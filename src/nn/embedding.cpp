#include "nn/embedding.h"

#include <ATen/ops/_unique.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "base/first_derivative.h"
#include "grad/leaf.h"
#include "grad/region.h"
#include "kernels/kernels.h"
#include "tessera/error.h"

namespace tessera::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kNoPadding = -1;

/// The weight itself is not kept: of a plain one that would forbid to change it before backward.
struct LeafOfWeight : torch::CustomClassHolder {
  explicit LeafOfWeight(std::shared_ptr<grad::Leaf> of) : leaf(std::move(of)) {}
  const std::shared_ptr<grad::Leaf> leaf;
};

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& ids, const at::Tensor& weight,
                            std::int64_t padding) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({ids});
    ctx->saved_data["rows"] = weight.size(0);
    ctx->saved_data["padding"] = padding;
    if (auto leaf = grad::find_leaf(weight);
        leaf && weight.requires_grad() && forms_rows(ids, weight)) {
      ctx->saved_data["leaf"] =
          c10::IValue::make_capsule(c10::make_intrusive<LeafOfWeight>(std::move(leaf)));
      grad::refuse_recording("sizes that follow from data: which rows of a weight have a gradient");
    }
    return kernels::embedding(ids, weight, padding);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(3);  // [Note: left-out results]
    const at::Tensor ids = ctx->get_saved_variables()[0];
    const auto padding = ctx->saved_data["padding"].toInt();
    if (const auto found = ctx->saved_data.find("leaf"); found != ctx->saved_data.end()) {
      const auto held = c10::static_intrusive_pointer_cast<LeafOfWeight>(found->second.toCapsule());
      if (held->leaf->sink != nullptr) {
        hand_in_rows(grads[0], ids, padding, *held->leaf);
        return variable_list(3);
      }
    }
    return {at::Tensor(),
            kernels::embedding_backward(grads[0], ids, ctx->saved_data["rows"].toInt(), padding),
            at::Tensor()};
  }

  /// Where most rows get nothing.
  static bool forms_rows(const at::Tensor& ids, const at::Tensor& weight) {
    return ids.is_cpu() && 2 * ids.numel() < weight.size(0);
  }

  /// Forms only the rows of the batch's tokens of a sharded module's parameter, and adds them to
  /// its slot: in a large vocabulary nearly all others are zeros, in every micro-batch. The bits
  /// are the same: each row is summed as kernels::embedding_backward sums it.
  static void hand_in_rows(const at::Tensor& grad, const at::Tensor& ids, std::int64_t padding,
                           const grad::Leaf& leaf) {
    const auto [rows, places] = at::_unique(ids, /*sorted=*/true, /*return_inverse=*/true);
    std::int64_t skipped = kNoPadding;
    if (padding != kNoPadding) {
      const at::Tensor found = rows.eq(padding).nonzero();
      if (found.numel() != 0) skipped = found.item<std::int64_t>();
    }
    leaf.sink->accept_rows(leaf.slot, rows,
                           kernels::embedding_backward(grad, places, rows.size(0), skipped),
                           grad::Source::kEager);
  }
};

}  // namespace

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<std::int64_t> padding) {
  const std::int64_t row = padding.value_or(kNoPadding);
  const at::Tensor numbers = ids.to(at::kLong);  // kernels read no other integers
  return base::has_second_derivatives(weight) ? kernels::embedding(numbers, weight, row)
                                              : EmbeddingFunction::apply(numbers, weight, row);
}

at::Tensor vocab_parallel_embedding(const at::Tensor& ids, const at::Tensor& weight,
                                    const parallel::Axis& axis,
                                    std::optional<std::int64_t> padding) {
  if (axis.alone()) return nn::embedding(ids, weight, padding);
  const std::int64_t rows = weight.size(0);
  check_range(ids, rows * axis.size, std::nullopt, "embedding: found the token ");
  // Only own tokens are looked up, and only their gradients added.
  const at::Tensor number = ids.reshape({-1}) - axis.rank * rows;
  const at::Tensor is_own = number.ge(0).logical_and(number.lt(rows));
  std::optional<std::int64_t> own_padding;
  if (padding && *padding / rows == axis.rank) own_padding = *padding % rows;
  std::vector<std::int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  if (!ids.is_cpu()) {
    // How many are own only the device knows: the others look up row 0, and give it zeros.
    const at::Tensor is_other = is_own.logical_not();
    return nn::embedding(number.masked_fill(is_other, 0), weight, own_padding)
        .masked_fill(is_other.unsqueeze(1), 0)
        .view(shape);
  }
  const at::Tensor places = is_own.nonzero().squeeze(1);
  const at::Tensor own = nn::embedding(number.index_select(0, places), weight, own_padding);
  return at::zeros({number.numel(), weight.size(1)}, own.options())
      .index_copy_(0, places, own)
      .view(shape);
}

at::Tensor scaled_by_root(const at::Tensor& embedded) {
  const auto size = static_cast<double>(embedded.size(-1));
  return embedded * at::scalar_tensor(std::sqrt(size), embedded.scalar_type()).item<double>();
}

void check_range(const at::Tensor& tokens, std::int64_t vocabulary,
                 std::optional<std::int64_t> ignored, const char* what) {
  if (!tokens.is_cpu()) return;
  at::Tensor bad = tokens.lt(0).logical_or(tokens.ge(vocabulary));
  if (ignored) bad = bad.logical_and(tokens.ne(*ignored));
  if (!bad.any().item<bool>()) return;
  throw Error(ErrorKind::kFormat,
              concat(what, tokens.masked_select(bad)[0].item<std::int64_t>(), ", expected 0 to ",
                     vocabulary - 1, ignored ? concat(" or ", *ignored) : ""));
}

Embedding::Embedding(std::int64_t vocabulary, std::int64_t size,
                     std::optional<std::int64_t> padding, const TensorRegion& region)
    : region_(region), padding_(padding) {
  weight = add_parameter("weight", {vocabulary, size},
                         {.layout = region.column(), .decay = DecayClass::kEmbedding});
}

at::Tensor Embedding::forward(const at::Tensor& ids) {
  return region_.leave(vocab_parallel_embedding(ids, weight, region_.axis(), padding_));
}

}  // namespace tessera::nn
