// A user's pipeline over sharded stages (tessera/pipeline.h) beside the same model, layout and
// micro-batches without one: losses, gradients and weights bit for bit.
#include <gmock/gmock.h>

#include <fstream>
#include <mutex>

#include "dist/pipeline_runs.h"
#include "dist/staged.h"
#include "pipeline/schedule_csv.h"
#include "tessera/pipeline.h"
#include "unit/io/temporary_folder.h"

namespace tessera::test::pipeline_sharded_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kWidth = 6;
constexpr int kPieces = 2;  // of a stage

struct Case {
  pipeline::Kind kind = pipeline::Kind::kOneFOneB;
  int ranks = 2;  ///< of a pipeline
  int micro_batches = 4;
  bool bfloat16 = false;
  RecomputeMode mode = RecomputeMode::kNone;
  StepReshard reshard = StepReshard::kStep;

  int stages() const { return ranks * pipeline::row_of(kind).stages_per_rank; }
  PrecisionPolicy policy() const { return bfloat16 ? in_bfloat16() : PrecisionPolicy{}; }
};

constexpr int kDataRanks = 2;
constexpr int kSteps = 2;

/// The pieces of some stages, and with the first one the scale before them: names as in Staged.
class Part : public torch::nn::Module {
 public:
  Part(const Mesh& mesh, const std::vector<int>& stages, const Case& of) {
    if (stages.front() == 0) scale = register_parameter("scale", seeded(7, {kWidth}) + 1.0);
    for (const int stage : stages) {
      for (int i = stage * kPieces; i < (stage + 1) * kPieces; ++i) {
        const auto seed = 100 + 10 * static_cast<std::uint64_t>(i);
        const auto piece = std::make_shared<Piece>(seed, kWidth, of.mode);
        pieces[i] = register_module(concat("piece", i), std::make_shared<Sharded<Piece>>(
                                                            fully_shard(piece, mesh, of.policy())));
      }
    }
  }
  at::Tensor forward(int stage, const at::Tensor& x) {
    at::Tensor y = stage == 0 ? x * scale : x;
    for (int i = stage * kPieces; i < (stage + 1) * kPieces; ++i) y = pieces.at(i)->forward(y);
    return y;
  }
  at::Tensor scale;
  std::map<int, std::shared_ptr<Sharded<Piece>>> pieces;
};

/// What kSteps steps leave, of each data rank and of the whole model.
struct Result {
  std::map<std::pair<int, int>, std::vector<at::Tensor>> losses;  ///< by data rank and step
  std::map<int, Tensors> gradients;                               ///< by step
  Tensors weights;
};

void take(ShardedBase& handle, int step, bool is_first_data_rank, std::mutex& mutex,
          Result& result) {
  auto gradients = whole_gradients(handle);
  SgdOptions options;
  options.lr = 0.1;
  make_sgd(handle, options)->step();
  auto weights = whole_parameters(handle);
  handle.zero_grad();
  if (!is_first_data_rank) return;
  const std::lock_guard lock(mutex);
  result.gradients[step].merge(gradients);
  if (step + 1 == kSteps) result.weights.merge(weights);
}

Result run_whole(const Case& of) {
  Result result;
  std::mutex mutex;
  ranks(kDataRanks).run([&](World& world) {
    StagedOptions options;
    options.stages = of.stages();
    options.pieces = kPieces;
    options.width = kWidth;
    options.mode = of.mode;
    StagedModel model(data_mesh(world), options, of.policy());
    for (int step = 0; step < kSteps; ++step) {
      std::vector<at::Tensor> losses;
      run_loop(
          model, of.micro_batches,
          [&](int k) { return input_of(world.rank(), 10 * step + k, kWidth); },
          /*sync_every=*/false,
          [&](const at::Tensor& loss) {
            losses.push_back(loss.detach());
            return loss;
          });
      take(model.handle, step, world.rank() == 0, mutex, result);
      const std::lock_guard lock(mutex);
      result.losses[{world.rank(), step}] = losses;
    }
  });
  return result;
}

Result run_in_stages(const Case& of, const PipelineOptions& options) {
  Result result;
  std::mutex mutex;
  ranks(of.ranks * kDataRanks).run([&](World& world) {
    const auto mesh = world.mesh(MeshShape::dense(of.ranks, 1, kDataRanks, 1, 1));
    const int data_rank = mesh.coordinate("dp_shard");
    Pipeline pipeline(mesh, options);
    auto part = fully_shard(std::make_shared<Part>(mesh, pipeline.stages(), of), mesh, of.policy());
    const std::vector<pipeline::BoundaryTensor> border{
        {{3, kWidth}, of.bfloat16 ? at::kBFloat16 : at::kFloat}};
    std::vector<std::shared_ptr<pipeline::Stage>> stages;
    for (const int stage : pipeline.stages()) {
      stages.push_back(make_stage(
          [&part, stage](const pipeline::Tensors& inputs) {
            return pipeline::Tensors{part.forward(stage, inputs.at(0))};
          },
          border, border));
    }
    pipeline.set_stages(stages, &part);
    for (int step = 0; step < kSteps; ++step) {
      const auto losses = pipeline.step(
          [&](std::int64_t k) {
            return pipeline::Tensors{input_of(data_rank, 10 * step + static_cast<int>(k), kWidth)};
          },
          [](std::int64_t, const pipeline::Tensors& outputs) { return squares(outputs.at(0)); });
      take(part, step, data_rank == 0, mutex, result);
      const std::lock_guard lock(mutex);
      if (pipeline.has_last()) result.losses[{data_rank, step}] = losses;
      EXPECT_EQ(losses.empty(), !pipeline.has_last());
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
        of.mode = index++ % 3 == 0 ? RecomputeMode::kFull : RecomputeMode::kNone;
        of.micro_batches = 4 + 2 * (index % 2);
        SCOPED_TRACE(concat(row.name, bfloat16 ? ", bf16" : ", fp32", ", case ", index));
        PipelineOptions options;
        options.schedule = std::string(row.name);
        options.micro_batches = of.micro_batches;
        options.reshard = reshard;
        expect_same(run_in_stages(of, options), run_whole(of));
      }
    }
  }
}

TEST(PipelineOfHandles, AScheduleOutOfAFileRunsAsOneOfAKind) {
  const tessera::testing::TemporaryFolder folder;
  Case of;
  of.kind = pipeline::Kind::kZeroBubbleV;
  const auto schedule = pipeline::make_schedule(of.kind, {of.ranks, 2, of.micro_batches});
  PipelineOptions options;
  options.schedule_file = (folder.path() / "own.csv").string();
  options.micro_batches = of.micro_batches;
  std::ofstream(options.schedule_file) << pipeline::to_csv(pipeline::lower(schedule));
  expect_same(run_in_stages(of, options), run_whole(of));

  options.micro_batches = 5;
  ranks(of.ranks).run([&](World& world) {
    EXPECT_THAT(error_of([&] { Pipeline(stages_mesh(world), options); }),
                AllOf(HasSubstr("4 micro-batches"), HasSubstr("5 micro-batches")));
  });
}

TEST(PipelineOfHandles, WhatDoesNotFitIsRefused) {
  ranks(4).run([](World& world) {
    const auto mesh = world.mesh(MeshShape::dense(2, 1, 2, 1, 1));
    PipelineOptions options;
    options.micro_batches = 1;
    EXPECT_THAT(error_of([&] { Pipeline(mesh, options); }), HasSubstr("1F1B"));
    options.micro_batches = 2;
    options.schedule = "1G1B";
    EXPECT_THAT(error_of([&] { Pipeline(mesh, options); }), HasSubstr("1G1B"));
    options.schedule = "ZBV";
    Pipeline pipeline(mesh, options);
    EXPECT_EQ(pipeline.stage_count(), 4);
    EXPECT_EQ(pipeline.stages(),
              (mesh.coordinate("pp") == 0 ? std::vector{0, 3} : std::vector{1, 2}));
    const auto stage = make_stage([](const auto& x) { return x; }, {}, {});
    EXPECT_THAT(error_of([&] { pipeline.set_stages({stage}); }),
                AllOf(HasSubstr("found 1 stages"), HasSubstr("expected 2")));
    EXPECT_THAT(error_of([&] { pipeline.set_stages({stage, stage}); }),
                HasSubstr("plain modules on 2 ranks a stage"));
    EXPECT_THAT(error_of([&] { pipeline.forward({}); }), HasSubstr("found no stages"));
  });
}

}  // namespace
}  // namespace tessera::test::pipeline_sharded_test
