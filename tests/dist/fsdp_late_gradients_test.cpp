// Gradients that arrive late, early only, on some ranks, twice, or wider than their parameter: in
// every schedule they are added unrounded to what is there. PyTorch's FSDP2 failed or rounded
// in most of these cases until 2.15.

#include <cmath>

#include "dist/wide_gradient.h"
#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::fsdp_late_gradients_test {
namespace {

constexpr std::int64_t kWidth = 5;
constexpr int kMicroBatches = 3;

/// A layout, when shards and when replicas are summed, and what is stored; all compute in bf16.
struct Cell {
  int ranks, replicas;
  bool syncs_every, replicas_every;
  DType storage;
  at::ScalarType dtype() const { return storage == DType::kBFloat16 ? at::kBFloat16 : at::kFloat; }
};

std::vector<Cell> cells() {
  std::vector<Cell> all;
  for (const auto& [ranks, replicas] :
       {std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(2, 2), std::pair(4, 2)}) {
    for (const bool syncs : {true, false}) {
      for (const bool replicates : {true, false}) {
        if (!replicates && replicas == 1) continue;
        for (const auto storage : {DType::kFloat32, DType::kBFloat16})
          all.push_back({ranks, replicas, syncs, replicates, storage});
      }
    }
  }
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Cell>& info) {
  const auto& cell = info.param;
  return concat(cell.ranks, "ranks", cell.replicas, "replicas",
                cell.syncs_every ? "Synced" : "NoSync",
                cell.replicas_every ? "" : "ReplicasDeferred", "Stored",
                cell.storage == DType::kBFloat16 ? "BFloat16" : "Float32");
}

/// Calls `micro_batch(i)` for each of a step, with the cell's schedule.
void step(ShardedBase& handle, const Cell& cell, const std::function<void(int)>& micro_batch) {
  handle.zero_grad();
  for (int i = 0; i < kMicroBatches; ++i) {
    const bool last = i + 1 == kMicroBatches;
    handle.set_requires_gradient_sync(last || cell.syncs_every);
    handle.set_requires_replica_reduce(last || cell.replicas_every);
    micro_batch(i);
  }
}

/// always x + (rare x where it is used); the raw gradients are the inputs themselves, in bf16.
class Rare : public torch::nn::Module {
 public:
  explicit Rare(at::ScalarType dtype)
      : always(register_parameter("always", here(at::ones({kWidth}, dtype)))),
        rare(register_parameter("rare", here(at::ones({kWidth}, dtype)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = (x * always).sum();
    return uses ? y + (x * rare).sum() : y;
  }
  at::Tensor always, rare;
  bool uses = true;
};

class LateGradients : public ::testing::TestWithParam<Cell> {};
INSTANTIATE_TEST_SUITE_P(Cells, LateGradients, ::testing::ValuesIn(cells()), name_of);

/// Returns the gradient of rank r in micro-batch i of a step: 256, 1 and -256 in turn, so that no
/// sum of two fits into bf16.
double value(int rank, int i) {
  constexpr double kValues[] = {256, 1, -256};
  return kValues[i] + 2 * rank;
}

// Naive: the sum so far is fp32, what arrives now is bf16, and a reduction wants them alike; or
// zeros of another dtype are filled in where nothing arrived.
TEST_P_ON_RANKS(LateGradients, OfOneMicroBatchOnAllOrOnOneRankAreItsOwnWhicheverItIs,
                GetParam().ranks) {
  const auto& cell = GetParam();
  auto module = std::make_shared<Rare>(cell.dtype());
  auto handle = fully_shard(module, data_mesh(world, cell.replicas), in_bfloat16(), undivided());
  constexpr int kAll = -1, kNone = -2;
  for (int only = 0; only < kMicroBatches; ++only) {
    for (const int user : {kAll, world.size() - 1, kNone}) {
      step(handle, cell, [&](int i) {
        module->uses = i == only && (user == kAll || user == world.rank());
        backward(handle.forward(here(at::full({kWidth}, value(world.rank(), i)))));
      });
      double always = 0, rare = 0;
      for (int rank = 0; rank < world.size(); ++rank) {
        for (int i = 0; i < kMicroBatches; ++i) always += value(rank, i);
        if (user == kAll || user == rank) rare += value(rank, only);
      }
      const auto what = concat("micro-batch ", only, ", user ", user);
      const auto found = whole_gradients(handle);
      EXPECT_TRUE(same_bits(found.at("always"), here(at::full({kWidth}, always, at::kFloat))))
          << what;
      EXPECT_TRUE(same_bits(found.at("rare"), here(at::full({kWidth}, rare, at::kFloat)))) << what;
      for (const auto& view : handle.shards()) {
        const bool unused = user == kNone && view.contract->name == "rare";
        EXPECT_EQ(view.shard.grad().defined(), !unused) << what;
      }
    }
  }
}

/// One unit next to another: called in the micro-batches where it is used, on all ranks.
class Units : public torch::nn::Module {
 public:
  Units(const Mesh& mesh, at::ScalarType dtype) {
    for (const char* name : {"often", "seldom"}) {
      handles.push_back(std::make_shared<Sharded<Scale>>(
          fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}, dtype))), mesh, in_bfloat16(),
                      undivided())));
      register_module(name, handles.back());
    }
  }
  at::Tensor forward(const at::Tensor& x, int calls) {
    auto y = handles[0]->forward(x).sum();
    for (int i = 0; i < calls; ++i) y = y + handles[1]->forward(i == 0 ? x : x - 255).sum();
    return y;
  }
  std::vector<std::shared_ptr<Sharded<Scale>>> handles;
};

/// Calls `check` on every rank for each micro-batch that may be the only one to run "seldom".
void on_units(const Cell& cell,
              const std::function<void(World&, Sharded<Units>&, int only)>& check) {
  ranks(cell.ranks).run([&](World& world) {
    const auto mesh = data_mesh(world, cell.replicas);
    auto handle =
        fully_shard(std::make_shared<Units>(mesh, cell.dtype()), mesh, in_bfloat16(), undivided());
    for (int only = 0; only < kMicroBatches; ++only) check(world, handle, only);
  });
}

// Naive: a unit that did not run in the synced micro-batch is not reduced, or is so twice.
TEST_P(LateGradients, OfAUnitThatOnlyOneMicroBatchRuns) {
  const auto& cell = GetParam();
  on_units(cell, [&](World& world, Sharded<Units>& handle, int only) {
    step(handle, cell, [&](int i) {
      backward(handle.forward(here(at::full({kWidth}, value(world.rank(), i))), i == only ? 1 : 0));
    });
    double often = 0, seldom = 0;
    for (int rank = 0; rank < world.size(); ++rank) {
      for (int i = 0; i < kMicroBatches; ++i) often += value(rank, i);
      seldom += value(rank, only);
    }
    const auto found = whole_gradients(handle);
    EXPECT_TRUE(same_bits(found.at("often.weight"), here(at::full({kWidth}, often, at::kFloat))));
    EXPECT_TRUE(same_bits(found.at("seldom.weight"), here(at::full({kWidth}, seldom, at::kFloat))))
        << "micro-batch " << only;
  });
}

// Naive: autograd adds the two uses in bf16, where 256 + 1 is 256.
TEST_P(LateGradients, OfTwoCallsInOneBackwardAreBothAddedUnrounded) {
  const auto& cell = GetParam();
  on_units(cell, [&](World& world, Sharded<Units>& handle, int only) {
    step(handle, cell, [&](int i) {
      // Two calls with 256 and 1 on the first rank, else with nothing: zeros and -255.
      const double x = world.rank() == 0 ? 256 : 0;
      backward(handle.forward(here(at::full({kWidth}, x)), i == only ? 2 : 0));
    });
    const double expected = 257 - 255 * (world.size() - 1);
    EXPECT_TRUE(same_bits(whole_gradients(handle).at("seldom.weight"),
                          here(at::full({kWidth}, expected, at::kFloat))))
        << "micro-batch " << only;
  });
}

// --- weight gradients that a kernel gives in fp32

constexpr double kOdd = 1.0078125;  // 1 + 2^-7: 8 bits; its square has 15

enum class Recomputes { kNo, kInside, kOutside };

class Wide : public torch::nn::Module {
 public:
  explicit Wide(at::ScalarType dtype)
      : weight(register_parameter("weight", here(at::ones({kWidth}, dtype)))) {}
  at::Tensor forward(const at::Tensor& x) {
    EXPECT_EQ(weight.scalar_type(), at::kBFloat16);
    const auto body = [this](const auto& in) { return WideGradient::apply(in[0], weight); };
    return recomputes == Recomputes::kInside ? checkpoint(body, {x}) : body(std::vector{x});
  }
  at::Tensor weight;
  Recomputes recomputes = Recomputes::kNo;
};

// Naive: the engine casts what arrives to the leaf's dtype before any hook sees it, and an fp32
// reduction carries bf16 digits.
TEST_P(LateGradients, RawFloat32OfABFloat16LeafReachTheShardUnrounded) {
  const auto& cell = GetParam();
  for (const auto recomputes : {Recomputes::kNo, Recomputes::kInside, Recomputes::kOutside}) {
    ranks(cell.ranks).run([&](World& world) {
      auto module = std::make_shared<Wide>(cell.dtype());
      module->recomputes = recomputes;
      auto handle =
          fully_shard(module, data_mesh(world, cell.replicas), in_bfloat16(), undivided());
      double expected = 0;
      step(handle, cell, [&](int i) {
        const auto x = here(at::full({kWidth}, kOdd, at::kBFloat16)).requires_grad_();
        const auto call = [&](const auto& in) { return handle.forward(in[0]); };
        const auto y = recomputes == Recomputes::kOutside ? checkpoint(call, {x})
                                                          : call(std::vector<at::Tensor>{x});
        // Powers of two, so that each product has the same 15 bits.
        const auto scale = [&](int rank) { return std::ldexp(kOdd, (rank + i) % 3); };
        torch::autograd::backward({y}, {at::full_like(y, scale(world.rank()))});
        for (int rank = 0; rank < world.size(); ++rank) expected += kOdd * scale(rank);
      });
      EXPECT_NE(here(at::full({}, expected)).to(at::kBFloat16).item<double>(), expected);
      EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"),
                            here(at::full({kWidth}, expected, at::kFloat))))
          << static_cast<int>(recomputes);
    });
  }
}

}  // namespace
}  // namespace tessera::test::fsdp_late_gradients_test
