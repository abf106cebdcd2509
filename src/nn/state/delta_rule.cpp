#include "nn/state/delta_rule.h"

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

at::Tensor recurrent(const DeltaInputs& in, const Documents& documents, at::Tensor& state) {
  const WideScope all;
  const at::ScalarType wide = at::promote_types(in.v.scalar_type(), at::kFloat);
  const std::int64_t each = in.v.size(2) / in.q.size(2);
  const auto unit = [&](const at::Tensor& x) {
    const at::Tensor w = x.to(wide);
    return (w * ((w * w).sum(-1, true) + 1e-6).rsqrt()).repeat_interleave(each, 2);
  };
  const at::Tensor q = unit(in.q) / std::sqrt(static_cast<double>(in.q.size(3))), k = unit(in.k);
  const at::Tensor v = in.v.to(wide);
  at::Tensor s = state.defined()
                     ? state
                     : at::zeros({v.size(0), v.size(2), q.size(3), v.size(3)}, v.options());
  std::vector<at::Tensor> out;
  for (std::int64_t t = 0; t < v.size(1); ++t) {
    at::Tensor factor = in.decay.select(1, t).exp();
    if (documents.are_packed()) factor = factor * (documents.starts.select(1, t) != t).unsqueeze(1);
    s = s * factor.unsqueeze(-1).unsqueeze(-1);
    const at::Tensor key = k.select(1, t).unsqueeze(-1);
    const at::Tensor known = (s * key).sum(-2);
    const at::Tensor delta = (v.select(1, t) - known) * in.beta.select(1, t).unsqueeze(-1);
    s = s + key * delta.unsqueeze(-2);
    out.push_back((s * q.select(1, t).unsqueeze(-1)).sum(-2));
  }
  state = s;
  return at::stack(out, 1).to(in.v.scalar_type());
}

}  // namespace

at::Tensor gated_delta_rule(const DeltaInputs& in, const Documents& documents) {
  at::Tensor state;
  return recurrent(in, documents, state);
}

at::Tensor gated_delta_rule_after(const DeltaInputs& in, at::Tensor& state) {
  return recurrent(in, {}, state);
}

}  // namespace tessera::nn
