// Muon over shards: PyTorch's numbers, and the bits of one rank on any layout.
//
// Gradients are given by hand: every layout gets its part of the same whole ones.
#include "tessera/muon.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/module.h>

#include <random>

#include "fsdp/optim/optimizer_registry.h"
#include "fsdp/optim/orthogonalize.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "tessera/optim.h"
#include "tessera/shard.h"

namespace tessera::test::muon_test {
namespace {

using Shape = std::vector<std::int64_t>;

/// Multiples of 2^-24 in [-0.5, 0.5): muon_reference.py has the same.
at::Tensor values(const Shape& shape, std::uint32_t step, std::uint32_t number) {
  const at::Tensor made = at::empty(shape, at::kFloat);
  auto* out = made.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < made.numel(); ++i) {
    auto x = static_cast<std::uint32_t>(i) + step * 2654435761U + number * 40503U;
    x ^= x >> 16U;
    x *= 0x7FEB352DU;
    x ^= x >> 15U;
    x *= 0x846CA68BU;
    x ^= x >> 16U;
    out[i] = static_cast<float>(static_cast<double>(x >> 8U) / 16777216.0 - 0.5);
  }
  return made;
}

class Holder : public torch::nn::Module {
 public:
  explicit Holder(const std::vector<at::Tensor>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      register_parameter(name_of(i), tensors[i].clone());
    }
  }
  static std::string name_of(std::size_t i) { return concat("p", i); }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

/// Where a parameter is cut over tp; none: whole on each.
using Cut = std::optional<int>;

struct Layout {
  std::string name;
  int ranks = 1;
  int replicas = 1;
  int tensor = 1;
  std::vector<Cut> cuts = {};  ///< by parameter, round and round; empty: none
  int context = 1;
};

ParameterLayout placed(const Layout& layout, const Cut& cut) {
  ParameterLayout made;
  if (layout.tensor == 1) return made;
  made.axes = {cut ? AxisPlacement::shard(axis::kTensor, layout.tensor, *cut)
                   : AxisPlacement::partial(axis::kTensor, layout.tensor)};
  return made;
}

Cut cut_of(const Layout& layout, std::size_t parameter) {
  return layout.cuts.empty() ? std::nullopt : layout.cuts[parameter % layout.cuts.size()];
}

/// The part of a whole tensor that a rank of tp has.
at::Tensor local_of(const at::Tensor& whole, const Layout& layout, const Cut& cut, int coordinate) {
  if (layout.tensor == 1 || !cut) return whole;
  const auto size = whole.size(*cut) / layout.tensor;
  return whole.narrow(*cut, size * coordinate, size).contiguous();
}

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(const ShardedBase&)>;

struct Run {
  Layout layout;
  std::vector<Shape> shapes;
  PrecisionPolicy policy = {};
  MakeOptimizer make;
  int steps = 1;
};

/// Called after each step of `run` for each parameter: this rank's elements, on the host, and the
/// whole's.
using See = std::function<void(int step, std::size_t parameter, const at::Tensor& found,
                               const std::function<at::Tensor(const at::Tensor& whole)>& part)>;

void train(const Run& run, World& world, const See& see) {
  const auto& [name, count, replicas, tensor, cuts, context] = run.layout;
  const auto mesh = world.mesh(
      MeshShape::dense(1, replicas, count / replicas / context / tensor, context, tensor));
  // Products of devices are libtorch's: the simulated device splits them by its number of threads.
  if (!world.device().is_cpu()) at::set_num_threads(1);
  const int coordinate = mesh.coordinate(axis::kTensor);
  std::vector<at::Tensor> locals;
  ShardOptions options;
  for (std::size_t i = 0; i < run.shapes.size(); ++i) {
    const auto cut = cut_of(run.layout, i);
    locals.push_back(here(local_of(values(run.shapes[i], 0, static_cast<std::uint32_t>(i)),
                                   run.layout, cut, coordinate)));
    options.layouts.emplace(Holder::name_of(i), placed(run.layout, cut));
  }
  auto handle = fully_shard(std::make_shared<Holder>(locals), mesh, run.policy, options);
  const auto optimizer = run.make(handle);
  const auto shards = handle.shards();
  for (int step = 1; step <= run.steps; ++step) {
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto& view = shards[i];
      const auto part = [&](const at::Tensor& whole) {
        return local_of(whole, run.layout, cut_of(run.layout, i), coordinate)
            .reshape(-1)
            .narrow(0, view.begin, view.end - view.begin);
      };
      auto shard = view.shard;
      shard.mutable_grad() = here(part(values(run.shapes[i], static_cast<std::uint32_t>(step),
                                              static_cast<std::uint32_t>(i)))
                                      .clone());
    }
    optimizer->step();
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto& view = shards[i];
      see(step, i, view.shard.detach().cpu(), [&](const at::Tensor& whole) {
        return local_of(whole, run.layout, cut_of(run.layout, i), coordinate)
            .reshape(-1)
            .narrow(0, view.begin, view.end - view.begin);
      });
    }
  }
}

at::Tensor iterated(at::Tensor x, const fsdp::NewtonSchulz& how) {
  const auto [a, b, c] = how.coefficients;
  const bool is_tall = x.size(0) > x.size(1);
  if (is_tall) x = x.t();
  x = x.to(at::kDouble) / x.to(at::kDouble).norm();
  for (int step = 0; step < how.steps; ++step) {
    const auto gram = x.mm(x.t());
    x = a * x + (b * gram + c * gram.mm(gram)).mm(x);
  }
  return is_tall ? x.t() : x;
}

double distance(const at::Tensor& found, const at::Tensor& expected) {
  const auto wide = expected.to(at::kDouble);
  return ((found.to(at::kDouble) - wide).norm() / wide.norm()).item<double>();
}

constexpr fsdp::NewtonSchulz kTorchs{{3.4445, -4.7750, 2.0315}, 5, 1e-7, at::kFloat};

// In fp64 as it stands in the paper; fp32's digits are lost 485-fold at most (3.4445^5), in the
// smallest singular values alone. PyTorch's dtype stays within what MuonOptions says.
TEST(Orthogonalized, IsNewtonSchulzInEachDType) {
  std::uint32_t number = 0;
  for (const Shape& shape : {Shape{1, 40}, {40, 1}, {30, 30}, {64, 200}, {200, 65}, {130, 257}}) {
    const auto matrix = values(shape, 3, ++number);
    const auto expected = iterated(matrix, kTorchs);
    EXPECT_LT(distance(orthogonalized(matrix, kTorchs), expected), 1e-5) << matrix.sizes();
    EXPECT_LT(distance(orthogonalized(matrix.to(at::kDouble), kTorchs), expected), 1e-12);
    auto as_torch = kTorchs;
    as_torch.dtype = at::kBFloat16;
    EXPECT_LT(distance(orthogonalized(matrix, as_torch), expected), 0.05) << matrix.sizes();
    EXPECT_EQ(orthogonalized(matrix, as_torch).scalar_type(), at::kFloat);
  }
}

TEST(Orthogonalized, OfNothingAndOfHugeAndTinyValuesIsFinite) {
  EXPECT_TRUE(at::equal(orthogonalized(at::zeros({4, 6}), kTorchs), at::zeros({4, 6})));
  const auto matrix = values({20, 30}, 1, 1);
  auto exact = kTorchs;
  exact.eps = 0;
  const auto expected = orthogonalized(matrix, exact);
  for (const double scale : {0x1p-100, 0x1p100}) {
    EXPECT_TRUE(at::equal(orthogonalized(matrix * scale, exact), expected)) << scale;
  }
}

TEST(Orthogonalized, BitsDoNotDependOnTheNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const Shape& shape : {Shape{8, 3000}, {64, 500}, {65, 64}, {300, 200}, {257, 513}}) {
    const auto matrix = values(shape, 9, 1);
    at::set_num_threads(1);
    const auto alone = orthogonalized(matrix, kTorchs);
    for (const int threads : {2, 3, 4}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(at::equal(orthogonalized(matrix, kTorchs), alone)) << threads << matrix.sizes();
    }
  }
  at::set_num_threads(before);
}

MakeOptimizer muon(const MuonOptions& options) {
  return [options](const ShardedBase& model) { return make_muon(model, options); };
}

std::vector<float> stored(const std::string& name) {
  const std::string bytes = read_file(concat(TESSERA_TEST_DATA, "/muon/", name, ".f32"));
  std::vector<float> numbers(bytes.size() / sizeof(float));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(float));
  return numbers;
}

// 100 steps of torch.optim.Muon, and AdamW for the vector (tests/golden/muon_reference.py).
TEST(Muon, HundredStepsArePyTorchsWithinRounding) {
  MuonOptions original;
  original.lr = 0.02;
  MuonOptions matched;
  matched.lr = 3e-3;
  matched.momentum = 0.9;
  matched.nesterov = false;
  matched.weight_decay = 0.01;
  matched.adjust_lr_fn = AdjustLr::kMatchRmsAdamw;
  const std::map<std::string, MuonOptions> cases{{"original", original}, {"match_rms", matched}};
  const std::vector<Shape> shapes{{24, 40}, {40, 24}, {16, 16}, {3, 16, 20}, {32}};
  for (const auto& [name, options] : cases) {
    const auto expected = stored(name);
    ASSERT_EQ(expected.size(), 3U * (960 + 960 + 256 + 960 + 32)) << name;
    ranks(1).run([&](World& world) {
      std::size_t at_number = 0;
      double largest = 0;
      const auto see = [&](int step, std::size_t, const at::Tensor& found, const auto&) {
        if (step != 1 && step != 10 && step != 100) return;
        const auto theirs = at::from_blob(const_cast<float*>(expected.data() + at_number),
                                          {found.numel()}, at::kFloat);
        at_number += static_cast<std::size_t>(found.numel());
        largest = std::max(largest, (found - theirs).abs().max().item<double>());
      };
      train({{}, shapes, {}, muon(options), 100}, world, see);
      EXPECT_EQ(at_number, expected.size());
      // Values are near 1, where fp32's half step is 3e-8, and rounded twice a step; small singular
      // values of a momentum grow by 3.4445^5 = 485 in an iteration, and fp32's noise in them with
      // it, to 485 x 6e-8 of a step's 0.02: some 6e-7 each, a hundred times at random signs that
      // decay.
      EXPECT_LT(largest, 2e-6) << name;
      RecordProperty("largest_" + name, concat(largest));
    });
  }
}

Tensors whole_after(const Run& of, int steps) {
  Tensors wholes;
  auto alone = of;
  alone.layout = {};
  alone.steps = steps;
  ranks(1).run([&](World& world) {
    train(alone, world, [&](int step, std::size_t i, const at::Tensor& found, const auto&) {
      if (step == steps) wholes[Holder::name_of(i)] = found.clone().reshape(of.shapes[i]);
    });
  });
  return wholes;
}

void expect_bits_of_one_rank(const Run& run) {
  const auto expected = whole_after(run, run.steps);
  ranks(run.layout.ranks).run([&](World& world) {
    train(run, world, [&](int step, std::size_t i, const at::Tensor& found, const auto& part) {
      if (step != run.steps) return;
      EXPECT_TRUE(at::equal(found, part(expected.at(Holder::name_of(i)))))
          << run.layout.name << ", parameter " << i << " of " << at::IntArrayRef(run.shapes[i]);
    });
  });
}

// Sides that divide by 4: what is cut over tp has equal parts.
std::vector<Shape> random_shapes(std::mt19937& random) {
  const auto side = [&](unsigned most) {
    return static_cast<std::int64_t>(4 * (1 + random() % most));
  };
  std::vector<Shape> shapes;
  const auto count = 1 + random() % 6;
  for (std::size_t i = 0; i < count; ++i) {
    const auto kind = random() % 4;
    if (kind == 0) {
      shapes.push_back({side(40)});
    } else if (kind == 1) {
      shapes.push_back({4, side(10), side(10)});
    } else {
      shapes.push_back({side(40), side(20)});
    }
  }
  return shapes;
}

TEST(Muon, RandomShapesHaveTheBitsOfOneRankOnOneToThreeRanks) {
  std::mt19937 random(20261126);
  for (int round = 0; round < 20; ++round) {
    MuonOptions options;
    options.lr = 0.05;
    options.no_decay = {"p0"};
    options.rules = {{{"p0"}, 0.5, std::nullopt}};
    const auto shapes = random_shapes(random);
    for (const int count : {2, 3}) {
      Layout layout{concat(count, " ranks, round ", round), count};
      expect_bits_of_one_rank({layout, shapes, {}, muon(options), 3});
    }
  }
}

TEST(Muon, HasTheBitsOfOneRankUnderReplicasAndTensorParallelism) {
  std::mt19937 random(7);
  for (int round = 0; round < 6; ++round) {
    const auto shapes = random_shapes(random);
    const Layout layouts[] = {{"replicas", 4, 2},
                              {"cp", 2, 1, 1, {}, 2},
                              {"replicas x cp", 4, 2, 1, {}, 2},
                              {"cp x tp, some whole", 4, 1, 2, {0, std::nullopt}, 2},
                              {"tp, rows cut", 2, 1, 2, {0}},
                              {"dp x tp, rows cut", 4, 1, 2, {0}},
                              {"dp x tp, some whole", 4, 1, 2, {0, std::nullopt}},
                              {"replicas x tp", 4, 2, 2, {0, std::nullopt}}};
    for (const auto& layout : layouts) {
      expect_bits_of_one_rank({layout, shapes, {}, muon({}), 2});
    }
  }
  // Columns; the vector has none.
  for (const auto& layout : {Layout{"tp", 2, 1, 2, {1}}, Layout{"dp x tp", 4, 1, 2, {1, 0}}}) {
    expect_bits_of_one_rank({layout, {{12, 20}, {36, 8}, {4, 8, 12}}, {}, muon({}), 2});
  }
}

// The value that is stepped is float32's, of which the shard has the first 16 bits.
TEST(Muon, SixteenBitShardsAreSteppedWithTheirMasters) {
  const std::vector<Shape> shapes{{24, 40}, {2, 8, 12}, {12}};
  for (const auto dtype : {DType::kBFloat16, DType::kFloat16}) {
    PrecisionPolicy policy;
    policy.storage_dtype = dtype;
    policy.on_narrower_request = NarrowerRequest::kNarrow;
    policy.loss_scaling = true;
    MuonOptions small;
    small.lr = 1e-5;  // below half a step of 16 bits: 1e-5 of 0.5 a step
    small.weight_decay = 0;
    const auto before = whole_after({{}, shapes, policy, muon({.lr = 0}), 1}, 1);
    const auto after = whole_after({{}, shapes, policy, muon(small), 300}, 300);
    // Momentum has random signs, so some values have moved by many steps of 16 bits: without a
    // master none would.
    EXPECT_FALSE(at::equal(after.at("p0"), before.at("p0"))) << to_string(dtype);
    expect_bits_of_one_rank({{"two ranks", 2}, shapes, policy, muon({}), 3});
  }
}

using layout::FusedMatrices;

/// Several matrices in one tensor, with drawn numbers; the last two of its dims are cut.
struct Fused {
  Shape shape;
  FusedMatrices parts;
};

Fused drawn_fused(std::mt19937& random) {
  const auto side = [&] { return static_cast<std::int64_t>(4 * (1 + random() % 5)); };
  Fused fused{{side(), side()}, {.count = 2 + static_cast<int>(random() % 2)}};
  fused.parts.dim = static_cast<int>(random() % 2);
  if (random() % 2 == 0) fused.parts.order = FusedMatrices::Order::kInTurn;
  fused.shape[static_cast<std::size_t>(fused.parts.dim)] *= fused.parts.count;
  if (random() % 2 == 0) fused.shape.insert(fused.shape.begin(), 2 * (1 + random() % 2));
  return fused;
}

at::Tensor part_of(const at::Tensor& whole, const FusedMatrices& parts, int index) {
  const auto dim = whole.dim() - 2 + parts.dim;
  if (parts.order == FusedMatrices::Order::kInTurn) {
    return whole.slice(dim, index, std::nullopt, parts.count).contiguous();
  }
  return whole.chunk(parts.count, dim).at(static_cast<std::size_t>(index)).contiguous();
}

MakeOptimizer muon_of(const std::vector<Fused>& all, AdjustLr adjust) {
  fsdp::MatrixForms forms;
  for (std::size_t i = 0; i < all.size(); ++i) {
    auto [shape, parts] = all[i];
    fsdp::MatrixForm form{{1, shape}, parts};
    if (shape.size() == 3) form = {{shape[0], {shape[1], shape[2]}}, parts};
    forms.emplace(Holder::name_of(i), form);
  }
  return [forms, adjust](const ShardedBase& model) {
    fsdp::Hyperparameters numbers;
    numbers.momentum = 0.95;
    numbers.weight_decay = 0.1;
    numbers.adjust_lr_fn = adjust;
    return fsdp::make_optimizer(fsdp::OptimizerName::kMuon, model, 0.05, numbers, forms);
  };
}

// PyTorch gives the step of each part (above): the part's own parameter has the same bits.
TEST(Muon, PartsOfFusedMatricesAreSteppedAsMatricesOfTheirOwn) {
  std::mt19937 random(20261128);
  for (int round = 0; round < 24; ++round) {
    const Fused fused = drawn_fused(random);
    const auto adjust = round % 2 == 0 ? AdjustLr::kOriginal : AdjustLr::kMatchRmsAdamw;
    MuonOptions options;
    options.lr = 0.05;
    options.adjust_lr_fn = adjust;
    ranks(1).run([&](World& world) {
      const auto stepped = [&](const std::vector<at::Tensor>& tensors, const MakeOptimizer& make,
                               const std::function<at::Tensor(std::size_t, int)>& gradient) {
        auto handle = fully_shard(std::make_shared<Holder>(tensors), data_mesh(world));
        const auto optimizer = make(handle);
        std::vector<at::Tensor> found;
        for (int step = 1; step <= 3; ++step) {
          found.clear();
          for (std::size_t i = 0; i < handle.shards().size(); ++i) {
            auto shard = handle.shards()[i].shard;
            shard.mutable_grad() = gradient(i, step).reshape(-1).clone();
            found.push_back(shard);
          }
          optimizer->step();
        }
        for (std::size_t i = 0; i < found.size(); ++i) {
          found[i] = found[i].detach().reshape(tensors[i].sizes());
        }
        return found;
      };
      const auto whole = [&](int step) {
        return values(fused.shape, static_cast<std::uint32_t>(step), 7);
      };
      std::vector<at::Tensor> parts;
      for (int i = 0; i < fused.parts.count; ++i) {
        parts.push_back(here(part_of(whole(0), fused.parts, i)));
      }
      const auto together = stepped({here(whole(0))}, muon_of({fused}, adjust),
                                    [&](std::size_t, int step) { return here(whole(step)); });
      const auto alone = stepped(parts, muon(options), [&](std::size_t i, int step) {
        return here(part_of(whole(step), fused.parts, static_cast<int>(i)));
      });
      for (std::size_t i = 0; i < alone.size(); ++i) {
        EXPECT_TRUE(at::equal(part_of(together[0], fused.parts, static_cast<int>(i)), alone[i]))
            << "round " << round << ", part " << i << " of " << at::IntArrayRef(fused.shape);
      }
      const auto as_one = stepped({here(whole(0))}, muon(options),
                                  [&](std::size_t, int step) { return here(whole(step)); });
      EXPECT_FALSE(at::equal(as_one[0], together[0])) << "able to fail";
    });
  }
}

TEST(Muon, PartsOfFusedMatricesHaveTheBitsOfOneRankOnEveryLayout) {
  std::mt19937 random(20261129);
  for (int round = 0; round < 8; ++round) {
    std::vector<Fused> all;
    std::vector<Shape> shapes;
    for (int i = 0; i < 3; ++i) {
      all.push_back(drawn_fused(random));
      shapes.push_back(all.back().shape);
    }
    for (const auto& layout : {Layout{"2 ranks", 2}, Layout{"3 ranks", 3}, Layout{"replicas", 4, 2},
                               Layout{"tp", 2, 1, 2, {0}}, Layout{"tp, columns", 2, 1, 2, {1}},
                               Layout{"dp x tp", 4, 1, 2, {1, 0, std::nullopt}}}) {
      expect_bits_of_one_rank({layout, shapes, {}, muon_of(all, AdjustLr::kOriginal), 2});
    }
  }
}

TEST_ON_RANKS(Muon, KeepsMomentumOfMatricesAndMomentsOfTheRest, 1) {
  const std::vector<at::Tensor> tensors{here(values({4, 6}, 0, 0)), here(values({5}, 0, 1)),
                                        here(values({6, 4}, 0, 2))};
  auto handle = fully_shard(std::make_shared<Holder>(tensors), data_mesh(world));
  MuonOptions options;
  options.adamw = {"p2"};
  const auto optimizer = make_muon(handle, options);
  EXPECT_EQ(optimizer->name(), "Muon");
  for (const auto& view : handle.shards()) {
    auto shard = view.shard;
    shard.mutable_grad() = at::ones_like(shard);
  }
  optimizer->step();
  const auto names = [&](std::size_t i) {
    const auto states = optimizer->state();
    std::vector<std::string> found;
    for (const auto& kept : states.at(i).kept) found.push_back(kept.name);
    return found;
  };
  EXPECT_THAT(names(0), ElementsAre("momentum_buffer"));
  EXPECT_THAT(names(1), ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(names(2), ElementsAre("exp_avg", "exp_avg_sq"));
  options.adamw = {"p9"};
  EXPECT_THAT(thrown_by([&] { make_muon(handle, options); }),
              Says("MuonOptions::adamw: found the pattern \"p9\""));
  options.adamw = {};
  options.ns_steps = 0;
  EXPECT_THAT(thrown_by([&] { make_muon(handle, options); }), Says("ns_steps 0"));
}

}  // namespace
}  // namespace tessera::test::muon_test
