// Layers that are cut over model axes, written by hand for tests, and the same ones whole.
//
// The stream between blocks is cut by rows over tp. Every placement of a parameter occurs: norms
// and biases (R, P), columns S(0), rows S(1), few key heads S(0) with (R, P), a gain (I, I),
// experts on the sparse mesh.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "comm/group.h"
#include "layout/local_part.h"
#include "support/plain.h"

namespace tessera::test {

inline AxisPlacement shard(const std::string& axis, int size, int dim) {
  return {axis, size, {PlacementKind::kShard, dim}, {PlacementKind::kShard, dim}};
}
inline AxisPlacement partial(const std::string& axis, int size) {
  return {axis, size, {PlacementKind::kReplicate}, {PlacementKind::kPartial}};
}
inline AxisPlacement invariant(const std::string& axis, int size) {
  return {axis, size, {PlacementKind::kInvariant}, {PlacementKind::kInvariant}};
}

/// Axes of one rank are left out.
inline ParameterLayout layout_on(MeshKind kind, const std::vector<AxisPlacement>& axes) {
  ParameterLayout layout;
  layout.mesh = kind;
  for (const auto& axis : axes) {
    if (axis.size > 1) layout.axes.push_back(axis);
  }
  return layout;
}

inline at::Tensor local_part(const at::Tensor& whole, const ParameterLayout& layout,
                             const Mesh& mesh) {
  const auto shape = whole.sizes().vec();
  std::vector<at::Tensor> parts;
  for (const auto& box : layout::local_boxes(layout, shape, mesh.coordinates(layout))) {
    auto part = whole.reshape(layout::sharded_shape(layout, shape));
    for (std::size_t d = 0; d < box.size.size(); ++d) {
      part = part.narrow(static_cast<std::int64_t>(d), box.offset[d], box.size[d]);
    }
    parts.push_back(part.reshape(-1));
  }
  return at::cat(parts).reshape(layout::local_shape(layout, shape));
}

inline at::Tensor gather_rows(comm::Group& group, const at::Tensor& x) {
  const auto own = x.contiguous();
  auto all = at::empty({group.size() * own.numel()}, own.options());
  all.narrow(0, group.rank() * own.numel(), own.numel()).copy_(own.reshape(-1));
  comm::Batch batch;
  batch.label = {comm::Kind::kAllGather, "rows", 0, 0};
  batch.ops.emplace_back(comm::AllGather{all});
  group.issue(std::move(batch))->wait();
  return all.view({group.size() * x.size(0), x.size(1)});
}

inline at::Tensor scatter_rows(comm::Group& group, const at::Tensor& x) {
  const auto all = x.contiguous();
  auto own = at::empty({all.numel() / group.size()}, all.options());
  comm::Batch batch;
  batch.label = {comm::Kind::kReduceScatter, "rows", 0, 0};
  batch.ops.emplace_back(comm::ReduceScatter{all.view({-1}), own});
  group.issue(std::move(batch))->wait();
  return own.view({x.size(0) / group.size(), x.size(1)});
}

inline comm::Group& group_in(torch::autograd::AutogradContext* ctx) {
  return *reinterpret_cast<comm::Group*>(ctx->saved_data["group"].toInt());
}
inline std::int64_t number_of(comm::Group* group) { return reinterpret_cast<std::int64_t>(group); }

/// Rows S -> R; backward sums and scatters.
struct GatherRows : torch::autograd::Function<GatherRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            std::int64_t group) {
    ctx->saved_data["group"] = group;
    return gather_rows(group_in(ctx), x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    return {scatter_rows(group_in(ctx), grads[0]), {}};
  }
};

/// Rows P -> S; backward gathers.
struct ScatterRows : torch::autograd::Function<ScatterRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            std::int64_t group) {
    ctx->saved_data["group"] = group;
    return scatter_rows(group_in(ctx), x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    return {gather_rows(group_in(ctx), grads[0]), {}};
  }
};

/// Rows S -> I; backward takes the own ones.
struct GatherForAll : torch::autograd::Function<GatherForAll> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            std::int64_t group) {
    ctx->saved_data["group"] = group;
    return gather_rows(group_in(ctx), x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    auto& group = group_in(ctx);
    const auto rows = grads[0].size(0) / group.size();
    return {grads[0].narrow(0, group.rank() * rows, rows), {}};
  }
};

/// Null where the axes have one rank.
inline comm::Group* axis_group(const Mesh& mesh, const std::vector<std::string_view>& axes,
                               const char* purpose) {
  const auto members = mesh.ranks_of(axes);
  return members.size() > 1 ? mesh.world()->group(members, purpose).get() : nullptr;
}

template <class Transition>
at::Tensor over(comm::Group* group, const at::Tensor& x) {
  return group == nullptr ? x : Transition::apply(x, number_of(group));
}

inline constexpr std::int64_t kWide = 8;      // of the stream
inline constexpr std::int64_t kInner = 12;    // of the feed-forward
inline constexpr std::int64_t kHeads = 4;     // of queries
inline constexpr std::int64_t kKeyHeads = 2;  // of keys
inline constexpr std::int64_t kExperts = 4;
inline const std::vector<std::int64_t> kSections{4, 8};  // of "fused": two matrices in one

/// The parameters of a block, whole.
inline Tensors block_values(std::uint64_t seed) {
  const auto draw = [&](at::IntArrayRef sizes) { return seeded(seed++, sizes, at::kDouble) * 0.3; };
  return {{"norm", draw({kWide}) + 1.0},
          {"w1", draw({kInner, kWide})},
          {"b1", draw({kInner})},
          {"w2", draw({kWide, kInner})},
          {"b2", draw({kWide})},
          {"q", draw({kHeads, kWide})},
          {"k", draw({kKeyHeads, kWide})},
          {"experts", draw({kExperts, kWide})},
          {"fused", draw({kSections[0] + kSections[1], kWide})}};
}

/// Returns a number a row, of the products with both matrices: rows of `products` are as `first` of
/// the one, then the other.
inline at::Tensor both_sums(const at::Tensor& products, std::int64_t first) {
  const auto parts = products.split_with_sizes({first, products.size(1) - first}, 1);
  return at::tanh(parts[0]).sum(1, true) + at::sin(parts[1]).sum(1, true);
}

/// Computes a block on rows x, given its whole parameters: the truth.
inline at::Tensor whole_block(const Tensors& p, const at::Tensor& x) {
  const auto n = x * p.at("norm");
  auto y = at::linear(at::tanh(at::linear(n, p.at("w1"), p.at("b1"))), p.at("w2"));
  const auto keys = at::linear(n, p.at("k")).repeat_interleave(kHeads / kKeyHeads, 1);
  y = y + at::matmul(keys, p.at("q")) + both_sums(at::linear(n, p.at("fused")), kSections[0]);
  // Row r goes to expert r % kExperts: the rows of a data rank are a multiple of them.
  const auto experts = p.at("experts").repeat({x.size(0) / kExperts, 1});
  return x + y + p.at("b2") + at::sin(x) * experts;
}

/// The same cut over the model axes of a mesh. Its input and output are this rank's rows.
class CutBlock : public torch::nn::Module, public DeclaresLayouts {
 public:
  CutBlock(const Mesh& mesh, std::uint64_t seed) {
    const int tp = mesh.size_of(axis::kTensor);
    const auto kv = tensor_axis_of_heads(tp, kKeyHeads);
    const auto dense = [&](const std::vector<AxisPlacement>& axes) {
      return layout_on(MeshKind::kDense, axes);
    };
    layouts = {{"norm", dense({partial("tp", tp)})},
               {"w1", dense({shard("tp", tp, 0)})},
               {"b1", dense({shard("tp", tp, 0)})},
               {"w2", dense({shard("tp", tp, 1)})},
               {"b2", dense({partial("tp", tp)})},
               {"q", dense({shard("tp", tp, 0)})},
               {"k", dense({shard(kv.heads.name, kv.heads.size, 0),
                            partial(kv.copies.name, kv.copies.size)})},
               {"experts",
                layout_on(MeshKind::kSparse, {shard("ep", mesh.size_of(axis::kExpert), 0),
                                              shard("etp", mesh.size_of(axis::kExpertTensor), 1)})},
               {"fused", dense({shard("tp", tp, 0)})}};
    if (tp > 1) layouts.at("fused").sections = kSections;
    own_first_ = kSections[0] / tp;
    for (const auto& [name, whole] : block_values(seed)) {
      own[name] = register_parameter(name, local_part(whole, layouts.at(name), mesh));
    }
    tensor_ = axis_group(mesh, {axis::kTensor}, "test tp");
    expert_ = axis_group(mesh, {axis::kExpert, axis::kExpertTensor}, "test experts");
    first_query_ = mesh.coordinate(axis::kTensor) * (kHeads / tp);
    const auto& key = layouts.at("k");
    first_key_ =
        layout::local_boxes(key, {kKeyHeads, kWide}, mesh.coordinates(key)).front().offset[0];
    const auto& experts = layouts.at("experts");
    expert_box_ =
        layout::local_boxes(experts, {kExperts, kWide}, mesh.coordinates(experts)).front();
  }

  ParameterLayout layout_of(const std::string& parameter) const override {
    return layouts.at(parameter);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto n = over<GatherRows>(tensor_, x * own["norm"]);
    auto y = at::linear(at::tanh(at::linear(n, own["w1"], own["b1"])), own["w2"]);
    for (std::int64_t i = 0; i < own["q"].size(0); ++i) {
      const auto head = (first_query_ + i) / (kHeads / kKeyHeads) - first_key_;
      y = y + at::outer(at::mv(n, own["k"][head]), own["q"][i]);
    }
    y = y + both_sums(at::linear(n, own["fused"]), own_first_);
    return x + over<ScatterRows>(tensor_, y) + own["b2"] + mixture(x);
  }

  std::map<std::string, ParameterLayout> layouts;
  Tensors own;

 private:
  /// Returns this rank's addend for the rows of all ranks that share the experts; others add
  /// theirs.
  at::Tensor mixture(const at::Tensor& x) {
    // Each data rank's rows begin at a multiple of the experts, so the place in its rows says
    // which.
    const auto all = over<GatherRows>(expert_, at::sin(x));
    const auto numbers = over<GatherRows>(expert_, numbers_of(x)).view({-1});
    const auto first = expert_box_.offset[0];
    const auto mine = numbers.ge(first).logical_and(numbers.lt(first + expert_box_.size[0]));
    const auto chosen = (numbers - first).clamp(0, static_cast<double>(expert_box_.size[0] - 1));
    const auto scales =
        own["experts"].index_select(0, chosen.to(at::kLong)) * mine.to(at::kDouble).unsqueeze(1);
    const auto columns = all.narrow(1, expert_box_.offset[1], expert_box_.size[1]) * scales;
    const auto rest = kWide - expert_box_.offset[1] - expert_box_.size[1];
    return over<ScatterRows>(expert_, at::constant_pad_nd(columns, {expert_box_.offset[1], rest}));
  }

  at::Tensor numbers_of(const at::Tensor& x) const {
    const auto first = tensor_ == nullptr ? 0 : tensor_->rank() * x.size(0);
    return here(at::arange(first, first + x.size(0), at::kDouble))
        .remainder(kExperts)
        .view({-1, 1});
  }

  comm::Group* tensor_ = nullptr;
  comm::Group* expert_ = nullptr;
  std::int64_t first_query_ = 0;
  std::int64_t first_key_ = 0;
  std::int64_t own_first_ = 0;  // rows of the first matrix of "fused"
  TensorBox expert_box_;
};

/// Two blocks, which are units, and a gain on the whole stream: the same on every rank of tp.
class CutModel : public torch::nn::Module, public DeclaresLayouts {
 public:
  static constexpr int kBlocks = 2;

  explicit CutModel(const Mesh& mesh) : tp_(mesh.size_of(axis::kTensor)) {
    gain = register_parameter("gain", gain_value());
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(
          register_module(concat("block", i), std::make_shared<CutBlock>(mesh, seed_of_block(i))));
    }
    tensor_ = axis_group(mesh, {axis::kTensor}, "test tp");
  }
  static at::Tensor gain_value() { return seeded(7, {kWide}, at::kDouble); }
  static std::uint64_t seed_of_block(int i) { return 100 + 20 * static_cast<std::uint64_t>(i); }

  ParameterLayout layout_of(const std::string&) const override {
    return layout_on(MeshKind::kDense, {invariant("tp", tp_)});
  }

  void shard_blocks(const Mesh& mesh, const PrecisionPolicy& policy, const ShardOptions& options) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      handles.push_back(
          std::make_shared<Sharded<CutBlock>>(fully_shard(blocks[i], mesh, policy, options)));
      replace_module(concat("block", i), handles.back());
    }
  }

  /// x: all rows of this data rank, the same on every rank of tp.
  at::Tensor forward(const at::Tensor& x) {
    const auto rows = x.size(0) / tp_;
    auto y = tensor_ == nullptr ? x : x.narrow(0, tensor_->rank() * rows, rows);
    for (auto& handle : handles) y = handle->forward(y);
    return over<GatherForAll>(tensor_, y) * gain;
  }

  at::Tensor gain;
  std::vector<std::shared_ptr<CutBlock>> blocks;
  std::vector<std::shared_ptr<Sharded<CutBlock>>> handles;

 private:
  int tp_;
  comm::Group* tensor_ = nullptr;
};

/// Name by name, with "block0." before those of blocks.
inline Tensors whole_values() {
  Tensors all{{"gain", CutModel::gain_value()}};
  for (int i = 0; i < CutModel::kBlocks; ++i) {
    for (const auto& [name, value] : block_values(CutModel::seed_of_block(i))) {
      all[concat("block", i, ".", name)] = value;
    }
  }
  return all;
}

inline at::Tensor whole_model(const Tensors& p, at::Tensor x) {
  for (int i = 0; i < CutModel::kBlocks; ++i) {
    Tensors block;
    const auto prefix = concat("block", i, ".");
    for (const auto& [name, value] : p) {
      if (name.starts_with(prefix)) block[name.substr(prefix.size())] = value;
    }
    x = whole_block(block, x);
  }
  return x * p.at("gain");
}

inline at::Tensor rows_of(int data_rank, int step) {
  return seeded(static_cast<std::uint64_t>(3000 + 50 * step + data_rank), {8, kWide}, at::kDouble);
}
inline at::Tensor loss_of(const at::Tensor& y) { return y.pow(2).sum(); }

/// Returns the gradients of the sum of the losses of all data ranks over steps [0, steps).
inline Tensors whole_model_gradients(const Tensors& values, int data_ranks, int steps = 1) {
  Tensors leaves;
  for (const auto& [name, value] : values) {
    leaves[name] = value.detach().clone().requires_grad_(true);
  }
  for (int rank = 0; rank < data_ranks; ++rank) {
    for (int step = 0; step < steps; ++step) {
      backward(loss_of(whole_model(leaves, rows_of(rank, step))));
    }
  }
  Tensors gradients;
  for (const auto& [name, leaf] : leaves) gradients[name] = leaf.grad();
  return gradients;
}

/// The degrees of a test.
struct Degrees {
  int replicas, shards, tp;  // the dense mesh
  int expert_data, ep, etp;  // the sparse one
  int data_ranks() const { return replicas * shards; }
  int ranks() const { return replicas * shards * tp; }
  MeshShapes shapes() const {
    return {MeshShape::dense(1, replicas, shards, 1, tp),
            MeshShape::sparse(1, replicas, expert_data, ep, etp)};
  }
};

inline void PrintTo(const Degrees& d, std::ostream* out) { *out << to_string(d.shapes()); }

/// A cut model of units on `mesh`, whose gradients are sums.
struct CutSharded {
  explicit CutSharded(const Mesh& on, const ShardOptions& options = undivided())
      : mesh(on), model(std::make_shared<CutModel>(on)) {
    model->shard_blocks(mesh, {}, options);
    handle = std::make_unique<Sharded<CutModel>>(fully_shard(model, mesh, {}, options));
  }
  int data_rank() const {
    return mesh.coordinate(axis::kReplicate) * mesh.size_of(axis::kShard) +
           mesh.coordinate(axis::kShard);
  }
  void run(int step = 0) { backward(loss_of(handle->forward(rows_of(data_rank(), step)))); }

  Mesh mesh;
  std::shared_ptr<CutModel> model;
  std::unique_ptr<Sharded<CutModel>> handle;
};

}  // namespace tessera::test
