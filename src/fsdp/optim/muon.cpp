// Muon: matrices by orthogonalized momentum, the other parameters by AdamW.
//
// A step does the following for all matrices together: it updates the momentum on each shard, sends
// each matrix whole to one rank by one all-to-all, orthogonalizes it there, sends the results back
// by another all-to-all, and updates each shard. All operations but elementwise ones run on whole
// matrices, so that no bit depends on the ranks. A tensor of several matrices, contiguous or
// interleaved, is sent as one; each of them is orthogonalized alone. Next: matrix_exchange.h,
// orthogonalize.h.
#include "tessera/muon.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "base/text/wildcard.h"
#include "base/threads/parallel.h"
#include "base/trace.h"
#include "comm/group.h"
#include "comm/queue.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/matrix_exchange.h"
#include "fsdp/optim/optimizer_registry.h"
#include "fsdp/optim/orthogonalize.h"
#include "fsdp/runtime/model_names.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/resolve_steps.h"
#include "grad/torch_dtype.h"
#include "tessera/mesh.h"
#include "tessera/world.h"

namespace tessera {
namespace {

constexpr std::int64_t kGrain = std::int64_t{1} << 15;

AdamWOptions adamw_of(const MuonOptions& options) {
  return {options.lr,           options.beta1,    options.beta2, options.eps,
          options.weight_decay, options.no_decay, options.rules};
}

at::ScalarType wide(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// Interpolates between two values as at::lerp does, from the nearer end.
template <class T>
T between(T from, T to, T weight) {
  return weight < T{0.5} ? from + weight * (to - from) : to - (to - from) * (1 - weight);
}

/// Updates the momentum buffer of a shard's elements, and writes what is orthogonalized to
/// `direction`. T is the type of buffer and gradient; W is float where T has 16 bits, else T.
template <class T, class W>
void add_momentum(const at::Tensor& buffer, const at::Tensor& gradient, const at::Tensor& direction,
                  double momentum, bool nesterov) {
  T* held = buffer.mutable_data_ptr<T>();
  const T* added = gradient.const_data_ptr<T>();
  W* out = direction.mutable_data_ptr<W>();
  const auto keeps = static_cast<W>(momentum);
  const auto takes = static_cast<W>(1 - momentum);
  base::for_ranges(buffer.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto grad = static_cast<W>(added[i]);
      held[i] = static_cast<T>(between(static_cast<W>(held[i]), grad, takes));
      const auto after = static_cast<W>(held[i]);
      out[i] = nesterov ? static_cast<W>(static_cast<T>(between(grad, after, keeps))) : after;
    }
  });
}

/// Sets values to values x kept - lr x result, rounded twice as in torch.
template <class T, class W>
void step_values(const at::Tensor& values, const at::Tensor& result, double kept, double lr) {
  T* stepped = values.mutable_data_ptr<T>();
  const W* by = result.const_data_ptr<W>();
  const auto factor = static_cast<W>(kept);
  const auto rate = static_cast<W>(lr);
  base::for_ranges(values.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      stepped[i] = static_cast<T>(static_cast<W>(stepped[i]) * factor);
      stepped[i] = static_cast<T>(static_cast<W>(stepped[i]) - rate * by[i]);
    }
  });
}

/// Calls act.template operator()<T, W>() for the type of a tensor's elements.
template <class Act>
void with_types(at::ScalarType dtype, const Act& act) {
  switch (dtype) {
    case at::kDouble:
      return act.template operator()<double, double>();
    case at::kBFloat16:
      return act.template operator()<at::BFloat16, float>();
    case at::kHalf:
      return act.template operator()<at::Half, float>();
    default:
      return act.template operator()<float, float>();
  }
}

/// Returns the part of the matrix that is in the box.
at::Tensor part_of(const at::Tensor& matrix, const TensorBox& box) {
  return matrix.narrow(0, box.offset[0], box.size[0]).narrow(1, box.offset[1], box.size[1]);
}

/// Returns the `index`-th of the matrices that `matrix` consists of.
at::Tensor part_of(const at::Tensor& matrix, const layout::FusedMatrices& fused, int index) {
  if (fused.order == layout::FusedMatrices::Order::kInTurn) {
    return matrix.slice(fused.dim, index, std::nullopt, fused.count);
  }
  const auto size = matrix.size(fused.dim) / fused.count;
  return matrix.narrow(fused.dim, index * size, size);
}

/// Orthogonalizes each of the matrices that `matrix` consists of alone.
at::Tensor each_orthogonalized(const at::Tensor& matrix, const layout::FusedMatrices& fused,
                               const fsdp::NewtonSchulz& how) {
  if (fused.count == 1) return fsdp::orthogonalized(matrix, how);
  auto result = at::empty_like(matrix);
  for (int i = 0; i < fused.count; ++i) {
    const auto part = part_of(matrix, fused, i).contiguous();
    part_of(result, fused, i).copy_(fsdp::orthogonalized(part, how));
  }
  return result;
}

/// The flattened boxes of one matrix, each made at its first use.
class Boxes {
 public:
  template <class Make>
  const at::Tensor& of(const TensorBox& box, const Make& make) {
    const auto found = std::find_if(boxes_.begin(), boxes_.end(),
                                    [&](const auto& each) { return each.first == box; });
    if (found != boxes_.end()) return found->second;
    boxes_.emplace_back(box, make());
    return boxes_.back().second;
  }
  const std::vector<std::pair<TensorBox, at::Tensor>>& all() const { return boxes_; }

 private:
  std::vector<std::pair<TensorBox, at::Tensor>> boxes_;
};

class Muon : public fsdp::AdamW {
 public:
  /// `by_adamw`: names of the contracts that options.adamw matches.
  Muon(const ShardedBase& model, const MuonOptions& options, fsdp::MatrixForms forms,
       std::set<std::string> by_adamw)
      : AdamW(model, adamw_of(options), options.adamw_lr_scale),
        options_(options),
        forms_(std::move(forms)),
        by_adamw_(std::move(by_adamw)) {}

  std::string name() const override {
    return std::string(fsdp::name_of(fsdp::OptimizerName::kMuon));
  }
  std::vector<KeptTensor> states() const override {
    return {{"momentum_buffer"}, {"exp_avg"}, {"exp_avg_sq"}};
  }
  std::vector<KeptTensor> states_of(const GradContract& contract) const override {
    if (matrices_of(contract)) return {{"momentum_buffer"}};
    return AdamW::states();
  }

 protected:
  void update(const std::vector<Item*>& items) override {
    std::vector<Item*> matrices, others;
    for (auto* item : items) {
      (matrices_of(*item->view.contract) ? matrices : others).push_back(item);
    }
    AdamW::update(others);
    if (!matrices.empty()) update_matrices(matrices);  // the same ones on every rank
  }

 private:
  using AllToAllPlan = fsdp::AllToAllPlan;
  /// The exchange of the matrices that were last updated together.
  struct Known {
    std::vector<const GradContract*> contracts;
    std::uint64_t layout = 0;
    int rank = 0;
    std::vector<fsdp::MatrixForm> forms;
    fsdp::MatrixExchange exchange;
    AllToAllPlan to_owners, to_holders;
  };

  std::optional<fsdp::MatrixForm> matrices_of(const GradContract& contract) const;
  const Known& known_for(const std::vector<Item*>& items);
  std::vector<std::vector<fsdp::HeldElements>> held_by_ranks(const std::vector<Item*>& items) const;
  at::Tensor exchanged(const at::Tensor& out, const AllToAllPlan& plan);
  at::Tensor direction_of(const Item& item) const;
  void update_matrices(const std::vector<Item*>& items);
  at::Tensor results_of(const Known& known, const at::Tensor& arrived) const;
  void step_item(Item& item, const at::Tensor& result, const fsdp::MatrixForm& form);
  double adjusted(double lr, const fsdp::MatrixForm& form) const;

  MuonOptions options_;
  fsdp::MatrixForms forms_;  // empty: matrices are chosen by the number of dims
  std::set<std::string> by_adamw_;
  std::optional<Known> known_;
  std::shared_ptr<comm::Group> group_;  // null: one rank, or not yet
};

std::optional<fsdp::MatrixForm> Muon::matrices_of(const GradContract& contract) const {
  if (!forms_.empty()) {
    const auto found = forms_.find(contract.name);
    return found == forms_.end() ? std::nullopt : std::optional(found->second);
  }
  const auto& shape = contract.shape;
  if (by_adamw_.contains(contract.name) || contract.numel() == 0) return std::nullopt;
  if (shape.size() == 2) return fsdp::MatrixForm{{1, shape}};
  if (shape.size() == 3) return fsdp::MatrixForm{{shape[0], {shape[1], shape[2]}}};
  return std::nullopt;
}

/// Returns the elements that every rank of a stage holds, from the mesh and the buckets' plans.
std::vector<std::vector<fsdp::HeldElements>> Muon::held_by_ranks(
    const std::vector<Item*>& items) const {
  const fsdp::Runtime& runtime = inside_->runtime();
  std::map<const GradContract*, const fsdp::Parameter*> parameters;
  for (const fsdp::Unit* unit : runtime.units()) {
    for (const auto& parameter : unit->parameters())
      parameters[&parameter->contract] = parameter.get();
  }
  const MeshShapes& shapes = runtime.mesh().shapes();
  std::vector<std::vector<fsdp::HeldElements>> held;
  for (const int rank : shapes.stage_of(runtime.world().rank())) {
    auto& of_rank = held.emplace_back();
    for (const auto* item : items) {
      const fsdp::Parameter& parameter = *parameters.at(item->view.contract);
      const layout::BucketPlan& bucket = parameter.unit->bucket_of(parameter).plan();
      const auto& axes = bucket.key.reductions.shard_axes;
      const auto sharers = shapes.ranks_of(rank, {axes.begin(), axes.end()});
      const auto place = std::ranges::find(sharers, rank) - sharers.begin();
      of_rank.push_back({shapes.coordinates(rank, parameter.contract.layout),
                         bucket.owned(parameter.placed(), static_cast<int>(place))});
    }
  }
  return held;
}

const Muon::Known& Muon::known_for(const std::vector<Item*>& items) {
  std::vector<const GradContract*> contracts;
  for (const auto* item : items) contracts.push_back(item->view.contract);
  if (known_ && known_->contracts == contracts && known_->layout == inside_->runtime().layout()) {
    return *known_;
  }
  Known known;
  known.layout = inside_->runtime().layout();
  std::vector<fsdp::MatrixParameter> parameters;
  for (const auto* contract : contracts) {
    known.forms.push_back(matrices_of(*contract).value());
    parameters.push_back(fsdp::matrix_parameter(*contract, known.forms.back()));
  }
  known.contracts = std::move(contracts);
  auto* control = inside_->runtime().data_group();
  known.rank = control == nullptr ? 0 : control->rank();
  known.exchange = fsdp::plan_exchange(parameters, held_by_ranks(items));
  known.to_owners = fsdp::to_owners(known.exchange, known.rank);
  known.to_holders = fsdp::to_holders(known.exchange, known.rank);
  if (control != nullptr && group_ == nullptr) {
    World& world = inside_->runtime().world();
    const auto& shapes = inside_->runtime().mesh().shapes();
    group_ = world.group(shapes.stage_of(world.rank()), "optimizer");
    TESSERA_INVARIANT(group_->size() == control->size() && group_->rank() == known.rank,
                      "the ranks that share matrices are not those of a stage");
  }
  known_ = std::move(known);
  return *known_;
}

at::Tensor Muon::exchanged(const at::Tensor& out, const AllToAllPlan& plan) {
  if (group_ == nullptr) return out;
  const auto numel = std::accumulate(plan.receives.begin(), plan.receives.end(), std::int64_t{0});
  auto in = at::empty({numel}, out.options());
  comm::Batch batch;
  batch.label.kind = comm::Kind::kAllToAll;
  batch.label.unit = "optimizer";
  batch.ops = {comm::AllToAll{out, plan.sends, in, plan.receives}};
  inside_->runtime().queue().submit(*group_, std::move(batch)).wait();
  return in;
}

at::Tensor Muon::direction_of(const Item& item) const {
  const auto& buffer = item.state.front();
  const auto gradient = item.view.shard.grad().to(buffer.scalar_type());
  const auto options = buffer.options().dtype(wide(buffer.scalar_type()));
  if (!buffer.is_cpu()) {
    buffer.lerp_(gradient, 1 - options_.momentum);
    if (options_.nesterov) return gradient.lerp(buffer, options_.momentum).to(options);
    return buffer.to(options, /*non_blocking=*/false, /*copy=*/true);  // results replace it
  }
  auto direction = at::empty(buffer.sizes(), options);
  with_types(buffer.scalar_type(), [&]<class T, class W>() {
    add_momentum<T, W>(buffer, gradient, direction, options_.momentum, options_.nesterov);
  });
  return direction;
}

void Muon::update_matrices(const std::vector<Item*>& items) {
  const TraceScope traced(TraceRow::kOptimizer, "update of matrices");
  const Known& known = known_for(items);
  std::vector<at::Tensor> flat;
  for (const auto* item : items) flat.push_back(direction_of(*item));
  const auto& exchange = known.exchange;
  const auto of_piece = [&](std::size_t piece) -> at::Tensor {
    const auto& of = exchange.pieces[piece];
    const auto parameter = exchange.matrices[of.matrix].parameter;
    return flat[parameter].narrow(0, of.local.begin, of.local.size());
  };
  const auto numel =
      std::accumulate(known.to_owners.sends.begin(), known.to_owners.sends.end(), std::int64_t{0});
  auto out = at::empty({numel}, flat.front().options().dtype(to_scalar_type(exchange.dtype)));
  for (const auto& [piece, place] : known.to_owners.out) {
    out.narrow(0, place, exchange.pieces[piece].in_box.size()).copy_(of_piece(piece));
  }
  // Only one buffer exists at a time: each is as large as this rank's matrices in fp32.
  auto arrived = exchanged(out, known.to_owners);
  out.reset();
  auto formed = results_of(known, arrived);
  arrived.reset();
  const auto results = exchanged(formed, known.to_holders);
  formed.reset();
  for (const auto& [piece, place] : known.to_holders.in) {
    of_piece(piece).copy_(results.narrow(0, place, exchange.pieces[piece].in_box.size()));
  }
  for (std::size_t i = 0; i < items.size(); ++i) step_item(*items[i], flat[i], known.forms[i]);
}

/// Returns the results to send, in the order of to_holders. They are formed matrix by matrix.
at::Tensor Muon::results_of(const Known& known, const at::Tensor& arrived) const {
  const auto& exchange = known.exchange;
  const fsdp::NewtonSchulz how{
      options_.ns_coefficients, options_.ns_steps, options_.ns_eps,
      options_.ns_dtype == IterationDType::kBFloat16 ? at::kBFloat16 : at::kFloat};
  const auto by_matrix = [&](const std::vector<AllToAllPlan::Chunk>& chunks) {
    std::vector<std::vector<AllToAllPlan::Chunk>> of(exchange.matrices.size());
    for (const auto& chunk : chunks) of[exchange.pieces[chunk.piece].matrix].push_back(chunk);
    return of;
  };
  const auto arrivals = by_matrix(known.to_owners.in);
  const auto returns = by_matrix(known.to_holders.out);
  const auto& sends = known.to_holders.sends;
  auto results =
      at::empty({std::accumulate(sends.begin(), sends.end(), std::int64_t{0})}, arrived.options());
  for (std::size_t i = 0; i < exchange.matrices.size(); ++i) {
    if (exchange.matrices[i].owner != known.rank) continue;
    const auto& form = known.forms[exchange.matrices[i].parameter];
    auto matrix = at::empty(form.shape, arrived.options());
    Boxes found;
    for (const auto& [piece, place] : arrivals[i]) {
      const auto& of = exchange.pieces[piece];
      const auto& box =
          found.of(of.box, [&] { return at::empty({of.box.numel()}, arrived.options()); });
      box.narrow(0, of.in_box.begin, of.in_box.size())
          .copy_(arrived.narrow(0, place, of.in_box.size()));
    }
    for (const auto& [box, values] : found.all()) {
      part_of(matrix, box).copy_(values.view(box.size));
    }
    matrix = each_orthogonalized(matrix, form.fused, how);
    Boxes made;
    for (const auto& [piece, place] : returns[i]) {
      const auto& of = exchange.pieces[piece];
      const auto& box = made.of(of.box, [&] { return part_of(matrix, of.box).reshape(-1); });
      results.narrow(0, place, of.in_box.size())
          .copy_(box.narrow(0, of.in_box.begin, of.in_box.size()));
    }
  }
  return results;
}

double Muon::adjusted(double lr, const fsdp::MatrixForm& form) const {
  const auto shape = form.fused.shape_of_each(form.shape);
  const auto rows = static_cast<double>(shape[0]);
  const auto columns = static_cast<double>(shape[1]);
  if (options_.adjust_lr_fn == AdjustLr::kOriginal) {
    return lr * std::sqrt(std::max(1.0, rows / columns));
  }
  return lr * 0.2 * std::sqrt(std::max(rows, columns));
}

void Muon::step_item(Item& item, const at::Tensor& result, const fsdp::MatrixForm& form) {
  const auto rates = inside_->rates_of(item, options_.weight_decay);
  const double kept = 1 - rates.lr * rates.weight_decay;
  const double lr = adjusted(rates.lr, form);
  master().step(item.view, item.master, inside_->was_changed(item), [&](const fsdp::Stepped& part) {
    const auto by = result.narrow(0, part.elements.begin, part.elements.size());
    if (!part.values.is_cpu()) {
      part.values.mul_(kept).add_(by.to(part.values.scalar_type()), -lr);
      return;
    }
    with_types(part.values.scalar_type(),
               [&]<class T, class W>() { step_values<T, W>(part.values, by, kept, lr); });
  });
}

void check_options(const MuonOptions& options) {
  fsdp::check_option("momentum", options.momentum, 1);
  fsdp::check_option("ns_eps", options.ns_eps);
  fsdp::check_option("adamw_lr_scale", options.adamw_lr_scale);
  TESSERA_CHECK(options.ns_steps >= 1 && options.ns_steps < 100, ErrorKind::kUsage,
                "optimizer: found ns_steps ", options.ns_steps, ", expected 1 to 99");
  for (const double each : options.ns_coefficients) {
    TESSERA_CHECK(std::isfinite(each), ErrorKind::kUsage, "optimizer: found the coefficient ", each,
                  ", expected three finite numbers");
  }
}

}  // namespace

std::unique_ptr<Optimizer> make_muon(const ShardedBase& model, const MuonOptions& options) {
  check_options(options);
  const fsdp::ModelNames names(model);
  const auto shards = model.shards();
  std::set<std::string> by_adamw;
  for (const auto& pattern : options.adamw) {
    bool any = false;
    for (const auto& view : shards) {
      if (!grad::matches(pattern, names.named(*view.contract))) continue;
      any = true;
      by_adamw.insert(view.contract->name);
    }
    TESSERA_CHECK(any, ErrorKind::kContract, unmatched("MuonOptions::adamw", in_quotes(pattern)),
                  "; correct it or take it out");
  }
  return std::make_unique<Muon>(model, options, fsdp::MatrixForms(), std::move(by_adamw));
}

std::unique_ptr<Optimizer> fsdp::build_muon(const ShardedBase& model, double lr,
                                            const Hyperparameters& values,
                                            const MatrixForms& matrices) {
  MuonOptions options;
  options.lr = lr;
  options.momentum = values.momentum.value();
  options.nesterov = values.nesterov;
  options.weight_decay = values.weight_decay.value();
  options.ns_coefficients = values.ns_coefficients;
  options.ns_steps = values.ns_steps;
  options.ns_eps = values.ns_eps;
  options.ns_dtype = values.ns_dtype;
  options.adjust_lr_fn = values.adjust_lr_fn;
  options.adamw_lr_scale = values.adamw_lr_scale;
  options.beta1 = values.betas[0];
  options.beta2 = values.betas[1];
  options.eps = values.eps;
  options.rules = values.rule;
  check_options(options);
  return std::make_unique<Muon>(model, options, matrices, std::set<std::string>());
}

}  // namespace tessera
