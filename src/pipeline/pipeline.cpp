#include "tessera/pipeline.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/mapped_file.h"
#include "pipeline/kinds.h"
#include "pipeline/runner.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/valid_program.h"
#include "tessera/error.h"
#include "tessera/shard.h"
#include "tessera/world.h"

namespace tessera {
namespace pipeline {

bool Boundary::goes_back() const {
  return !back.empty() ||
         std::ranges::any_of(activations, [](const auto& tensor) { return tensor.has_gradient; });
}

Stage::Roots Stage::roots(std::int64_t, const Tensors& results, const Tensors&) {
  Roots roots;
  for (const at::Tensor& result : results) {
    if (!result.defined() || !result.requires_grad()) continue;
    TESSERA_CHECK(result.numel() == 1, ErrorKind::kUsage, "result of the last stage: found shape ",
                  result.sizes(), ", expected one element, from which backward begins with 1");
    roots.tensors.push_back(result);
    roots.gradients.push_back(at::ones_like(result.detach()));
  }
  return roots;
}

Tensors Stage::back(std::int64_t) { return {}; }

}  // namespace pipeline

namespace {

using pipeline::Boundary;
using pipeline::BoundaryTensor;
using pipeline::Stage;
using pipeline::Tensors;

constexpr std::int64_t kMostCsvBytes = std::int64_t{64} << 20;

pipeline::ValidProgram program_of(const PipelineOptions& options, int ranks) {
  if (options.schedule_file.empty()) {
    const auto& row = pipeline::row_of(pipeline::kind_named(options.schedule));
    const int stages = options.stages_per_rank == 0 ? row.stages_per_rank : options.stages_per_rank;
    return pipeline::ValidProgram(
        pipeline::make_schedule(row.kind, {ranks, stages, options.micro_batches}));
  }
  const auto program = pipeline::parse_csv(read_text_file(options.schedule_file, kMostCsvBytes),
                                           options.schedule_file);
  const auto stages = static_cast<int>(program.rank_of.size());
  const auto rows = static_cast<int>(program.steps.size());
  TESSERA_CHECK(rows == ranks && program.micro_batches == options.micro_batches &&
                    (options.stages_per_rank == 0 ||
                     std::int64_t{options.stages_per_rank} * ranks == std::int64_t{stages}),
                ErrorKind::kConfig, options.schedule_file, ": found ", rows, " ranks, ", stages,
                " stages and ", program.micro_batches, " micro-batches, expected ", ranks,
                " ranks, ", options.micro_batches, " micro-batches",
                options.stages_per_rank == 0
                    ? ""
                    : concat(" and ", options.stages_per_rank, " stages a rank"));
  return pipeline::ValidProgram(program);
}

/// A user's stage in one step: the first one has its inputs, the last one its loss.
class InStep : public Stage {
 public:
  InStep(Stage& stage, const Pipeline::Inputs* inputs, const Pipeline::Loss* loss)
      : stage_(stage), inputs_(inputs), loss_(loss) {}

  Boundary input(std::int64_t micro_batch) const override { return stage_.input(micro_batch); }
  Boundary output(std::int64_t micro_batch) const override { return stage_.output(micro_batch); }
  Tensors forward(std::int64_t micro_batch, const Tensors& inputs) override {
    auto outputs =
        stage_.forward(micro_batch, inputs_ != nullptr ? (*inputs_)(micro_batch) : inputs);
    return loss_ != nullptr ? Tensors{(*loss_)(micro_batch, outputs)} : outputs;
  }
  Roots roots(std::int64_t micro_batch, const Tensors& results, const Tensors& back) override {
    return stage_.roots(micro_batch, results, back);
  }
  Tensors back(std::int64_t micro_batch) override { return stage_.back(micro_batch); }

 private:
  Stage& stage_;
  const Pipeline::Inputs* inputs_;  ///< of the first stage
  const Pipeline::Loss* loss_;      ///< of the last one
};

class PlainStage : public Stage {
 public:
  PlainStage(std::function<Tensors(const Tensors&)> forward, std::vector<BoundaryTensor> input,
             std::vector<BoundaryTensor> output)
      : forward_(std::move(forward)), input_{std::move(input)}, output_{std::move(output)} {}

  Boundary input(std::int64_t) const override { return input_; }
  Boundary output(std::int64_t) const override { return output_; }
  Tensors forward(std::int64_t, const Tensors& inputs) override { return forward_(inputs); }

 private:
  std::function<Tensors(const Tensors&)> forward_;
  Boundary input_;
  Boundary output_;
};

}  // namespace

std::shared_ptr<Stage> make_stage(std::function<Tensors(const Tensors&)> forward,
                                  std::vector<BoundaryTensor> input,
                                  std::vector<BoundaryTensor> output) {
  return std::make_shared<PlainStage>(std::move(forward), std::move(input), std::move(output));
}

namespace detail {

const at::Tensor& only(const Tensors& inputs) {
  TESSERA_CHECK(inputs.size() == 1, ErrorKind::kUsage, "stage: found ", inputs.size(),
                " tensors for a forward of one; declare one, or give the module a forward of "
                "const std::vector<at::Tensor>&");
  return inputs.front();
}

}  // namespace detail

struct Pipeline::Impl {
  Impl(const Mesh& of, const PipelineOptions& asked)
      : mesh(of),
        options(asked),
        training(program_of(asked, of.size_of(axis::kPipeline))),
        forwards(pipeline::forward_only(training.schedule()), pipeline::Passes::kForward),
        ids(training.schedule().stages_of(of.coordinate(axis::kPipeline))) {}

  std::vector<Tensors> run(const pipeline::ValidProgram& program, const Inputs& inputs,
                           const Loss* loss) {
    TESSERA_CHECK(!stages.empty(), ErrorKind::kUsage,
                  "pipeline: found no stages, expected set_stages() before the first step");
    std::vector<InStep> in_step;
    in_step.reserve(stages.size());
    std::vector<Stage*> pointers;
    const int last = program.schedule().stages() - 1;
    for (std::size_t i = 0; i < stages.size(); ++i) {
      pointers.push_back(&in_step.emplace_back(*stages[i], ids[i] == 0 ? &inputs : nullptr,
                                               ids[i] == last ? loss : nullptr));
    }
    if (root == nullptr || program.passes() == pipeline::Passes::kForward) {
      return runner->run(program, pointers, {});
    }
    StepScopeOptions scoped;
    scoped.reshard = options.reshard;
    scoped.sync_every_micro_batch = options.sync_every_micro_batch;
    // Other stages enter other units.
    scoped.schedule = concat("pipeline ", program.hash(), ", stages set ", times_set, " times",
                             options.overlap ? "" : ", pairs in turn");
    scoped.stages = static_cast<int>(stages.size());
    StepScope scope(*root, scoped);
    return runner->run(program, pointers,
                       {.scope = &scope,
                        .reduce_every = options.sync_every_micro_batch,
                        .overlap = options.overlap});
  }

  Mesh mesh;
  PipelineOptions options;
  pipeline::ValidProgram training;
  pipeline::ValidProgram forwards;
  std::vector<int> ids;
  std::vector<std::shared_ptr<Stage>> stages;
  ShardedBase* root = nullptr;
  std::uint64_t times_set = 0;
  std::optional<pipeline::Runner> runner;
};

Pipeline::Pipeline(const Mesh& mesh, const PipelineOptions& options)
    : impl_(std::make_unique<Impl>(mesh, options)) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

int Pipeline::stage_count() const { return impl_->training.schedule().stages(); }
const std::vector<int>& Pipeline::stages() const { return impl_->ids; }
bool Pipeline::has_first() const { return impl_->ids.front() == 0; }
bool Pipeline::has_last() const { return impl_->ids.back() == stage_count() - 1; }

void Pipeline::set_stages(std::vector<std::shared_ptr<Stage>> stages, ShardedBase* root) {
  TESSERA_CHECK(
      stages.size() == impl_->ids.size() &&
          std::ranges::none_of(stages, [](const auto& stage) { return stage == nullptr; }),
      ErrorKind::kUsage, "set_stages: found ", stages.size(), " stages or a null one, expected ",
      impl_->ids.size(), ", one for each of stages()");
  const auto& mesh = impl_->mesh;
  const int others = mesh.shape().size() / mesh.size_of(axis::kPipeline);
  TESSERA_CHECK(root == nullptr || std::ssize(stages) <= StepScopeOptions::kMostStages,
                ErrorKind::kUsage, "set_stages: found ", stages.size(),
                " stages of a rank in one handle, expected at most ",
                StepScopeOptions::kMostStages);
  TESSERA_CHECK(root != nullptr || others == 1, ErrorKind::kUsage,
                "set_stages: found plain modules on ", others,
                " ranks a stage, whose gradients nothing would sum, expected a handle of "
                "fully_shard as root");
  impl_->stages = std::move(stages);
  impl_->root = root;
  ++impl_->times_set;
  if (impl_->runner) return;
  impl_->runner.emplace(pipeline::ties_of(mesh));
}

std::vector<at::Tensor> Pipeline::step(const Inputs& inputs, const Loss& loss) {
  std::vector<at::Tensor> losses;
  for (const auto& results : impl_->run(impl_->training, inputs, &loss)) {
    losses.insert(losses.end(), results.begin(), results.end());
  }
  return losses;
}

std::vector<Tensors> Pipeline::forward(const Inputs& inputs) {
  return impl_->run(impl_->forwards, inputs, nullptr);
}

}  // namespace tessera
