// Parameters that are cut or copied over tp, ep and etp: gradients, norms, whole tensors and bytes
// against the same model unsharded in fp64.
#include <cmath>
#include <limits>

#include "dist/cut_modules.h"
#include "fsdp/handle.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/contract_key.h"
#include "layout/model_plan.h"
#include "tessera/clip.h"
#include "tessera/state_dict.h"
#include "tessera/trainable.h"

namespace tessera::test::placements_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void expect_near(const Tensors& found, const Tensors& expected, const std::string& what = "") {
  EXPECT_EQ(found.size(), expected.size()) << what;
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(found.count(name) > 0) << what << " lacks " << name;
    ASSERT_EQ(found.at(name).sizes(), value.sizes()) << what << " " << name;
    // fp64 sums in another order
    EXPECT_LE((found.at(name).cpu() - value.cpu()).abs().max().item<double>(),
              1e-12 * value.abs().max().item<double>())
        << what << " " << name;
  }
}

double norm_of(const Tensors& gradients, double p) {
  std::vector<at::Tensor> flat;
  for (const auto& [name, gradient] : gradients) flat.push_back(gradient.reshape(-1));
  return at::linalg_vector_norm(at::cat(flat), p).item<double>();
}

class Placements : public ::testing::TestWithParam<Degrees> {
 protected:
  static void on_ranks(const std::function<void(CutSharded&)>& body,
                       const ShardOptions& options = undivided()) {
    ranks(GetParam().ranks()).run([&](World& world) {
      CutSharded sharded(world.mesh(GetParam().shapes()), options);
      body(sharded);
    });
  }
};

INSTANTIATE_TEST_SUITE_P(
    Grid, Placements,
    ::testing::Values(Degrees{1, 1, 1, 1, 1, 1},   // one rank
                      Degrees{1, 1, 2, 1, 1, 2},   // tp, experts cut with it
                      Degrees{1, 1, 2, 1, 2, 1},   // ep takes tp
                      Degrees{1, 1, 2, 2, 1, 1},   // experts whole, rows shared out
                      Degrees{1, 2, 1, 1, 2, 1},   // ep alone
                      Degrees{1, 2, 2, 2, 1, 2},   // tp
                      Degrees{1, 2, 2, 2, 2, 1},   // ep x tp, etp 1
                      Degrees{1, 2, 2, 1, 4, 1},   // one expert a rank
                      Degrees{1, 2, 2, 1, 2, 2},   // ep x etp
                      Degrees{2, 1, 2, 1, 2, 1},   // HSDP
                      Degrees{2, 1, 2, 1, 1, 2},   // HSDP, experts cut with tp
                      Degrees{1, 1, 4, 1, 4, 1},   // fewer key heads than ranks
                      Degrees{1, 1, 4, 1, 1, 4},   // the same, experts cut over etp
                      Degrees{1, 4, 1, 2, 2, 1}),  // data and experts
    [](const auto& one) {
      std::string name;
      for (const char c : to_string(one.param.shapes())) {
        if (std::isalnum(static_cast<unsigned char>(c)) != 0) name += c;
      }
      return name;
    });

// Naive: a gradient that is partial over tp left as it is, or an invariant one summed.
TEST_P(Placements, GradientsAreThoseOfTheWholeModel) {
  const auto expected = whole_model_gradients(whole_values(), GetParam().data_ranks());
  on_ranks([&](CutSharded& sharded) {
    sharded.run();
    expect_near(whole_gradients(*sharded.handle), expected);
    EXPECT_TRUE(check_invariant_gradients(*sharded.handle).empty());
  });
}

TEST_P(Placements, WholeParametersAreThoseThatWereCut) {
  on_ranks(
      [&](CutSharded& sharded) { expect_same(whole_parameters(*sharded.handle), whole_values()); });
}

// Naive: a parameter that is the same on all ranks of tp counted once a rank, or one that is cut
// counted on the first rank only.
TEST_P(Placements, NormsCountEveryElementOnce) {
  const auto expected = whole_model_gradients(whole_values(), GetParam().data_ranks());
  on_ranks([&](CutSharded& sharded) {
    sharded.run();
    for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
      const auto norm = norm_of(expected, p);
      EXPECT_NEAR(gradient_norm(*sharded.handle, p), norm, 1e-12 * norm) << p;
    }
    const auto before = whole_gradients(*sharded.handle);
    const auto norm = gradient_norm(*sharded.handle);
    const auto bound = norm / 3;
    EXPECT_EQ(clip_grad_norm(*sharded.handle, bound), norm);
    for (const auto& [name, gradient] : whole_gradients(*sharded.handle)) {
      EXPECT_TRUE(same_bits(gradient, before.at(name).mul(bound / (norm + 1e-6)))) << name;
    }
    EXPECT_NEAR(gradient_norm(*sharded.handle), bound, 1e-6 * bound);
  });
}

TEST_P(Placements, MicroBatchesAddUpWithAndWithoutSync) {
  const auto expected = whole_model_gradients(whole_values(), GetParam().data_ranks(), 2);
  on_ranks([&](CutSharded& sharded) {
    for (const bool sync : {true, false}) {
      sharded.handle->zero_grad();
      sharded.handle->set_requires_gradient_sync(sync);
      sharded.run(0);
      sharded.handle->set_requires_gradient_sync(true);
      sharded.run(1);
      expect_near(whole_gradients(*sharded.handle), expected, sync ? "synced" : "not synced");
    }
  });
}

// The parameter after a step is that of an unsharded step, on every rank that holds a copy.
TEST_P(Placements, StepsAreThoseOfTheWholeModel) {
  constexpr double kRate = 1e-3;
  auto values = whole_values();
  for (int step = 0; step < 3; ++step) {
    for (const auto& [name, gradient] : whole_model_gradients(values, GetParam().data_ranks())) {
      values[name] = values[name] - kRate * gradient;
    }
  }
  on_ranks([&](CutSharded& sharded) {
    const auto optimizer = make_sgd(*sharded.handle, sgd(kRate));
    for (int step = 0; step < 3; ++step) {
      sharded.handle->zero_grad();
      sharded.run();
      optimizer->step();
    }
    expect_near(whole_parameters(*sharded.handle), values);
  });
}

// The gathers and reductions of each bucket follow from the contract and the mesh alone.
TEST_P(Placements, BucketsAreThoseOfThePurePlan) {
  on_ranks([&](CutSharded& sharded) {
    const auto contract = sharded.handle->contract();
    std::vector<layout::UnitItems> units(1);
    for (const auto& unit : contract.units) {
      if (!unit.name.empty()) units.push_back({unit.name, {}});
    }
    for (const auto& parameter : contract.parameters) {
      const auto dot = parameter.name.find('.');
      const auto unit = dot == std::string::npos ? "" : parameter.name.substr(0, dot);
      auto home = std::find_if(units.begin(), units.end(),
                               [&](const auto& each) { return each.name == unit; });
      home->items.push_back({parameter.name, parameter.local_numel(), key_of(parameter)});
    }
    const auto root = units.front();
    units.erase(units.begin());
    const Degrees& degrees = GetParam();
    const std::int64_t alignment_bytes = device_here().is_cpu() ? 64 : 256;
    const layout::PlanOptions options{degrees.shards, alignment_bytes, degrees.shapes()};
    const auto expected = layout::plan_model(root, units, options, 0);
    const auto found = fsdp::plan_of(*sharded.handle);
    EXPECT_EQ(to_string(found), to_string(expected));
    EXPECT_EQ(hash(found), hash(expected));
    for (const auto* unit : sharded.handle->unit()->runtime().units()) {
      for (const auto& bucket : unit->buckets()) {
        const auto* group = bucket->groups().gather;
        EXPECT_EQ(group == nullptr ? 1 : group->size(), bucket->plan().ranks);
      }
    }
  });
}

TEST_P(Placements, SmallBucketsMoveToTheRootAndKeepTheirGroups) {
  const auto expected = whole_model_gradients(whole_values(), GetParam().data_ranks());
  auto options = undivided();
  options.merge_below_bytes = 1 << 20;
  on_ranks(
      [&](CutSharded& sharded) {
        expect_same(whole_parameters(*sharded.handle), whole_values());
        sharded.run();
        expect_near(whole_gradients(*sharded.handle), expected);
      },
      options);
}

TEST_P(Placements, StateDictsHoldWholeTensorsOrThisRanksPart) {
  on_ranks([&](CutSharded& sharded) {
    const auto before = whole_parameters(*sharded.handle);
    auto full = state_dict(*sharded.handle, StateDictKind::kFull);
    for (const auto& entry : full) {
      EXPECT_TRUE(same_bits(entry.values, before.at(entry.name))) << entry.name;
    }
    auto own = state_dict(*sharded.handle, StateDictKind::kSharded);
    for (auto& entry : own) entry.values = entry.values.clone();
    const auto clear = [&] {
      const at::NoGradGuard no_grad;
      for (const auto& view : sharded.handle->shards()) view.shard.detach().zero_();
    };
    for (const auto* dict : {&full, &own}) {
      clear();
      load_state_dict(*sharded.handle, *dict);
      expect_same(whole_parameters(*sharded.handle), before);
    }
  });
}

TEST_P(Placements, FreezingAndUnfreezingMovesEveryPartAmongItsOwnRanks) {
  const auto expected = whole_model_gradients(whole_values(), GetParam().data_ranks());
  on_ranks([&](CutSharded& sharded) {
    const std::vector<std::string> patterns = {"*.w1", "*.norm", "*.k", "*.experts", "gain"};
    for (const auto frozen_as : {FrozenAs::kShard, FrozenAs::kReplicate}) {
      set_trainable(*sharded.handle, {{patterns, false, frozen_as}}, {});
      expect_same(whole_parameters(*sharded.handle), whole_values(), "frozen");
      sharded.run();
      auto rest = expected;
      for (const auto& [name, gradient] : expected) {
        for (const auto& pattern : patterns) {
          if (matches_name(pattern, name)) rest.erase(name);
        }
      }
      expect_near(whole_gradients(*sharded.handle), rest, "frozen");
      sharded.handle->zero_grad();
      set_trainable(*sharded.handle, {{patterns, true}}, {});
      expect_same(whole_parameters(*sharded.handle), whole_values(), "trained again");
      sharded.run();
      expect_near(whole_gradients(*sharded.handle), expected, "trained again");
      sharded.handle->zero_grad();
    }
  });
}

// Groups are opened as buckets need them, gathers and reductions of several groups are under way at
// once: over sockets as well.
TEST(PlacementGroups, OverGloo) {
  const Degrees degrees{1, 2, 2, 2, 2, 1};
  const auto expected = whole_model_gradients(whole_values(), degrees.data_ranks(), 2);
  ranks(degrees.ranks(), ThreadBackend::kGloo).run([&](World& world) {
    CutSharded sharded(world.mesh(degrees.shapes()));
    for (int step = 0; step < 2; ++step) sharded.run(step);
    expect_near(whole_gradients(*sharded.handle), expected);
    expect_same(whole_parameters(*sharded.handle), whole_values());
    EXPECT_TRUE(check_invariant_gradients(*sharded.handle).empty());
  });
}

// Naive: the ranks of dp_shard ask each other alone; those of tp hold parts of the same gathers.
TEST(PlacementGroups, UnitsThatStayUnshardedAreGatheredAgainWhereAnyRankOfTheReplicaChangedThem) {
  const Degrees degrees{1, 2, 2, 2, 2, 1};
  ranks(degrees.ranks()).run([&](World& world) {
    CutSharded sharded(world.mesh(degrees.shapes()));
    sharded.handle->set_reshard_after_backward(false);
    sharded.handle->set_reshard_after_forward(false);
    sharded.run();
    sharded.handle->zero_grad();
    auto values = whole_values();
    values["block1.norm"] = values["block1.norm"] * 2.0;
    {
      const at::NoGradGuard no_grad;
      for (const auto& view : sharded.handle->shards()) {
        if (view.contract->name == "block1.norm") view.shard.detach().mul_(2.0);
      }
    }
    sharded.run();
    expect_near(whole_gradients(*sharded.handle),
                whole_model_gradients(values, degrees.data_ranks()));
  });
}

// A bucket of a unit whose reduction is done gives its buffer back, those of other groups do not
// yet: a budget of nothing waits for each group by itself.
TEST(PlacementGroups, ReductionsOfOneUnitEndGroupByGroup) {
  const Degrees degrees{1, 2, 2, 2, 2, 1};
  const auto expected = whole_model_gradients(whole_values(), degrees.data_ranks(), 3);
  ranks(degrees.ranks()).run([&](World& world) {
    auto options = undivided();
    options.in_flight_bytes = 0;
    CutSharded sharded(world.mesh(degrees.shapes()), options);
    for (int step = 0; step < 3; ++step) sharded.run(step);
    expect_near(whole_gradients(*sharded.handle), expected);
  });
}

/// A weight that every rank of tp has, and whose gradient is what that rank's input makes of it.
ShardOptions declared(const ParameterLayout& layout) {
  auto options = undivided();
  options.layouts = {{"weight", layout}};
  return options;
}

// torchtitan's router: summed over tp in bf16, 1 + 2^-10 is 1. Here it stays, for every storage
// dtype, also after a micro-batch that is not reduced.
TEST_ON_RANKS(PlacementSums, OverTpAreFormedInTheReduceDtype, 2) {
  auto policy = in_bfloat16();
  policy.cast_forward_inputs = false;
  const auto mesh = world.mesh(MeshShape::dense(1, 1, 1, 1, 2));
  const auto addend = [&](double share) {
    return here(at::full({3}, share * std::ldexp(1.0, -10 * world.rank()), at::kBFloat16));
  };
  for (const auto storage : {at::kFloat, at::kBFloat16}) {
    for (const auto& shares : {std::vector<double>{1.0}, {0.0, 1.0}, {0.5, 0.5}}) {
      auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({3}, storage))), mesh, policy,
                                declared(layout_on(MeshKind::kDense, {partial("tp", 2)})));
      for (std::size_t i = 0; i < shares.size(); ++i) {
        handle.set_requires_gradient_sync(i + 1 == shares.size());
        backward(handle.forward(addend(shares[i])).sum());
      }
      EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"),
                            here(at::full({3}, 1.0 + std::ldexp(1.0, -10)))))
          << storage << ", " << shares.size() << " micro-batches";
    }
  }
}

// Naive: trusting the declaration. Rank 1 computes with other rows.
TEST_ON_RANKS(PlacementSums, ADeclarationOfEqualGradientsIsCheckedOnDemand, 4) {
  const auto mesh = world.mesh(MeshShape::dense(1, 1, 2, 1, 2));
  auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({300}))), mesh, {},
                            declared(layout_on(MeshKind::kDense, {invariant("tp", 2)})));
  const auto data_rank = static_cast<double>(mesh.coordinate(axis::kShard));
  backward(handle.forward(here(at::full({300}, data_rank))).sum());
  EXPECT_TRUE(check_invariant_gradients(handle).empty());
  handle.zero_grad();
  backward(handle.forward(here(at::full({300}, static_cast<double>(world.rank())))).sum());
  EXPECT_EQ(check_invariant_gradients(handle), std::vector<std::string>{"weight"});
}

// A parameter used by the ranks of one coordinate of tp only has a gradient on all.
TEST_ON_RANKS(PlacementSums, UsedOnOneRankOfTpIsUsedOnAll, 2) {
  const auto mesh = world.mesh(MeshShape::dense(1, 1, 1, 1, 2));
  auto chain = std::make_shared<Chain>(3, 1, 4);
  auto options = undivided();
  const auto layout = layout_on(MeshKind::kDense, {partial("tp", 2)});
  options.layouts = {{"scale", layout}, {"block0.a", layout}, {"block0.b", layout}};
  auto handle = fully_shard(chain, mesh, {}, options);
  chain->skip = world.rank() == 0 ? 0 : -1;
  backward(squares(handle.forward(input_of(0, 0, 4))));
  const auto gradients = whole_gradients(handle);
  EXPECT_GT(gradients.at("block0.a").abs().max().item<double>(), 0.0);
  for (const auto& view : handle.shards()) EXPECT_TRUE(view.shard.grad().defined());
}

}  // namespace
}  // namespace tessera::test::placements_test
