// Sums of bf16 gradients in a pipeline: unrounded in every schedule, also where two ends of it hold
// a copy each.

#include <mutex>

#include "base/test_hooks.h"
#include "caught.h"
#include "dist/staged.h"
#include "pipeline/kinds.h"
#include "support/test.h"
#include "tessera/pipeline.h"

namespace tessera::test::pipeline_sums_test {
namespace {

/// The shared parameters of stages, and their layout.
struct Layout {
  int replicas = 1;
  int shards = 2;
  PrecisionPolicy policy = in_bfloat16();
  bool tied = false;  ///< the ends share a factor: one where a rank has both, else a copy each

  int data_ranks() const { return replicas * shards; }
  Mesh mesh(World& world) const { return world.mesh(MeshShape::dense(2, replicas, shards, 1, 1)); }
};

/// A unit whose contract says that the ends of the pipeline hold a copy each.
std::shared_ptr<Sharded<Factor>> copy_of_two(const Mesh& mesh, const PrecisionPolicy& policy) {
  ShardOptions options;
  options.name = "shared";
  const auto plain = fully_shard(std::make_shared<Factor>(), mesh, policy, options);
  auto contract = *plain.shards().front().contract;
  contract.reductions.copies = {0, mesh.size_of(axis::kPipeline) - 1};
  options.contracts = std::make_shared<const std::vector<GradContract>>(1, contract);
  return std::make_shared<Sharded<Factor>>(
      fully_shard(std::make_shared<Factor>(), mesh, policy, options));
}

/// A factor a stage, and one that the ends share.
class Factors : public torch::nn::Module {
 public:
  Factors(const Mesh& mesh, const Pipeline& pipeline, const Layout& layout)
      : last_(pipeline.stage_count() - 1) {
    for (const int stage : pipeline.stages()) {
      factors_[stage] = register_module(concat("factor", stage),
                                        std::make_shared<Sharded<Factor>>(fully_shard(
                                            std::make_shared<Factor>(), mesh, layout.policy)));
    }
    const bool has_both = pipeline.has_first() && pipeline.has_last();
    if (has_both) {
      shared_ = register_module("shared", std::make_shared<Factor>());
    } else if (layout.tied && (pipeline.has_first() || pipeline.has_last())) {
      copy_ = register_module("shared", copy_of_two(mesh, layout.policy));
    }
  }
  at::Tensor forward(int stage, const at::Tensor& x) {
    const at::Tensor y = factors_.at(stage)->forward(x);
    if (stage != 0 && stage != last_) return y;
    if (copy_ != nullptr) return copy_->forward(y);
    return shared_ != nullptr ? shared_->forward(y) : y;
  }

 private:
  int last_;
  std::map<int, std::shared_ptr<Sharded<Factor>>> factors_;
  std::shared_ptr<Factor> shared_;
  std::shared_ptr<Sharded<Factor>> copy_;
};

/// The sums of all ranks by name, those of two steps one after the other: as many as ranks have it.
using Sums = std::map<std::string, std::vector<double>>;

/// Two steps in which each factor is given `values`, a micro-batch each, on every data rank.
Sums sums_of(const PipelineOptions& options, const Layout& layout,
             const std::vector<double>& values) {
  Sums sums;
  std::mutex mutex;
  ranks(2 * layout.data_ranks()).run([&](World& world) {
    const auto mesh = layout.mesh(world);
    Pipeline pipeline(mesh, options);
    auto part = fully_shard(std::make_shared<Factors>(mesh, pipeline, layout), mesh, layout.policy);
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
            return pipeline::Tensors{
                here(at::full({1, 1}, values.at(static_cast<std::size_t>(k)), at::kBFloat16))};
          },
          [](std::int64_t, const pipeline::Tensors& outputs) { return outputs.at(0).sum(); });
      const auto gradients = whole_gradients(part);
      const bool shares =
          layout.tied || (pipeline.has_first() && pipeline.has_last());  // 2 ranks: both are ends
      EXPECT_EQ(gradients.size(), pipeline.stages().size() + (shares ? 1U : 0U));
      const std::lock_guard lock(mutex);
      for (const auto& [name, gradient] : gradients) {
        sums[name].push_back(gradient.item<double>());
      }
      part.zero_grad();
    }
  });
  return sums;
}

/// The shared factor is used twice, each other one once.
void expect_each(const Sums& sums, double once) {
  EXPECT_FALSE(sums.empty());
  for (const auto& [name, found] : sums) {
    const double expected = name.starts_with("shared") ? 2 * once : once;
    for (const double sum : found) EXPECT_EQ(sum, expected) << name;
  }
}

const std::vector<double> kClassic{256, 1, -256, 0};

PipelineOptions options_of(std::string_view kind, StepReshard reshard, bool sync_every) {
  PipelineOptions options;
  options.schedule = std::string(kind);
  options.micro_batches = 4;
  options.reshard = reshard;
  options.sync_every_micro_batch = sync_every;
  return options;
}

/// Every way in which a list of `kind` can be run.
template <class Body>
void for_each_way(std::string_view kind, const Body& body) {
  for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
    for (const bool sync_every : {false, true}) {
      SCOPED_TRACE(concat(kind, reshard == StepReshard::kStep ? "" : ", gathered each time",
                          sync_every ? ", reduced after each micro-batch" : ""));
      body(options_of(kind, reshard, sync_every));
    }
  }
}

// The classic: in bf16 256 + 1 is 256.
TEST(PipelineSums, WhatBf16WouldLoseStaysInEveryKind) {
  for (const auto& row : pipeline::kinds()) {
    for_each_way(row.name, [](const PipelineOptions& options) {
      expect_each(sums_of(options, {}, kClassic), 1.0);
    });
  }
}

// With the two data ranks a slice each of it, one that has nothing of it; whole on replicas; both.
TEST(PipelineSums, WhatBf16WouldLoseStaysInCopiesAtBothEnds) {
  for (const auto& layout : {Layout{.tied = true}, Layout{.replicas = 2, .shards = 1, .tied = true},
                             Layout{.replicas = 2, .shards = 2, .tied = true}}) {
    for (const char* kind : {"1F1B", "ZB1P"}) {
      SCOPED_TRACE(concat(layout.replicas, " replicas of ", layout.shards));
      for_each_way(kind, [&](const PipelineOptions& options) {
        const Sums sums = sums_of(options, layout, kClassic);
        expect_each(sums, 1.0);
        // Every rank has it, in both steps.
        EXPECT_EQ(sums.at("shared.linear.weight").size(),
                  4U * static_cast<unsigned>(layout.data_ranks()));
      });
    }
  }
}

// Naive: each end's sum travels in the reduce dtype. In bf16 257 is 256, and 514 is 512.
TEST(PipelineSums, CopiesAreAddedAsTheyWereSummedForAnyWire) {
  auto policy = in_bfloat16();
  policy.reduce_dtype = DType::kBFloat16;
  for (const int replicas : {1, 2}) {
    const Layout layout{.replicas = replicas, .shards = 1, .policy = policy, .tied = true};
    for (const char* kind : {"1F1B", "ZB1P"}) {
      SCOPED_TRACE(concat(kind, ", ", replicas, " replicas"));
      const Sums sums =
          sums_of(options_of(kind, StepReshard::kStep, false), layout, {256, 1, 0, 0});
      for (const double sum : sums.at("shared.linear.weight")) EXPECT_EQ(sum, 514.0);
      // A gradient that is no copy goes over the wire of the replicas.
      for (const double sum : sums.at("factor0.linear.weight")) {
        EXPECT_EQ(sum, replicas == 1 ? 257.0 : 256.0);
      }
    }
  }
}

/// Each sum as bf16 has it.
void keep_in_bf16(const GradContract& /*contract*/, const at::Tensor& slot) {
  slot.copy_(slot.to(at::kBFloat16));
}

TEST(PipelineSums, SumsKeptInBf16AreCaughtInEveryKind) {
  const test_hooks::Set rounds(test_hooks::after_accept, keep_in_bf16);
  const auto expect_caught = [](const PipelineOptions& options, const Layout& layout) {
    SCOPED_TRACE(concat(options.schedule, layout.tied ? ", tied" : ""));
    const Sums sums = sums_of(options, layout, kClassic);
    const auto failures = failures_of([&] { expect_each(sums, 1.0); });
    std::size_t count = 0;
    for (const auto& [name, found] : sums) count += found.size();
    EXPECT_EQ(failures.size(), count) << "of these sums each is wrong";
  };
  for (const auto& row : pipeline::kinds()) {
    expect_caught(options_of(row.name, StepReshard::kStep, false), {});
  }
  expect_caught(options_of("ZB1P", StepReshard::kStep, false), {.tied = true});
}

}  // namespace
}  // namespace tessera::test::pipeline_sums_test
