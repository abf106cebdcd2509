// A user's pipeline over sharded stages (tessera/pipeline.h) against the same model, layout and
// micro-batches without one: losses, gradients and weights bit for bit.

#include <fstream>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "base/test_hooks.h"
#include "dist/pipeline_runs.h"
#include "dist/staged.h"
#include "pipeline/schedule_csv.h"
#include "support/temporary_folder.h"
#include "tessera/pipeline.h"

namespace tessera::test::pipeline_sharded_test {
namespace {

constexpr std::int64_t kWidth = 6;
constexpr int kPieces = 2;  // of a stage

struct Case {
  pipeline::Kind kind = pipeline::Kind::kOneFOneB;
  int ranks = 2;     ///< of a pipeline
  int replicas = 1;  ///< of the two data ranks
  int micro_batches = 4;
  int frozen = 0;  ///< stages at the front without a trainable parameter
  bool bfloat16 = false;
  bool sync_every = false;
  RecomputeMode mode = RecomputeMode::kNone;
  StepReshard reshard = StepReshard::kStep;

  int stages() const { return ranks * pipeline::row_of(kind).stages_per_rank; }
  PrecisionPolicy policy() const { return bfloat16 ? in_bfloat16() : PrecisionPolicy{}; }
  PipelineOptions options() const {
    PipelineOptions options;
    options.schedule = std::string(pipeline::row_of(kind).name);
    options.micro_batches = micro_batches;
    options.reshard = reshard;
    options.sync_every_micro_batch = sync_every;
    return options;
  }
  Mesh mesh(World& world) const {
    const int stages = world.size() / kDataRanks;
    return world.mesh(MeshShape::dense(stages, replicas, kDataRanks / replicas, 1, 1));
  }
  int data_rank(const Mesh& mesh) const {
    return mesh.coordinate("dp_replicate") + mesh.coordinate("dp_shard");  // one of them is 1 wide
  }
  static constexpr int kDataRanks = 2;
};

constexpr int kSteps = 2;
constexpr int kAll = -1;

/// The pieces of some stages, and with the first one a scale before them.
class Part : public torch::nn::Module {
 public:
  Part(const Mesh& mesh, const std::vector<int>& stages, const Case& of) : stages_(stages) {
    if (stages.front() == 0) {
      scale = register_parameter("scale", seeded(7, {kWidth}) + 1.0);
      scale.requires_grad_(of.frozen == 0);
    }
    for (const int stage : stages) {
      for (int i = stage * kPieces; i < (stage + 1) * kPieces; ++i) {
        const auto seed = 100 + 10 * static_cast<std::uint64_t>(i);
        const auto piece = std::make_shared<Piece>(seed, kWidth, of.mode);
        for (auto& parameter : piece->parameters()) parameter.requires_grad_(stage >= of.frozen);
        pieces[i] = register_module(concat("piece", i), std::make_shared<Sharded<Piece>>(
                                                            fully_shard(piece, mesh, of.policy())));
      }
    }
  }
  /// Runs one of its stages, or all of them.
  at::Tensor forward(int which, const at::Tensor& x) {
    at::Tensor y = x;
    for (const int stage : stages_) {
      if (which != kAll && which != stage) continue;
      if (stage == 0) y = y * scale;
      for (int i = stage * kPieces; i < (stage + 1) * kPieces; ++i) {
        y = pieces.at(i)->forward(y);
        if (in_backward) y.register_hook([this](const at::Tensor&) { in_backward(); });
      }
    }
    return y;
  }
  at::Tensor scale;
  std::function<void()> in_backward;  ///< runs before that of each piece
  std::map<int, std::shared_ptr<Sharded<Piece>>> pieces;

 private:
  std::vector<int> stages_;
};

/// The results of kSteps steps, of each data rank and of the whole model.
struct Result {
  std::map<std::pair<int, int>, std::vector<at::Tensor>> losses;  ///< by data rank and step
  std::map<int, Tensors> gradients;                               ///< by step
  Tensors weights;
};

/// Steps the part and takes what it has.
void take(ShardedBase& handle, int step, int data_rank, std::mutex& mutex, Result& result) {
  auto gradients = whole_gradients(handle);
  if (!gradients.empty()) {
    SgdOptions options;
    options.lr = 0.1;
    make_sgd(handle, options)->step();
  }
  auto weights = whole_parameters(handle);
  handle.zero_grad();
  if (data_rank != 0) return;
  const std::lock_guard lock(mutex);
  result.gradients[step].merge(gradients);
  if (step + 1 == kSteps) result.weights.merge(weights);
}

at::Tensor rows_of(int data_rank, int step, std::int64_t micro_batch) {
  return input_of(data_rank, 10 * step + static_cast<int>(micro_batch), kWidth);
}

Result run_whole(const Case& of) {
  Result result;
  std::mutex mutex;
  ranks(Case::kDataRanks).run([&](World& world) {
    const auto mesh = of.mesh(world);
    std::vector<int> stages(static_cast<std::size_t>(of.stages()));
    std::iota(stages.begin(), stages.end(), 0);
    auto part = fully_shard(std::make_shared<Part>(mesh, stages, of), mesh, of.policy());
    for (int step = 0; step < kSteps; ++step) {
      std::vector<at::Tensor> losses;
      for (int k = 0; k < of.micro_batches; ++k) {
        const bool last = k + 1 == of.micro_batches;
        part.set_requires_gradient_sync(last || of.sync_every);
        part.set_requires_replica_reduce(last);
        losses.push_back(squares(part.forward(kAll, rows_of(world.rank(), step, k))));
        if (losses.back().requires_grad()) backward(losses.back());
        losses.back() = losses.back().detach();
      }
      take(part, step, world.rank(), mutex, result);
      const std::lock_guard lock(mutex);
      result.losses[{world.rank(), step}] = losses;
    }
  });
  return result;
}

/// One rank of a pipeline of Parts.
class InStages {
 public:
  InStages(World& world, const Case& of, const PipelineOptions& options)
      : mesh_(of.mesh(world)),
        data_rank(of.data_rank(mesh_)),
        pipeline(mesh_, options),
        part(
            fully_shard(std::make_shared<Part>(mesh_, pipeline.stages(), of), mesh_, of.policy())) {
    set_stages(of);
  }
  /// Each goes through its pieces so many times.
  void set_stages(const Case& of, int times = 1) {
    const auto border_after = [&](int stage) {
      const auto dtype = of.bfloat16 ? at::kBFloat16 : at::kFloat;
      return std::vector<pipeline::BoundaryTensor>{{{3, kWidth}, dtype, stage >= of.frozen}};
    };
    std::vector<std::shared_ptr<pipeline::Stage>> stages;
    for (const int stage : pipeline.stages()) {
      stages.push_back(make_stage(
          [this, stage, times](const pipeline::Tensors& inputs) {
            at::Tensor y = inputs.at(0);
            for (int i = 0; i < times; ++i) y = part.forward(stage, y);
            return pipeline::Tensors{y};
          },
          border_after(stage - 1), border_after(stage)));
    }
    pipeline.set_stages(stages, &part);
  }
  InStages(const InStages&) = delete;
  InStages& operator=(const InStages&) = delete;

  std::vector<at::Tensor> step(int step) {
    return pipeline.step(
        [&](std::int64_t k) { return pipeline::Tensors{rows_of(data_rank, step, k)}; },
        [](std::int64_t, const pipeline::Tensors& outputs) { return squares(outputs.at(0)); });
  }

 private:
  Mesh mesh_;

 public:
  int data_rank;
  Pipeline pipeline;
  Sharded<Part> part;
};

Result run_in_stages(const Case& of, const PipelineOptions& options) {
  Result result;
  std::mutex mutex;
  ranks(of.ranks * Case::kDataRanks).run([&](World& world) {
    InStages rank(world, of, options);
    for (int step = 0; step < kSteps; ++step) {
      const auto losses = rank.step(step);
      take(rank.part, step, rank.data_rank, mutex, result);
      const std::lock_guard lock(mutex);
      if (rank.pipeline.has_last()) result.losses[{rank.data_rank, step}] = losses;
      EXPECT_EQ(losses.empty(), !rank.pipeline.has_last());
    }
  });
  return result;
}

void expect_same(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : found) {
    EXPECT_TRUE(same_bits(tensor, expected.at(name))) << name;
  }
}

void expect_same(const Result& found, const Result& expected) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (const auto& [of, losses] : found.losses) {
    ASSERT_EQ(losses.size(), expected.losses.at(of).size());
    for (std::size_t k = 0; k < losses.size(); ++k) {
      EXPECT_TRUE(same_bits(losses[k], expected.losses.at(of)[k])) << "loss " << k;
    }
  }
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(concat("gradients of step ", step));
    expect_same(found.gradients.at(step), expected.gradients.at(step));
  }
  expect_same(found.weights, expected.weights);
}

TEST(PipelineOfHandles, EveryKindHasTheBitsOfTheSameLayoutWithoutOne) {
  int index = 0;
  for (const auto& row : pipeline::kinds()) {
    for (const bool bfloat16 : {false, true}) {
      for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
        Case of;
        of.kind = row.kind;
        of.bfloat16 = bfloat16;
        of.reshard = reshard;
        of.mode = index % 3 == 0 ? RecomputeMode::kFull : RecomputeMode::kNone;
        of.micro_batches = 4 + 2 * (index % 2);
        of.replicas = 1 + index / 2 % 2;
        // Where an I runs before the W of a micro-batch before, its biases are reduced with those.
        of.sync_every = index % 2 == 1 && row.kind <= pipeline::Kind::kInterleavedOneFOneB;
        SCOPED_TRACE(concat(row.name, ", case ", index++));
        expect_same(run_in_stages(of, of.options()), run_whole(of));
      }
    }
  }
}

TEST(PipelineOfHandles, AFrozenFrontHasItsSlotsAndNoGradient) {
  for (const auto kind : {pipeline::Kind::kOneFOneB, pipeline::Kind::kZeroBubbleV}) {
    for (const int frozen : {1, 2}) {
      Case of;
      of.kind = kind;
      of.frozen = frozen;
      SCOPED_TRACE(concat(pipeline::row_of(kind).name, ", ", frozen, " frozen"));
      expect_same(run_in_stages(of, of.options()), run_whole(of));
    }
  }
}

TEST(PipelineOfHandles, AllStagesOnOneRankAreAPipelineToo) {
  Case of;
  of.kind = pipeline::Kind::kDualPipeV;
  of.ranks = 1;
  expect_same(run_in_stages(of, of.options()), run_whole(of));
}

// Naive: other stages leave what was recorded of those before.
TEST(PipelineOfHandles, StagesThatAreSetAgainAreRecordedAgain) {
  const Case of;
  ranks(of.ranks * Case::kDataRanks).run([&](World& world) {
    InStages rank(world, of, of.options());
    InStages other(world, of, of.options());
    for (int step = 0; step < 2; ++step) rank.step(step);
    rank.part.zero_grad();
    for (auto* each : {&rank, &other}) each->set_stages(of, 2);
    for (int step = 0; step < 2; ++step) {
      rank.step(step);
      other.step(step);
    }
    expect_same(whole_gradients(rank.part), whole_gradients(other.part));
  });
}

/// Where on one rank of four something throws.
enum class Midst : std::uint8_t { kForward, kInputGradient, kWeightGradient };

/// Belongs to this thread, which runs a rank's stages: throws when a W adds a weight's gradient.
class ThrowsInWeightGradient {
 public:
  explicit ThrowsInWeightGradient(std::function<void()> mishap)
      : mishap_(std::move(mishap)),
        computing_(test_hooks::computing,
                   [this](const pipeline::Action* action) {
                     is_in_ =
                         action != nullptr && action->kind == pipeline::ActionKind::kWeightGradient;
                   }),
        accepted_(test_hooks::after_accept, [this](const GradContract&, const at::Tensor&) {
          if (std::this_thread::get_id() == thread_ && is_in_) mishap_();
        }) {}

 private:
  const std::function<void()> mishap_;
  const std::thread::id thread_ = std::this_thread::get_id();
  bool is_in_ = false;
  const test_hooks::Set<decltype(test_hooks::computing)> computing_;
  const test_hooks::Set<decltype(test_hooks::after_accept)> accepted_;
};

/// A piece throws the second time that it comes to there; then recover().
void expect_a_named_end_and_a_right_step(Midst midst, const std::string& slot) {
  Case of;
  of.kind = pipeline::Kind::kZeroBubble;
  const auto expected = run_whole(of);
  std::vector<std::string> errors(4);
  Tensors gradients;
  std::mutex mutex;
  ranks(4).run([&](World& world) {
    InStages rank(world, of, of.options());
    rank.step(0);
    rank.part.zero_grad();
    std::optional<ThrowsInWeightGradient> in_weights;
    if (world.rank() == 3) {  // of the last stage
      auto& part = *rank.part.module();
      const auto mishap = [calls = std::make_shared<int>(0)] {
        if (++*calls == 2) throw std::runtime_error("a piece's own mishap");
      };
      if (midst == Midst::kForward) part.pieces.at(2)->module()->before = mishap;
      if (midst == Midst::kInputGradient) part.in_backward = mishap;
      if (midst == Midst::kWeightGradient) in_weights.emplace(mishap);
    }
    errors[static_cast<std::size_t>(world.rank())] = thrown_by([&] { rank.step(0); });
    world.recover();
    rank.part.zero_grad();
    rank.step(0);
    const auto mine = whole_gradients(rank.part);
    const std::lock_guard lock(mutex);
    for (const auto& [name, gradient] : mine) gradients[name] = gradient;
  });
  EXPECT_THAT(errors, Each(Says("rank 3", slot)));
  EXPECT_THAT(errors[3], Says("a piece's own mishap"));
  expect_same(gradients, expected.gradients.at(0));
}

TEST(PipelineOfHandles, AnExceptionInAForwardEndsAllRanksByNameAndTheNextStepIsRight) {
  expect_a_named_end_and_a_right_step(Midst::kForward, "slot 1F1 (stage 1, micro-batch 1)");
}

TEST(PipelineOfHandles, AnExceptionInABackwardEndsAllRanksByNameAndTheNextStepIsRight) {
  expect_a_named_end_and_a_right_step(Midst::kInputGradient, "slot 1I0 (stage 1, micro-batch 0)");
}

TEST(PipelineOfHandles, AnExceptionInAWeightGradientEndsAllRanksByNameAndTheNextStepIsRight) {
  expect_a_named_end_and_a_right_step(Midst::kWeightGradient, "slot 1W0 (stage 1, micro-batch 0)");
}

TEST(PipelineOfHandles, AScheduleOutOfAFileRunsAsOneOfAKind) {
  const TemporaryFolder folder;
  Case of;
  of.kind = pipeline::Kind::kZeroBubbleV;
  const auto schedule = pipeline::make_schedule(of.kind, {of.ranks, 2, of.micro_batches});
  auto options = of.options();
  options.schedule_file = (folder.path() / "own.csv").string();
  std::ofstream(options.schedule_file) << pipeline::to_csv(pipeline::lower(schedule));
  expect_same(run_in_stages(of, options), run_whole(of));

  options.micro_batches = 5;
  ranks(of.ranks).run([&](World& world) {
    EXPECT_THAT(thrown_by([&] { Pipeline(stages_mesh(world), options); }),
                Says("4 micro-batches", "5 micro-batches"));
  });
}

TEST_ON_RANKS(PipelineOfHandles, WhatDoesNotFitIsRefused, 4) {
  const auto mesh = world.mesh(MeshShape::dense(2, 1, 2, 1, 1));
  PipelineOptions options;
  options.micro_batches = 1;
  EXPECT_THAT(thrown_by([&] { Pipeline(mesh, options); }), Says("1F1B"));
  options.micro_batches = 2;
  options.schedule = "1G1B";
  EXPECT_THAT(thrown_by([&] { Pipeline(mesh, options); }), Says("1G1B"));
  options.schedule = "ZBV";
  Pipeline pipeline(mesh, options);
  EXPECT_EQ(pipeline.stage_count(), 4);
  EXPECT_EQ(pipeline.stages(),
            (mesh.coordinate("pp") == 0 ? std::vector{0, 3} : std::vector{1, 2}));
  const auto stage = make_stage([](const auto& x) { return x; }, {}, {});
  EXPECT_THAT(thrown_by([&] { pipeline.set_stages({stage}); }),
              Says("found 1 stages", "expected 2"));
  EXPECT_THAT(thrown_by([&] { pipeline.set_stages({stage, stage}); }),
              Says("plain modules on 2 ranks a stage"));
  EXPECT_THAT(thrown_by([&] { pipeline.forward({}); }), Says("found no stages"));
}

}  // namespace
}  // namespace tessera::test::pipeline_sharded_test
