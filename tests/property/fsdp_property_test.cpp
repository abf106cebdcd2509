// Property: a sharded module is the unsharded one, bit for bit, for random trees, dtypes, shapes,
// ties, policies, files, adapters, masters, schedules, layouts and recomputation.
//
// TESSERA_PROPERTY_SEED=N replays one case, TESSERA_PROPERTY_CASES=N runs more (default 50);
// TESSERA_PROPERTY_FROM is the first seed (default 1).
#include <ATen/Parallel.h>

#include <cmath>
#include <iostream>

#include "comm/group.h"
#include "fsdp/contracts.h"
#include "fsdp/runtime/unit.h"
#include "proof.h"
#include "property/fsdp_case_draw.h"
#include "property/fsdp_reference.h"
#include "support/plain.h"
#include "tessera/clip.h"
#include "tessera/grad_scaler.h"
#include "tessera/optim.h"
#include "tessera/recompute.h"
#include "tessera/trainable.h"

namespace tessera::test::fsdp_property_test {
namespace {

/// A node of the tree as a module.
class Node : public torch::nn::Module {
 public:
  Node(const Case& c, std::size_t number, int rank) : case_(c), number_(number), rank_(rank) {}

  at::Tensor forward(const at::Tensor& input) {
    const auto& node = case_.nodes[number_];
    auto x = apply_node(case_, node, rank_, input, buffer,
                        [this](std::size_t object) { return tensors.at(object); });
    for (std::size_t i = 0; i < node.children.size(); ++i) {
      const auto& child = node.children[i];
      for (int repeat = 0; repeat < child.repeats; ++repeat) {
        x = child.recomputes
                ? checkpoint([this, i](const auto& inputs) { return call(i, inputs[0]); }, {x},
                             child.mode)
                : call(i, x);
      }
    }
    return x;
  }

  std::map<std::size_t, at::Tensor> tensors;  ///< by object
  at::Tensor buffer;
  std::vector<std::shared_ptr<Node>> plain;
  std::vector<std::shared_ptr<Sharded<Node>>> handles;

 private:
  at::Tensor call(std::size_t i, const at::Tensor& x) {
    return handles[i] ? handles[i]->forward(x) : plain[i]->forward(x);
  }

  const Case& case_;
  std::size_t number_;
  int rank_;
};

class Builder {
 public:
  Builder(const Case& c, World& world)
      : case_(c), rank_(world.rank()), mesh_(data_mesh(world, c.replicas, c.context())) {
    std::vector<at::Tensor> first(c.parameters.size());
    for (const auto& object : c.objects) {
      const auto& parameter = c.parameters[object.parameter];
      auto& storage = first[object.parameter];
      // Another object over the same storage, where there is one already.
      if (storage.defined()) {
        tensors_.push_back(storage.detach());
      } else {
        tensors_.push_back(storage = parameter.initial.clone());
      }
      if (parameter.own_grad_dtype) tensors_.back().set_grad_dtype(parameter.own_grad_dtype);
    }
    if (case_.file_bulk) contracts_ = resolve();
  }

  Sharded<Node> build() {
    const auto root = module(0);
    shard_below(root, 0);
    return fully_shard(root, mesh_, case_.policies[0], options_of(0));
  }

 private:
  /// As a loader does: for the whole model at once, with what is known of the file.
  std::shared_ptr<const std::vector<GradContract>> resolve() const {
    std::vector<ParameterMeta> metas(case_.parameters.size());
    for (std::size_t object = 0; object < case_.objects.size(); ++object) {
      const auto& parameter = case_.parameters[case_.objects[object].parameter];
      auto& meta = metas[case_.objects[object].parameter];
      if (!meta.name.empty()) {
        meta.aliases.push_back(Case::name_of(object));
        continue;
      }
      meta.name = Case::name_of(object);
      meta.shape = parameter.initial.sizes().vec();
      meta.dtype = to_dtype(parameter.initial.scalar_type());
      meta.checkpoint = meta.dtype;
      meta.checkpoint_bulk = case_.file_bulk;
      meta.published = parameter.published;
      meta.trainable = parameter.trainable;
      if (parameter.own_grad_dtype) meta.user_grad_dtype = to_dtype(*parameter.own_grad_dtype);
    }
    auto policy = case_.policies[0];
    for (std::size_t unit = 1; unit < case_.policies.size(); ++unit) {
      const auto& rules = case_.policies[unit].rules;
      policy.rules.insert(policy.rules.end(), rules.begin(), rules.end());
    }
    return std::make_shared<const std::vector<GradContract>>(resolve_contracts(
        metas, policy, fsdp::data_reductions(mesh_, case_.options[0].divide_factor)));
  }

  ShardOptions options_of(std::size_t unit) const {
    auto options = case_.options[unit];
    if (contracts_ == nullptr) return options;
    options.contracts = contracts_;
    if (unit != 0) options.name = concat("n", unit);
    options.canonical_name = [](const std::string& path) {
      return path.substr(path.rfind('.') + 1);
    };
    return options;
  }

  std::shared_ptr<Node> module(std::size_t number) {
    auto result = std::make_shared<Node>(case_, number, rank_);
    for (const auto object : case_.nodes[number].objects) {
      const auto& parameter = case_.parameters[case_.objects[object].parameter];
      result->tensors[object] = tensors_[object];
      result->register_parameter(Case::name_of(object), tensors_[object], parameter.trainable);
    }
    if (const auto& buffer = case_.nodes[number].buffer; buffer.defined())
      result->buffer = result->register_buffer(Case::name_of_buffer(number), buffer.clone());
    for (const auto& child : case_.nodes[number].children) {
      result->plain.push_back(result->register_module(concat("n", child.node), module(child.node)));
      result->handles.emplace_back();
    }
    return result;
  }

  /// Inner units first, once all modules are there: ties may point forward.
  void shard_below(const std::shared_ptr<Node>& node, std::size_t number) {
    const auto& children = case_.nodes[number].children;
    for (std::size_t i = 0; i < children.size(); ++i) {
      const auto next = children[i].node;
      shard_below(node->plain[i], next);
      if (!children[i].handle) continue;
      node->handles[i] = std::make_shared<Sharded<Node>>(
          fully_shard(node->plain[i], mesh_, case_.policies[next], options_of(next)));
      node->replace_module(concat("n", next), node->handles[i]);
    }
  }

  const Case& case_;
  int rank_;
  Mesh mesh_;
  std::vector<at::Tensor> tensors_;  // by object
  std::shared_ptr<const std::vector<GradContract>> contracts_;
};

std::size_t parameter_of(const Case& c, const std::string& name) {
  const auto object = std::stoul(name.substr(name.rfind('p') + 1));
  return c.objects.at(object).parameter;
}

/// Bit for bit, but that every NaN is every other, and that zero has no sign: ranks that have no
/// use for a parameter add 0 to the others' -0, where the unsharded sum has no such addend.
::testing::AssertionResult same_numbers(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_floating_point() || !b.is_floating_point()) return same_bits(a, b);
  const auto seen = [](const at::Tensor& t) { return t.masked_fill(t.isnan(), 12345.0).add(0.0); };
  return same_bits(seen(a), seen(b));
}

void expect_step(const Case& c, Sharded<Node>& handle, const Reference& reference,
                 const std::string& where) {
  std::size_t seen = 0;
  handle.visit_full_gradients([&](const std::string& name, const at::Tensor& found) {
    const auto& expected = reference.gradient(parameter_of(c, name));
    EXPECT_TRUE(same_numbers(found, expected.defined() ? expected : at::zeros_like(found)))
        << where << " gradient " << name;
    ++seen;
  });
  for (const auto& view : handle.shards()) {
    if (!view.contract->trainable) continue;
    EXPECT_EQ(view.shard.grad().defined(),
              reference.gradient(parameter_of(c, view.contract->name)).defined())
        << where << " whether there is a gradient of " << view.contract->name;
    --seen;
  }
  EXPECT_EQ(seen, 0U) << where;
}

std::string first_name(const Case& c, std::size_t parameter) {
  const auto first = std::find_if(c.objects.begin(), c.objects.end(), [&](const auto& object) {
    return object.parameter == parameter;
  });
  return Case::name_of(static_cast<std::size_t>(first - c.objects.begin()));
}

/// By parameter.
std::vector<GradContract> contracts_of(const Case& c, const Sharded<Node>& handle) {
  std::vector<GradContract> contracts(c.parameters.size());
  for (const auto& view : handle.shards())
    contracts[parameter_of(c, view.contract->name)] = *view.contract;
  return contracts;
}

/// By node, cast once: undefined where there is none.
std::vector<at::Tensor> buffers_of(const Case& c, const Sharded<Node>& handle) {
  std::vector<at::Tensor> buffers(c.nodes.size());
  for (const auto& view : handle.buffers()) {
    const auto& name = view.contract->name;
    const auto node = std::stoul(name.substr(name.rfind('b') + 1));
    buffers[node] = c.nodes[node].buffer.to(to_scalar_type(view.contract->compute));
  }
  return buffers;
}

/// One rank of a case. The reference runs on rank 0's thread; all look at it, one step at a time.
class CaseRun {
 public:
  CaseRun(const Case& c, World& world, std::shared_ptr<Reference>& reference)
      : case_(c), world_(world), reference_(reference), handle_(Builder(c, world).build()) {
    if (world.rank() == 0)
      reference_ = std::make_shared<Reference>(c, contracts_of(c, handle_), buffers_of(c, handle_));
    if (!case_.steps_by_hand) optimizer_ = make_sgd(handle_, sgd(Reference::kLr));
    if (!case_.loss_scale) return;
    GradScalerOptions options;
    options.init_scale = *case_.loss_scale;
    scaler_.emplace(handle_, options);
  }

  void run() {
    for (int step = 0; step < case_.steps(); ++step) {
      where_ = concat("step ", step);
      if (case_.evaluates) evaluate(step);
      begin_step(step);
      for (int i = 0; i < case_.micro_batches; ++i) micro_batch(step, i);
      comm::barrier(world_.control(), "reference may continue");
      if (world_.rank() == 0) {
        const OnTheHost there;
        reference_->step(step);
      }
      comm::barrier(world_.control(), "reference is there");
      expect_step(case_, handle_, *reference_, where_);
      end_step();
    }
    EXPECT_EQ(handle_.unit()->expected(), 0);
  }

 private:
  void evaluate(int step) {
    const at::NoGradGuard no_grad;
    const auto y = handle_.forward(case_.batch(world_.rank(), step, 5));
    comm::barrier(world_.control(), "evaluated");
    if (world_.rank() != 0) return;
    const OnTheHost there;
    EXPECT_TRUE(same_bits(y, reference_->evaluate(0, case_.batch(0, step, 5))))
        << where_ << " output";
  }

  /// Makes the changes of a user between steps.
  void begin_step(int step) {
    if (case_.zero != CaseZero::kKeep) handle_.zero_grad(case_.zero == CaseZero::kNone);
    const auto& changes = case_.changes[static_cast<std::size_t>(step)];
    if (changes.empty()) return;
    handle_.zero_grad();
    std::vector<TrainableChange> asked;
    for (const auto& change : changes)
      asked.push_back({{first_name(case_, change.parameter)}, change.trainable, change.frozen_as});
    std::vector<Optimizer*> follow;
    if (optimizer_) follow.push_back(optimizer_.get());
    set_trainable(handle_, asked, follow);
    if (world_.rank() == 0) reference_->change(contracts_of(case_, handle_));
  }

  void micro_batch(int step, int i) {
    const bool last = i + 1 == case_.micro_batches;
    handle_.set_requires_gradient_sync(case_.syncs_every || last);
    handle_.set_requires_replica_reduce(case_.replicas_every || last);
    const auto x = case_.batch(world_.rank(), step, i).requires_grad_(case_.input_requires_grad);
    const auto loss = case_loss(handle_.forward(x));
    backward(scaler_ ? scaler_->scaled(loss) : loss);
  }

  void step_shards() {
    const double norm = gradient_norm(handle_);
    EXPECT_EQ(std::isfinite(norm), reference_->stepped()) << where_;
    if (scaler_) {
      const bool steps = scaler_->update(handle_, norm);
      EXPECT_EQ(scaler_->scale(), reference_->loss_scale()) << where_;
      if (!steps) return;
    }
    if (!std::isfinite(norm))
      return;  // values that have grown out of range: a loop skips such a step
    if (optimizer_) return optimizer_->step();
    const at::NoGradGuard no_grad;
    for (const auto& view : handle_.shards()) {
      const auto& gradient = view.shard.grad();
      if (gradient.defined()) at::Tensor(view.shard).add_(gradient, -Reference::kLr);
    }
  }

  void end_step() {
    step_shards();
    handle_.visit_full_parameters([&](const std::string& name, const at::Tensor& value) {
      EXPECT_TRUE(same_bits(value, reference_->value(parameter_of(case_, name))))
          << where_ << " value of " << name;
    });
  }

  const Case& case_;
  World& world_;
  std::shared_ptr<Reference>& reference_;
  Sharded<Node> handle_;
  std::unique_ptr<Optimizer> optimizer_;
  std::optional<GradScaler> scaler_;
  std::string where_;
};

/// Whether the case held.
bool holds(std::uint64_t seed) {
  const auto c = Case::make(seed);
  const int failures =
      ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
  std::shared_ptr<Reference> reference;
  try {
    ranks(c.ranks, c.backend).run([&](World& world) {
      at::set_num_threads(1);  // products of four columns gain nothing, and threads that wait spin
      CaseRun(c, world, reference).run();
    });
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  if (::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count() ==
      failures)
    return true;
  std::cerr << "replay with TESSERA_PROPERTY_SEED=" << seed << "\n" << c.describe();
  return false;
}

TEST(FsdpProperty, AShardedModuleIsTheUnshardedOneBitForBit) {
  const auto replayed = environment_number("TESSERA_PROPERTY_SEED", 0);
  if (replayed != 0) {
    std::cerr << Case::make(replayed).describe();
    holds(replayed);
    return;
  }
  const auto from = environment_number("TESSERA_PROPERTY_FROM", 1);
  const auto cases = environment_number("TESSERA_PROPERTY_CASES", 50);
  int failed = 0;
  for (auto seed = from; seed < from + cases && failed < 5; ++seed) failed += holds(seed) ? 0 : 1;
}

}  // namespace
}  // namespace tessera::test::fsdp_property_test
