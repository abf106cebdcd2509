// Property: a sharded module is the unsharded one, bit for bit, for random trees, dtypes, shapes,
// ties, policies, schedules, layouts and recomputation.
//
// TESSERA_PROPERTY_SEED=N replays one case, TESSERA_PROPERTY_CASES=N runs more (default 300);
// TESSERA_PROPERTY_FROM is the first seed (default 1).
#include <cstdlib>
#include <iostream>

#include "comm/group.h"
#include "dist/plain.h"
#include "fsdp/unit.h"
#include "property/fsdp_reference.h"
#include "tessera/optim.h"
#include "tessera/recompute.h"

namespace tessera::test {
namespace {

/// A node of the tree as a module.
class Node : public torch::nn::Module {
 public:
  Node(const Case& c, std::size_t number, int rank) : case_(c), number_(number), rank_(rank) {}

  at::Tensor forward(const at::Tensor& input) {
    auto x = input;
    const auto& node = case_.nodes[number_];
    for (std::size_t i = 0; i < node.objects.size(); ++i) {
      const auto& parameter = case_.parameters[case_.objects[node.objects[i]].parameter];
      if (parameter.used_by == -2 || parameter.used_by == rank_)
        x = apply_parameter(parameter, x, tensors[i]);
    }
    for (std::size_t i = 0; i < node.children.size(); ++i) {
      const auto& child = node.children[i];
      for (int repeat = 0; repeat < child.repeats; ++repeat) {
        x = child.recomputes
                ? checkpoint([this, i](const auto& inputs) { return call(i, inputs[0]); }, {x})
                : call(i, x);
      }
    }
    return x;
  }

  std::vector<at::Tensor> tensors;
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
      : case_(c), rank_(world.rank()), mesh_(data_mesh(world, c.replicas)) {
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
    }
  }

  Sharded<Node> build() {
    const auto root = module(0);
    units_(root, 0);
    return fully_shard(root, mesh_, case_.policies[0], case_.options[0]);
  }

 private:
  std::shared_ptr<Node> module(std::size_t number) {
    auto result = std::make_shared<Node>(case_, number, rank_);
    for (const auto object : case_.nodes[number].objects) {
      const auto& parameter = case_.parameters[case_.objects[object].parameter];
      result->tensors.push_back(tensors_[object]);
      result->register_parameter(Case::name_of(object), tensors_[object], parameter.trainable);
    }
    for (const auto& child : case_.nodes[number].children) {
      result->plain.push_back(result->register_module(concat("n", child.node), module(child.node)));
      result->handles.emplace_back();
    }
    return result;
  }

  /// Inner units first, once all modules are there: ties may point forward.
  void units_(const std::shared_ptr<Node>& node, std::size_t number) {
    const auto& children = case_.nodes[number].children;
    for (std::size_t i = 0; i < children.size(); ++i) {
      const auto next = children[i].node;
      units_(node->plain[i], next);
      if (!children[i].handle) continue;
      node->handles[i] = std::make_shared<Sharded<Node>>(
          fully_shard(node->plain[i], mesh_, case_.policies[next], case_.options[next]));
      node->replace_module(concat("n", next), node->handles[i]);
    }
  }

  const Case& case_;
  int rank_;
  Mesh mesh_;
  std::vector<at::Tensor> tensors_;
};

std::size_t parameter_of(const Case& c, const std::string& name) {
  const auto object = std::stoul(name.substr(name.rfind('p') + 1));
  return c.objects.at(object).parameter;
}

void expect_step(const Case& c, Sharded<Node>& handle, const Reference& reference,
                 const std::string& where) {
  std::size_t seen = 0;
  handle.visit_full_gradients([&](const std::string& name, const at::Tensor& found) {
    const auto& expected = reference.gradient(parameter_of(c, name));
    EXPECT_TRUE(same_bits(found, expected.defined() ? expected : at::zeros_like(found)))
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

std::shared_ptr<Reference> reference_of(const Case& c, const Sharded<Node>& handle) {
  std::vector<GradContract> contracts(c.parameters.size());
  for (const auto& view : handle.shards())
    contracts[parameter_of(c, view.contract->name)] = *view.contract;
  return std::make_shared<Reference>(c, contracts);
}

/// The reference runs on rank 0's thread; all look at it, one step at a time.
void run_rank(const Case& c, World& world, std::shared_ptr<Reference>& reference) {
  auto handle = Builder(c, world).build();
  if (world.rank() == 0) reference = reference_of(c, handle);
  const auto optimizer = make_sgd(handle, sgd(Reference::kLr));
  for (int step = 0; step < 2; ++step) {
    const auto where = concat("step ", step);
    if (c.evaluates) {
      const at::NoGradGuard no_grad;
      const auto y = handle.forward(c.batch(world.rank(), step, 5));
      comm::barrier(world.control(), "evaluated");
      if (world.rank() == 0) {
        EXPECT_TRUE(same_bits(y, reference->evaluate(0, c.batch(0, step, 5))))
            << where << " output";
      }
    }
    if (c.zero != CaseZero::kKeep) handle.zero_grad(c.zero == CaseZero::kNone);
    for (int i = 0; i < c.micro_batches; ++i) {
      const bool last = i + 1 == c.micro_batches;
      handle.set_requires_gradient_sync(c.syncs_every || last);
      handle.set_requires_replica_reduce(c.replicas_every || last);
      auto x = c.batch(world.rank(), step, i).requires_grad_(c.input_requires_grad);
      backward(case_loss(handle.forward(x)));
    }
    comm::barrier(world.control(), "reference may go on");
    if (world.rank() == 0) reference->step(step);
    comm::barrier(world.control(), "reference is there");
    expect_step(c, handle, *reference, where);
    optimizer->step();
    handle.visit_full_parameters([&](const std::string& name, const at::Tensor& value) {
      EXPECT_TRUE(same_bits(value, reference->master(parameter_of(c, name))))
          << where << " value of " << name;
    });
  }
  EXPECT_EQ(handle.unit()->expected, 0);
}

/// Whether the case held.
bool holds(std::uint64_t seed) {
  const auto c = Case::make(seed);
  const int failures =
      ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
  std::shared_ptr<Reference> reference;
  try {
    ranks(c.ranks, c.backend).run([&](World& world) { run_rank(c, world, reference); });
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  if (::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count() ==
      failures)
    return true;
  std::cerr << "replay with TESSERA_PROPERTY_SEED=" << seed << "\n" << c.describe();
  return false;
}

std::uint64_t environment(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

TEST(FsdpProperty, AShardedModuleIsTheUnshardedOneBitForBit) {
  const auto replayed = environment("TESSERA_PROPERTY_SEED", 0);
  if (replayed != 0) {
    std::cerr << Case::make(replayed).describe();
    holds(replayed);
    return;
  }
  const auto from = environment("TESSERA_PROPERTY_FROM", 1);
  const auto cases = environment("TESSERA_PROPERTY_CASES", 300);
  int failed = 0;
  for (auto seed = from; seed < from + cases && failed < 5; ++seed) failed += holds(seed) ? 0 : 1;
}

}  // namespace
}  // namespace tessera::test
