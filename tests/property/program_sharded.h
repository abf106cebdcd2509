// One rank's sharded model of a Program, and what an operation does to it.
#pragma once

#include "comm/group.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "property/program_twin.h"
#include "support/plain.h"
#include "tessera/clip.h"
#include "tessera/optim.h"
#include "tessera/trainable.h"

namespace tessera::test {

class ProgramSharded {
 public:
  ProgramSharded(const Program& program, World& world)
      : program_(program),
        world_(world),
        dtype_(program.doubles ? at::kDouble : at::kFloat),
        tensors_(std::make_shared<ProgramTensors>(program, dtype_)),
        module_(std::make_shared<ProgramModule>(tensors_)),
        handle_(shard()),
        inner_(module_->handles()) {
    make_optimizer();
  }

  const Sharded<ProgramModule>& handle() const { return handle_; }
  const ProgramResults& results() const { return results_; }

  /// The parameters whose gradients are stored on the shards.
  std::set<std::size_t> shown() const {
    std::set<std::size_t> all;
    for (const auto& view : handle_.shards()) {
      const auto& name = view.contract->name;
      if (view.shard.grad().defined()) all.insert(std::stoul(name.substr(name.rfind('p') + 1)));
    }
    return all;
  }

  std::vector<at::Tensor> forward(const Op& op) {
    tensors_->call = call_of(op, world_.rank());
    at::Tensor leaf;
    const auto x = input_of(op, results_, world_.rank(), dtype_, leaf);
    const auto unit = unit_of(op);
    auto outputs =
        unit == 0 ? handle_.forward(x) : std::vector<at::Tensor>{inner_[unit]->forward(x)};
    if (op.act == Act::kForward) results_[op.result] = {leaf, outputs};
    return outputs;
  }
  std::vector<at::Tensor> evaluate(const Op& op) {
    const at::NoGradGuard no_grad;
    return forward(op);
  }
  at::Tensor gradient_of_input(const Op& op) {
    tensors_->call = {};
    at::Tensor leaf;
    const auto x = input_of(op, results_, world_.rank(), dtype_, leaf);
    return torch::autograd::grad({program_loss(handle_.forward(x))}, {leaf}).at(0);
  }

  /// Runs an operation without results that are compared at once.
  void run(const Op& op) {
    switch (op.act) {
      case Act::kBackward:
        torch::autograd::backward({program_loss(terms_of(op, results_, world_.rank()))}, {},
                                  op.retain);
        return;
      case Act::kForget:
        results_.erase(op.result);
        return;
      case Act::kScaleResult:
        results_.at(op.result).outputs[0].mul_(0.5);
        return;
      case Act::kZeroGrad:
        return handle_.zero_grad(op.on);
      case Act::kHalveGradients:
        for (const auto& view : handle_.shards()) {
          if (view.shard.grad().defined()) view.shard.mutable_grad().mul_(0.5);
        }
        return;
      case Act::kStep:
        optimizer_ ? optimizer_->step() : void(torch_optimizer_->step());
        return;
      case Act::kSetTrainable:
        return set_trainable(op);
      case Act::kThrowInForward:
      case Act::kThrowInBackward:
        return throw_somewhere(op);
      case Act::kChangeArgument:
        return backward(program_loss(forward(op)));
      case Act::kChangeHeldResult: {
        auto outputs = forward(op);
        outputs[0].mul_(2.0);
        return backward(program_loss(outputs));
      }
      default:
        return control(op);
    }
  }
  void forget_results() {
    results_.clear();
    module_->kept = at::Tensor();
  }

 private:
  Sharded<ProgramModule> shard() {
    const auto mesh = data_mesh(world_, program_.replicas, program_.context());
    PrecisionPolicy policy;
    if (program_.policy == ProgramPolicy::kNarrowCompute) policy.param_dtype = DType::kBFloat16;
    if (program_.policy == ProgramPolicy::kNarrowWire) policy.reduce_dtype = DType::kBFloat16;
    std::vector<ShardOptions> options(program_.nodes.size());
    for (std::size_t i = 0; i < options.size(); ++i)
      options[i].reshard_after_forward = program_.reshard_after_forward[i];
    options[0].in_flight_bytes = program_.in_flight_bytes;
    options[0].merge_below_bytes = program_.merge_below_bytes;
    module_->shard_below(mesh, policy, options);
    return fully_shard(module_, mesh, policy, options[0]);
  }
  void make_optimizer() {
    switch (program_.optimizer) {
      case ProgramOptimizer::kSgd:
        optimizer_ = make_sgd(handle_, sgd(kProgramLr, kProgramMomentum, kProgramDecay));
        return;
      case ProgramOptimizer::kAdamW:
        optimizer_ = make_adamw(handle_, adamw(kProgramLr, kProgramDecay));
        return;
      default:
        torch_optimizer_ = torch_optimizer(program_, handle_.parameters());
    }
  }
  std::size_t unit_of(const Op& op) const {
    return static_cast<std::size_t>(op.unit) % inner_.size();
  }
  ShardedBase& base_of(int unit) {
    const auto i = static_cast<std::size_t>(unit) % inner_.size();
    return i == 0 ? static_cast<ShardedBase&>(handle_) : *inner_[i];
  }
  std::vector<ShardedBase*> bases_of(const std::vector<int>& units) {
    std::vector<ShardedBase*> all;
    for (const int unit : units) all.push_back(&base_of(unit));
    return all;
  }

  void control(const Op& op) {
    auto& base = base_of(op.unit);
    switch (op.act) {
      case Act::kSync:
        return base.set_requires_gradient_sync(op.on, op.recurse);
      case Act::kReplicaReduce:
        return handle_.set_requires_replica_reduce(op.on);
      case Act::kLastBackward:
        return handle_.set_is_last_backward(op.on);
      case Act::kDefer:
        return handle_.set_defer_weight_gradients(op.on);
      case Act::kRedeem:
        return redeem(op);
      case Act::kRunWeights:
        return handle_.run_weight_gradients();
      case Act::kReshardAfterForward:
        return base.set_reshard_after_forward(op.on, op.recurse);
      case Act::kReshardAfterBackward:
        return base.set_reshard_after_backward(op.on, op.recurse);
      case Act::kUnshardInBackward:
        return base.set_unshard_in_backward(op.on);
      case Act::kForwardPrefetch:
        return base.set_forward_prefetch(bases_of(op.units));
      case Act::kBackwardPrefetch:
        return base.set_backward_prefetch(bases_of(op.units));
      case Act::kDivideFactor:
        return handle_.set_gradient_divide_factor(op.factor);
      case Act::kUnshard:
        return base.unshard();
      case Act::kUnshardAsync: {
        auto pending = base.unshard_async();
        if (op.on) pending.wait();
        return;
      }
      case Act::kReshard:
        return base.reshard();
      default:
        throw std::logic_error("an act without a meaning");
    }
  }
  /// Hands in what one backward has left; a later run_weight_gradients() finds the rest.
  void redeem(const Op& op) {
    auto* store = handle_.unit()->runtime().sink().store();
    const bool here = op.rank < 0 || op.rank == world_.rank();
    if (store != nullptr && here) store->run({-1, op.result});
  }
  void set_trainable(const Op& op) {
    std::vector<Optimizer*> follow;
    if (optimizer_) follow.push_back(optimizer_.get());
    tessera::set_trainable(handle_, {{{concat("p", op.parameter)}, op.on}}, follow);
    if (torch_optimizer_) make_optimizer();
  }
  void throw_somewhere(const Op& op) {
    const bool here = op.rank < 0 || op.rank == world_.rank();
    tensors_->call = call_of(op, world_.rank());
    auto x = seeded(op.seed, {2, kWidth}).to(dtype_).requires_grad_(true) * 1.0;
    if (op.act == Act::kThrowInBackward && here) {
      x.register_hook([](const at::Tensor&) -> at::Tensor {
        throw std::runtime_error("the user's backward went wrong");
      });
    }
    const auto outputs = handle_.forward(x);
    backward(program_loss(outputs));
    // A rank that had nothing left to wait for learns of it at its next collective.
    if (world_.size() > 1) comm::barrier(world_.control(), "end of the step");
  }

  const Program& program_;
  World& world_;
  at::ScalarType dtype_;
  std::shared_ptr<ProgramTensors> tensors_;
  std::shared_ptr<ProgramModule> module_;
  Sharded<ProgramModule> handle_;
  std::vector<std::shared_ptr<Sharded<ProgramCell>>> inner_;  // by unit; null for the model
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<torch::optim::Optimizer> torch_optimizer_;
  ProgramResults results_;
};

}  // namespace tessera::test
