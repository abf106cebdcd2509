#include "support/plain.h"

namespace tessera::test {

PrecisionPolicy without_master() {
  PrecisionPolicy policy;
  policy.optimizer.master = MasterRequest::kNone;
  return policy;
}

PrecisionPolicy in_bfloat16() {
  PrecisionPolicy policy;
  policy.param_dtype = DType::kBFloat16;
  return policy;
}

ShardOptions undivided() {
  ShardOptions options;
  options.divide_factor = 1.0;
  return options;
}

std::vector<std::string> errors_of(int count, const std::function<void(World&)>& body,
                                   ThreadBackend backend) {
  std::vector<std::string> errors(static_cast<std::size_t>(count));
  ranks(count, backend).run([&](World& world) {
    errors[static_cast<std::size_t>(world.rank())] = thrown_by([&] { body(world); });
  });
  return errors;
}

Tensors whole_gradients(const ShardedBase& handle) {
  Tensors all;
  handle.visit_full_gradients(
      [&](const auto& name, const at::Tensor& g) { all[name] = g.clone(); });
  return all;
}

Tensors whole_parameters(const ShardedBase& handle) {
  Tensors all;
  handle.visit_full_parameters(
      [&](const auto& name, const at::Tensor& p) { all[name] = p.clone(); });
  return all;
}

void expect_same(const Tensors& found, const Tensors& expected, const std::string& what) {
  EXPECT_EQ(found.size(), expected.size()) << what;
  for (const auto& [name, value] : expected) {
    const auto it = found.find(name);
    if (it == found.end()) {
      ADD_FAILURE() << what << " lacks " << name;
    } else {
      EXPECT_TRUE(same_bits(it->second, value)) << what << " " << name;
    }
  }
}

Tensors raw_gradients(torch::nn::Module& module, const std::function<void()>& forward_backward) {
  for (auto& p : module.parameters()) p.mutable_grad().reset();
  forward_backward();
  Tensors raw;
  for (const auto& entry : module.named_parameters()) {
    if (entry.value().grad().defined()) raw[entry.key()] = entry.value().grad().clone();
  }
  return raw;
}

Tensors plain_gradients(torch::nn::Module& module, int ranks, double divide,
                        const std::function<void(int rank)>& forward_backward, int replicas) {
  const auto add = [](Tensors& sums, const Tensors& addends) {
    for (const auto& [name, raw] : addends) {
      auto& sum = sums[name];
      sum = sum.defined() ? sum + raw.to(at::kFloat) : raw.to(at::kFloat);
    }
  };
  Tensors sums;
  const int shards = ranks / replicas;
  for (int first = 0; first < ranks; first += shards) {
    Tensors of_replica;
    for (int rank = first; rank < first + shards; ++rank) {
      add(of_replica, raw_gradients(module, [&] { forward_backward(rank); }));
    }
    add(sums, of_replica);
  }
  Tensors result;
  for (const auto& entry : module.named_parameters()) {
    if (!entry.value().requires_grad()) continue;
    const auto found = sums.find(entry.key());
    const auto dtype = entry.value().scalar_type();
    result[entry.key()] =
        found == sums.end() ? at::zeros_like(entry.value()) : over(found->second, divide).to(dtype);
  }
  return result;
}

SgdOptions sgd(double lr, double momentum, double weight_decay) {
  SgdOptions options;
  options.lr = lr;
  options.momentum = momentum;
  options.weight_decay = weight_decay;
  return options;
}

AdamWOptions adamw(double lr, double weight_decay) {
  AdamWOptions options;
  options.lr = lr;
  options.weight_decay = weight_decay;
  return options;
}

at::Tensor Block::forward(const at::Tensor& x) {
  ++calls;
  if (before) before();
  if (!recomputes) return body(x);
  return checkpoint([this](const auto& inputs) { return body(inputs[0]); }, {x});
}

at::Tensor Block::body(const at::Tensor& x) const {
  auto y = at::linear(at::relu(at::linear(x.to(a.scalar_type()), a)), b);
  if (dropout > 0) y = at::dropout(y, dropout, /*train=*/true);
  return x + y.to(x.scalar_type()) * 0.5;
}

void Chain::shard_blocks(const Mesh& mesh, const PrecisionPolicy& policy,
                         const ShardOptions& options) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    handles.push_back(
        std::make_shared<Sharded<Block>>(fully_shard(blocks[i], mesh, policy, options)));
    replace_module(concat("block", i), handles.back());
  }
}

at::Tensor Chain::forward(const at::Tensor& x) {
  auto y = x * scale;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (skip == static_cast<int>(i)) continue;
    if (recomputes_outside) {
      y = checkpoint([this, i](const auto& inputs) { return call(i, inputs[0]); }, {y});
    } else {
      y = call(i, y);
    }
  }
  return y;
}

}  // namespace tessera::test
