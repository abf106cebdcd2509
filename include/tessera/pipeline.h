// Pipelines: a model cut into stages that ranks compute side by side, micro-batch by micro-batch.
//
//   const auto mesh = world.mesh(MeshShape::dense(2, 1, 1, 1, 1));     // pp = 2
//   Pipeline pipeline(mesh, {.schedule = "1F1B", .micro_batches = 4});
//   auto part = fully_shard(std::make_shared<Part>(pipeline.stages().front()), mesh);
//   pipeline.set_stages({make_stage(part, border, border)}, &part);
//   const auto losses = pipeline.step(inputs, loss);                   // gradients on the shards
//
// A rank makes its own stages only. Where they lie, and what is computed when, says a schedule: one
// of the known kinds or a file (docs/pipeline.md). Between stages go the tensors that both ends
// have declared; gradients come back for those that say so. Each stage's backward is a graph of its
// own: whole tensors, not graphs, cross a border. Next: shard.h, for the handles of stages.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/step_scope.h"

namespace tessera {

class ShardedBase;

namespace pipeline {

using Tensors = std::vector<at::Tensor>;

/// One tensor that one stage gives to the next.
struct BoundaryTensor {
  std::vector<std::int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  bool has_gradient = true;  ///< a gradient of it travels back
  bool operator==(const BoundaryTensor&) const = default;
};

/// The tensors that cross between two neighbours for one micro-batch. Both ends declare the same,
/// and at most 16 in each direction.
struct Boundary {
  std::vector<BoundaryTensor> activations;
  /// Plain values for the stage before, which travel beside the gradients.
  std::vector<BoundaryTensor> back = {};
  bool operator==(const Boundary&) const = default;

  /// Whether anything travels back.
  bool goes_back() const;
};

/// A stage as the runner sees it: one part of a model on one rank. For a module with
/// `forward(tensors) -> tensors` there is make_stage().
///
/// Micro-batches are counted from 0. In every known kind a stage sees them in that order, forwards
/// and backwards each; several may be under way at once.
class Stage {
 public:
  virtual ~Stage() = default;

  /// To the stage before; of the first one it is not asked. The same answer within a step, and at
  /// the other end.
  virtual Boundary input(std::int64_t micro_batch) const = 0;
  /// To the stage after; of the last one it is not asked.
  virtual Boundary output(std::int64_t micro_batch) const = 0;

  /// `inputs` are as input() says, those with a gradient are leaves; of the first stage they are
  /// what the step was given, or nothing. Results are as output() says; those of the last stage are
  /// what its backward begins with (losses), and are kept until the step ends.
  virtual Tensors forward(std::int64_t micro_batch, const Tensors& inputs) = 0;

  /// Tensors of this stage's graph that backward begins with, and their gradients.
  struct Roots {
    Tensors tensors;
    Tensors gradients;
  };
  /// `results` are those of the last stage's forward, and empty elsewhere: there backward begins
  /// with what has come back, and this adds to it (an auxiliary loss, of which `back` says the
  /// rest). By default `results` with 1 each, of which each has one element. What needs no gradient
  /// is left out.
  virtual Roots roots(std::int64_t micro_batch, const Tensors& results, const Tensors& back);

  /// For the stage before, as input().back says: asked when the micro-batch's B or I has run.
  virtual Tensors back(std::int64_t micro_batch);
};

}  // namespace pipeline

struct PipelineOptions {
  std::string schedule = "1F1B";   ///< a kind (docs/pipeline.md), PyTorch's names too
  std::string schedule_file = {};  ///< of PyTorch's CSV, instead of a kind; "" = none
  int micro_batches = 1;           ///< a step; of a file, too, which must have as many
  int stages_per_rank = 0;         ///< 0 = the kind's; of a file it follows
  StepReshard reshard = StepReshard::kStep;
  /// Gradients are reduced after each micro-batch, not once a step: less memory, more is sent.
  bool sync_every_micro_batch = false;
  /// A forward beside a backward of the schedule (DualPipeV, Paired1F1B): StepScope::run_pair().
  /// Else one runs after the other.
  bool overlap = true;
};

/// One pipeline over the axis "pp" of a mesh, and what runs it. Ranks that differ on other axes
/// have pipelines of their own; their gradients meet in the handles, as without one.
///
/// Every call below that communicates is collective among the ranks of the pipeline and, by their
/// handles, of the mesh. Threads: the rank's own.
class Pipeline {
 public:
  using Tensors = pipeline::Tensors;
  /// What the first stage is given for a micro-batch; called on its rank.
  using Inputs = std::function<Tensors(std::int64_t micro_batch)>;
  /// Of what the last stage's module returns: a loss of one element; called on its rank. Gradients
  /// are of the sum over micro-batches, as where each is a backward of its own: divide here.
  using Loss = std::function<at::Tensor(std::int64_t micro_batch, const Tensors& outputs)>;

  /// Communicates nothing. Errors: kConfig for a kind or file that cannot be what is asked for, a
  /// file that does not validate (with all that was found), another number of ranks than axis "pp"
  /// has; kFormat, kIo of the file.
  Pipeline(const Mesh& mesh, const PipelineOptions& options);
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  int stage_count() const;                 ///< of all ranks
  const std::vector<int>& stages() const;  ///< of this rank, ascending
  bool has_first() const;                  ///< whether this rank has the first stage
  bool has_last() const;

  /// Those of this rank, in the order of stages(). `root`: the handle that holds their parameters,
  /// by which gathers and reductions follow the schedule: the stage's own, or that around several;
  /// it must live as long. Null for plain modules, whose gradients stand in their parameters:
  /// where there is one data rank. Micro-batches of a stage go through the same handles in every
  /// step, until stages are set again, on all ranks at the same place. With a root the forward of each
  /// stage goes through some handle: one that only reshapes tensors belongs into the stage before or
  /// after (kUsage in its first forward). Errors: kUsage for another number of stages, with a root
  /// for more than StepScopeOptions::kMostStages of this rank; for plain modules and several ranks
  /// in a stage.
  void set_stages(std::vector<std::shared_ptr<pipeline::Stage>> stages,
                  ShardedBase* root = nullptr);

  /// Forward and backward of all micro-batches. The losses, without their graphs, where this rank
  /// has the last stage, else nothing. Gradients are added to those that stand, as by backward().
  /// Errors: kContract, on all ranks, where two ends of a border have declared different things;
  /// those of the stages, with rank, stage, micro-batch and slot: the World is aborted then, so
  /// that the others end, too (World::recover()).
  std::vector<at::Tensor> step(const Inputs& inputs, const Loss& loss);

  /// Forwards alone, without a graph: what the last stage returns for each micro-batch, on its
  /// rank. Errors: as step().
  std::vector<Tensors> forward(const Inputs& inputs);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A stage whose borders are the same for all micro-batches. `input` and `output`: what crosses to
/// the stages before and after; of the first and the last stage nothing is asked there.
std::shared_ptr<pipeline::Stage> make_stage(
    std::function<pipeline::Tensors(const pipeline::Tensors&)> forward,
    std::vector<pipeline::BoundaryTensor> input, std::vector<pipeline::BoundaryTensor> output);

namespace detail {

/// Errors: kUsage for another number of tensors.
const at::Tensor& only(const pipeline::Tensors& inputs);

template <class Module>
concept HasForward = requires { &Module::forward; };

}  // namespace detail

/// The same of a module or its handle, with `forward(const std::vector<at::Tensor>&) ->
/// std::vector<at::Tensor>`, or from one tensor to one tensor. `module` must live as long.
template <detail::HasForward Module>
std::shared_ptr<pipeline::Stage> make_stage(Module& module,
                                            std::vector<pipeline::BoundaryTensor> input,
                                            std::vector<pipeline::BoundaryTensor> output) {
  const auto forward = [&module](const pipeline::Tensors& inputs) -> pipeline::Tensors {
    if constexpr (std::is_invocable_v<decltype(&Module::forward), Module&,
                                      const pipeline::Tensors&>) {
      return module.forward(inputs);
    } else {
      return {module.forward(detail::only(inputs))};
    }
  };
  return make_stage(std::function<pipeline::Tensors(const pipeline::Tensors&)>(forward),
                    std::move(input), std::move(output));
}

}  // namespace tessera
