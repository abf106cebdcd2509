// Sums of bf16 gradients in a pipeline: unrounded, whatever the schedule.
#include <gtest/gtest.h>

#include <map>

#include "dist/staged.h"
#include "pipeline/kinds.h"
#include "tessera/pipeline.h"

namespace tessera::test::pipeline_sums_test {
namespace {

/// A factor a stage; where one rank has both ends one that these share, too.
class Factors : public torch::nn::Module {
 public:
  Factors(const Mesh& mesh, const Pipeline& pipeline) : last_(pipeline.stage_count() - 1) {
    for (const int stage : pipeline.stages()) {
      factors_[stage] = register_module(concat("factor", stage),
                                        std::make_shared<Sharded<Factor>>(fully_shard(
                                            std::make_shared<Factor>(), mesh, in_bfloat16())));
    }
    if (pipeline.has_first() && pipeline.has_last()) {
      shared_ = register_module("shared", std::make_shared<Factor>());
    }
  }
  at::Tensor forward(int stage, const at::Tensor& x) {
    const at::Tensor y = factors_.at(stage)->forward(x);
    const bool is_end = stage == 0 || stage == last_;
    return shared_ != nullptr && is_end ? shared_->forward(y) : y;
  }

 private:
  int last_;
  std::map<int, std::shared_ptr<Sharded<Factor>>> factors_;
  std::shared_ptr<Factor> shared_;
};

/// Two steps of 256, 1, -256 on two ranks of a pipeline and two data ranks.
void expect_one(const PipelineOptions& options) {
  constexpr double kValues[] = {256, 1, -256, 0};
  ranks(4).run([&](World& world) {
    const auto mesh = world.mesh(MeshShape::dense(2, 1, 2, 1, 1));
    Pipeline pipeline(mesh, options);
    auto part = fully_shard(std::make_shared<Factors>(mesh, pipeline), mesh, in_bfloat16());
    const std::vector<pipeline::BoundaryTensor> border{{{1, 1}, at::kBFloat16}};
    std::vector<std::shared_ptr<pipeline::Stage>> stages;
    for (const int stage : pipeline.stages()) {
      stages.push_back(make_stage(
          [&part, stage](const pipeline::Tensors& inputs) {
            return pipeline::Tensors{part.forward(stage, inputs.at(0))};
          },
          border, border));
    }
    pipeline.set_stages(stages, &part);
    for (int step = 0; step < 2; ++step) {
      pipeline.step(
          [&](std::int64_t k) {
            return pipeline::Tensors{at::full({1, 1}, kValues[k], at::kBFloat16)};
          },
          [](std::int64_t, const pipeline::Tensors& outputs) { return outputs.at(0).sum(); });
      const auto gradients = whole_gradients(part);
      const bool shares = pipeline.has_first() && pipeline.has_last();
      EXPECT_EQ(gradients.size(), pipeline.stages().size() + (shares ? 1U : 0U));
      for (const auto& [name, gradient] : gradients) {
        EXPECT_EQ(gradient.item<double>(), name.starts_with("shared") ? 2.0 : 1.0) << name;
      }
      part.zero_grad();
    }
  });
}

// The classic: in bf16 256 + 1 is 256.
TEST(PipelineSums, WhatBf16WouldLoseStaysInEveryKind) {
  for (const auto& row : pipeline::kinds()) {
    for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
      for (const bool sync_every : {false, true}) {
        SCOPED_TRACE(concat(row.name, sync_every ? ", reduced after each micro-batch" : ""));
        PipelineOptions options;
        options.schedule = std::string(row.name);
        options.micro_batches = 4;
        options.reshard = reshard;
        options.sync_every_micro_batch = sync_every;
        expect_one(options);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test::pipeline_sums_test
