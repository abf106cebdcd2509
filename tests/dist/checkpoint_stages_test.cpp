// Checkpoints of ranks that have different stages of one model: they know no pipeline, so that any
// layout resumes from any other, bit for bit, and a fault is found in any stage.

#include "dist/checkpoint_tensors.h"
#include "dist/stepped.h"
#include "io/checkpoint_folder.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "tessera/checkpoint.h"

namespace tessera::test::checkpoint_stages_test {
namespace {

/// A rank's part of the model: layers by number, embedding, and the head, whose weight is the
/// embedding's: a copy of its own where another stage has the embedding.
struct Part {
  bool embedding = false;
  std::vector<int> layers = {};
  bool head = false;
};

struct Layout {
  std::string name;
  std::vector<Part> parts;  ///< by place on axis pp
  int shards = 1;
  int replicas = 1;

  int ranks() const { return static_cast<int>(parts.size()) * shards * replicas; }
  MeshShape mesh() const {
    return MeshShape::dense(static_cast<int>(parts.size()), replicas, shards, 1, 1);
  }
};

const Part kWhole{true, {0, 1, 2, 3}, true};

std::vector<Layout> layouts() {
  return {{"whole", {kWhole}},
          {"whole on 3", {kWhole}, 3},
          {"pp 2", {{true, {0, 1}, false}, {false, {2, 3}, true}}},
          {"pp 2, dp_shard 2, uneven", {{true, {0}, false}, {false, {1, 2, 3}, true}}, 2},
          {"pp 4, ends alone", {{true}, {false, {0, 1}}, {false, {2, 3}}, {false, {}, true}}},
          {"V, dp_replicate 2", {{true, {0, 3}, true}, {false, {1, 2}}}, 1, 2}};
}

/// Two dtypes, a frozen parameter that is whole on every rank, a buffer.
class Layer : public torch::nn::Module {
 public:
  Layer(std::uint64_t seed, std::int64_t width) {
    register_parameter("w", seeded(seed, {5, width}));
    register_parameter("narrow", seeded(seed + 1, {width, 3}, at::kBFloat16));
    register_parameter("still", seeded(seed + 2, {2, width}), /*requires_grad=*/false);
    register_buffer("count", at::full({3}, static_cast<std::int64_t>(seed), at::kLong));
  }
};

class Weight : public torch::nn::Module {
 public:
  explicit Weight(at::Tensor values) { weight = register_parameter("weight", std::move(values)); }
  at::Tensor weight;
};

/// The same values for a name, whichever rank has it.
class Model : public torch::nn::Module {
 public:
  Model(const Part& part, std::uint64_t seed, std::int64_t width) {
    if (part.embedding || part.head) {
      const auto embed = register_module("embed", std::make_shared<Weight>(seeded(seed, {11, 6})));
      if (part.head) register_module("head", std::make_shared<Weight>(embed->weight));
    }
    const auto layers = register_module("layers", std::make_shared<torch::nn::Module>());
    for (const int number : part.layers) {
      layers->register_module(
          std::to_string(number),
          std::make_shared<Layer>(seed + 10U * static_cast<unsigned>(number + 1),
                                  number == 3 ? width : 6));
    }
  }
  /// Never called: gradients come from the test.
  at::Tensor forward(const at::Tensor& x) { return x; }
};

struct Options {
  std::uint64_t seed = 1;
  std::int64_t width = 6;        ///< of layer 3
  std::vector<int> frozen = {};  ///< layers
};

/// A pattern must match something of this rank's.
PrecisionPolicy policy_of(const Part& part, const Options& options) {
  PrecisionPolicy policy;
  for (const int layer : part.layers) {
    if (std::ranges::find(options.frozen, layer) == options.frozen.end()) continue;
    policy.rules.emplace_back();
    policy.rules.back().match = {concat("layers.", layer)};
    policy.rules.back().frozen = FrozenRule::kShard;
  }
  if (part.layers.empty()) return policy;
  policy.rules.emplace_back();
  policy.rules.back().match = {"still"};
  policy.rules.back().frozen = FrozenRule::kReplicate;
  return policy;
}

/// This rank's stages, trained by gradients that follow from name, step and element.
struct Trained {
  Trained(World& world, const Layout& layout, const Options& options = {})
      : mesh(world.mesh(layout.mesh())),
        part(layout.parts[static_cast<std::size_t>(mesh.coordinate(axis::kPipeline))]),
        model(fully_shard(std::make_shared<Model>(part, options.seed, options.width), mesh,
                          policy_of(part, options))),
        optimizer(make_adamw(model, adamw(0.01))) {}

  void step(int number) { step_by_name(model, *optimizer, number); }
  /// Returns the state of this rank's stages.
  Tensors all() const { return whole_state(model, *optimizer); }

  Mesh mesh;
  Part part;
  Sharded<Model> model;
  std::unique_ptr<Optimizer> optimizer;
};

/// The parts of `whole` that this rank has.
void expect_part_of(const Tensors& whole, const Tensors& part, const char* what) {
  EXPECT_FALSE(part.empty());
  for (const auto& [name, values] : part) {
    ASSERT_TRUE(whole.contains(name)) << what << ": " << name;
    EXPECT_TRUE(same_bits(values, whole.at(name))) << what << ": " << name;
  }
}

Tensors whole_after(int steps, const Options& options = {}) {
  Tensors values;
  ranks(1).run([&](World& world) {
    Trained run(world, layouts().front(), options);
    for (int step = 1; step <= steps; ++step) run.step(step);
    values = run.all();
  });
  return values;
}

void save_after(int steps, const Layout& layout, const std::filesystem::path& folder,
                const Options& options = {}) {
  ranks(layout.ranks()).run([&](World& world) {
    Trained run(world, layout, options);
    for (int step = 1; step <= steps; ++step) run.step(step);
    save_checkpoint(run.model, *run.optimizer, folder, steps);
  });
}

// Naive: other stages' tensors are unknown, the tied copy is there twice, or no rank writes what is
// whole.
TEST(StagesCheckpoint, AnyLayoutWritesTheSameTensors) {
  const TemporaryFolder folder;
  std::map<std::string, std::vector<std::byte>> expected;
  for (const auto& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    save_after(2, layout, folder / layout.name);
    const auto found = all_tensors(folder / layout.name / "step-2");
    if (expected.empty()) expected = found;
    EXPECT_TRUE(found == expected);
  }
  EXPECT_TRUE(expected.contains("model/embed.weight"));
  EXPECT_FALSE(expected.contains("model/head.weight"));
  EXPECT_TRUE(expected.contains("optim/exp_avg/layers.3.w"));
}

TEST(StagesCheckpoint, AnyLayoutResumesFromAnyOther) {
  const TemporaryFolder folder;
  const auto saved = whole_after(2);
  const auto later = whole_after(4);
  for (const auto& from : layouts()) {
    save_after(2, from, folder / from.name);
    for (const auto& to : layouts()) {
      SCOPED_TRACE(from.name + " to " + to.name);
      ranks(to.ranks()).run([&](World& world) {
        Trained run(world, to, {.seed = 50});
        const auto loaded = load_checkpoint(run.model, *run.optimizer, folder / from.name);
        EXPECT_EQ(loaded.step, 2);
        EXPECT_EQ(loaded.world_size, from.ranks());
        expect_part_of(saved, run.all(), "loaded");
        for (int step = 3; step <= 4; ++step) run.step(step);
        expect_part_of(later, run.all(), "two steps later");
      });
    }
  }
}

TEST(StagesCheckpoint, ATiedCopyIsWrittenByTheFirstStageThatHasIt) {
  const TemporaryFolder folder;
  const Layout layout{"pp 2, dp_shard 2", {{true, {0, 1}, false}, {false, {2, 3}, true}}, 2};
  save_after(1, layout, folder / "run");
  const auto checkpoint = CheckpointFolder::open(folder / "run/step-1");
  const auto files_of = [&](const std::string& name) {
    std::vector<std::string> files;
    for (const auto& piece : checkpoint.tensors().find(name)->second.pieces) {
      files.push_back(piece.file);
    }
    return files;
  };
  const auto of_first = ::testing::AnyOf("rank_0.safetensors", "rank_1.safetensors");
  EXPECT_THAT(files_of("model/embed.weight"), Each(of_first));
  EXPECT_THAT(files_of("optim/exp_avg_sq/embed.weight"), Each(of_first));
  EXPECT_THAT(files_of("model/layers.2.w"), Each(Not(of_first)));
}

// The error is on all ranks alike, whichever stage has the tensor.
TEST(StagesCheckpoint, WhatDoesNotFitIsFoundWhicheverStageHasIt) {
  const TemporaryFolder folder;
  save_after(2, layouts().front(), folder / "run");
  for (const auto& to : layouts()) {
    SCOPED_TRACE(to.name);
    auto without = to;
    for (auto& part : without.parts) std::erase(part.layers, 3);
    ranks(to.ranks()).run([&](World& world) {
      Trained lacks(world, without);
      EXPECT_THAT(error_of(ErrorKind::kFormat,
                           [&] { load_checkpoint(lacks.model, *lacks.optimizer, folder / "run"); }),
                  Says("model/layers.3.", "only those of the model"));
      Trained wider(world, to, {.width = 7});
      EXPECT_THAT(error_of(ErrorKind::kFormat,
                           [&] { load_checkpoint(wider.model, *wider.optimizer, folder / "run"); }),
                  Says("model/layers.3.", "expected"));
    });
  }
}

// Naive: a stage without an update is taken for an optimizer that made none.
TEST(StagesCheckpoint, AStageThatTrainsNothingSavesAndLoadsAsTheOthersDo) {
  const TemporaryFolder folder;
  const Options options{.frozen = {2, 3}};
  const auto saved = whole_after(2, options);
  const auto pp4 = layouts().at(4);
  save_after(2, pp4, folder / "run", options);
  for (const auto& to : {layouts().front(), pp4}) {
    ranks(to.ranks()).run([&](World& world) {
      Trained run(world, to, {.seed = 50, .frozen = {2, 3}});
      load_checkpoint(run.model, *run.optimizer, folder / "run");
      expect_part_of(saved, run.all(), "loaded");
    });
  }
}

}  // namespace
}  // namespace tessera::test::checkpoint_stages_test
