#include "moe/routing.h"

#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>

#include "tessera/dtype_watch.h"
#include "tessera/error.h"

namespace tessera::moe {
namespace {

at::Tensor ascending(const at::Tensor& indices) { return std::get<0>(at::sort(indices, 1)); }

void check_imposed(const at::Tensor& indices, std::int64_t tokens, std::int64_t experts_per_token) {
  TESSERA_CHECK(indices.dim() == 2 && indices.size(0) == tokens &&
                    indices.size(1) == experts_per_token && indices.scalar_type() == at::kLong,
                ErrorKind::kFormat, "imposed routing: found ", indices.scalar_type(), " ",
                indices.sizes(), ", expected int64 [", tokens, ", ", experts_per_token, "]");
}

/// `indices` ascending.
void check_experts(const at::Tensor& indices, std::int64_t experts) {
  if (indices.numel() == 0) return;
  const std::int64_t least = indices.min().item<std::int64_t>();
  const std::int64_t most = indices.max().item<std::int64_t>();
  TESSERA_CHECK(least >= 0 && most < experts, ErrorKind::kFormat, "imposed routing: found expert ",
                least < 0 ? least : most, ", expected 0 to ", experts - 1);
  const std::int64_t k = indices.size(1);
  const at::Tensor twice = indices.narrow(1, 1, k - 1).eq(indices.narrow(1, 0, k - 1));
  TESSERA_CHECK(!twice.any().item<bool>(), ErrorKind::kFormat,
                "imposed routing: found an expert twice for one token, expected ", k,
                " different ones");
}

}  // namespace

Routing route(const at::Tensor& scores, std::int64_t experts_per_token,
              const std::optional<at::Tensor>& imposed) {
  Routing routing;
  const WideScope probabilities;
  const at::ScalarType inside = at::promote_types(scores.scalar_type(), at::kFloat);
  routing.probabilities = at::softmax(scores.to(inside), 1);
  if (imposed) {
    check_imposed(*imposed, scores.size(0), experts_per_token);
    routing.indices = ascending(*imposed);
    check_experts(routing.indices, scores.size(1));
  } else {
    const auto best = at::topk(routing.probabilities.detach(), experts_per_token, 1);
    routing.indices = ascending(std::get<1>(best));
  }
  const at::Tensor chosen = routing.probabilities.gather(1, routing.indices);
  routing.weights = chosen / chosen.sum(1, /*keepdim=*/true);
  return routing;
}

}  // namespace tessera::moe
