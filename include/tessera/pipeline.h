// Pipeline: runs a model that is split into stages on several ranks, micro-batch by micro-batch.
//
//   const auto mesh = world.mesh(MeshShape::dense(2, 1, 1, 1, 1));     // pp = 2
//   Pipeline pipeline(mesh, {.schedule = "1F1B", .micro_batches = 4});
//   auto part = fully_shard(std::make_shared<Part>(pipeline.stages().front()), mesh);
//   pipeline.set_stages({make_stage(part, border, border)}, &part);
//   const auto losses = pipeline.step(inputs, loss);                   // gradients on the shards
//
// A rank makes its own stages only. A schedule, one of the known kinds or a file
// (docs/pipeline.md), places the stages and orders their work. Both ends of a boundary declare the
// tensors that cross it; gradients of those with has_gradient come back. Each stage has a graph of
// its own for its backward: tensors cross a boundary, graphs do not. Next: shard.h, for the handles
// of stages.
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

/// Tensors that enter or leave a stage.
using Tensors = std::vector<at::Tensor>;

/// One tensor that a stage passes to the next.
struct BoundaryTensor {
  std::vector<std::int64_t> shape;    ///< of one micro-batch
  at::ScalarType dtype = at::kFloat;  ///< dtype of the tensor and of its gradient
  bool has_gradient = true;           ///< whether its gradient travels back
  bool operator==(const BoundaryTensor&) const = default;
};

/// The tensors that cross between two neighbours for one micro-batch. Both ends declare the same,
/// and at most 16 in each direction.
struct Boundary {
  std::vector<BoundaryTensor> activations;  ///< from a stage to the next
  /// Plain values for the previous stage, which travel with the gradients.
  std::vector<BoundaryTensor> back = {};
  bool operator==(const Boundary&) const = default;

  /// Returns whether anything travels back.
  bool goes_back() const;
};

/// One part of a model on one rank, as the runner calls it. make_stage() makes one of a module with
/// `forward(tensors) -> tensors`.
///
/// Micro-batches are counted from 0. In every known kind of schedule a stage runs forwards in that
/// order, and backwards too; several micro-batches may be in flight at once.
class Stage {
 public:
  virtual ~Stage() = default;

  /// Declares the boundary to the previous stage. The answer is the same throughout a step, and the
  /// same at the other end. Not called on the first stage.
  virtual Boundary input(std::int64_t micro_batch) const = 0;
  /// Declares the boundary to the next stage. Not called on the last stage.
  virtual Boundary output(std::int64_t micro_batch) const = 0;

  /// Computes a forward. `inputs` are as input() declares, and leaves where they have a gradient;
  /// on the first stage they are those given to the step, or none. Results are as output()
  /// declares; on the last stage they are the losses that its backward begins with, kept until the
  /// step ends.
  virtual Tensors forward(std::int64_t micro_batch, const Tensors& inputs) = 0;

  /// The roots of a backward.
  struct Roots {
    Tensors tensors;    ///< tensors of this stage's graph
    Tensors gradients;  ///< their gradients, one each
  };
  /// Returns roots for the backward. On the last stage `results` are those of its forward. On other
  /// stages they are empty, and these roots are added to the gradients that came back (for an
  /// auxiliary loss; `back` are the values that the next stage sent). By default the roots are
  /// `results`, of one element each, with gradient 1. Tensors that need no gradient are skipped.
  virtual Roots roots(std::int64_t micro_batch, const Tensors& results, const Tensors& back);

  /// Returns the values that input().back declares, for the previous stage. Called after the
  /// micro-batch's B or I.
  virtual Tensors back(std::int64_t micro_batch);
};

}  // namespace pipeline

/// Options of a Pipeline.
struct PipelineOptions {
  std::string schedule = "1F1B";   ///< a kind (docs/pipeline.md); PyTorch's names work too
  std::string schedule_file = {};  ///< path of a schedule in PyTorch's CSV; "" = use `schedule`
  int micro_batches = 1;           ///< number in a step; a file must have as many
  int stages_per_rank = 0;         ///< 0 = the kind's or the file's
  StepReshard reshard = StepReshard::kStep;  ///< how long parameters stay gathered
  /// Reduces gradients after each micro-batch instead of once a step: less memory, more bytes sent.
  bool sync_every_micro_batch = false;
  /// Overlaps a forward and a backward where the schedule pairs them (DualPipeV, Paired1F1B), by
  /// StepScope::run_pair(). false = one runs after the other.
  bool overlap = true;
};

/// Runs one pipeline over the axis "pp" of a mesh. Ranks that differ on other axes have other
/// pipelines; their gradients are summed by the handles, as without a pipeline.
///
/// Every call below that communicates is collective among the ranks of the pipeline and, by their
/// handles, of the mesh. Threads: the rank's thread.
class Pipeline {
 public:
  using Tensors = pipeline::Tensors;  ///< tensors that enter or leave a stage
  /// Returns the inputs of the first stage for a micro-batch; called on the rank of that stage.
  using Inputs = std::function<Tensors(std::int64_t micro_batch)>;
  /// Returns a loss of one element from the outputs of the last stage; called on the rank of that
  /// stage. Gradients are those of the sum over micro-batches, so a mean divides here.
  using Loss = std::function<at::Tensor(std::int64_t micro_batch, const Tensors& outputs)>;

  /// Reads or makes the schedule, and communicates nothing. Errors: kConfig for a kind or file that
  /// does not fit the options, for a file that does not validate (with all faults), and for another
  /// number of ranks than axis "pp" has; kFormat, kIo for the file.
  Pipeline(const Mesh& mesh, const PipelineOptions& options);
  ~Pipeline();
  /// Moves the pipeline.
  Pipeline(Pipeline&&) noexcept;
  /// Moves the pipeline.
  Pipeline& operator=(Pipeline&&) noexcept;

  int stage_count() const;                 ///< number of stages of all ranks
  const std::vector<int>& stages() const;  ///< stages of this rank, ascending
  bool has_first() const;                  ///< whether this rank has the first stage
  bool has_last() const;                   ///< whether this rank has the last stage

  /// Sets the stages of this rank, in the order of stages(). `root` is the handle that holds their
  /// parameters (the stage's own, or one around several); its gathers and reductions follow the
  /// schedule, and it outlives the pipeline's use. `root` is null for plain modules on one data
  /// rank, whose gradients are in their parameters. A stage calls the same handles for every
  /// micro-batch of every step until stages are set again. With a root, every stage's forward calls
  /// a handle: one that only reshapes tensors belongs to a neighbouring stage (kUsage in its first
  /// forward). Call it on all ranks at the same place. Errors: kUsage for another number of stages,
  /// for more than StepScopeOptions::kMostStages on this rank with a root, and for plain modules
  /// with several ranks in a stage.
  void set_stages(std::vector<std::shared_ptr<pipeline::Stage>> stages,
                  ShardedBase* root = nullptr);

  /// Runs forward and backward of all micro-batches. Returns the losses, without their graphs, on
  /// the rank of the last stage, and nothing elsewhere. Gradients are added to existing ones, as by
  /// backward(). Errors: kContract, on all ranks, where the two ends of a boundary differ; the
  /// errors of stages, with rank, stage, micro-batch and slot, which abort the World so that the
  /// other ranks end too (World::recover()).
  std::vector<at::Tensor> step(const Inputs& inputs, const Loss& loss);

  /// Runs forwards alone, without a graph. Returns the outputs of the last stage for each
  /// micro-batch on its rank, and nothing elsewhere. Errors: as step().
  std::vector<Tensors> forward(const Inputs& inputs);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes a stage of a function, with the same boundaries for all micro-batches. `input` and
/// `output` are the tensors that cross to the previous and the next stage; the first stage's
/// `input` and the last stage's `output` are ignored.
std::shared_ptr<pipeline::Stage> make_stage(
    std::function<pipeline::Tensors(const pipeline::Tensors&)> forward,
    std::vector<pipeline::BoundaryTensor> input, std::vector<pipeline::BoundaryTensor> output);

namespace detail {

/// Errors: kUsage for another number of tensors.
const at::Tensor& only(const pipeline::Tensors& inputs);

template <class Module>
concept HasForward = requires { &Module::forward; };

}  // namespace detail

/// Makes a stage of a module or its handle, whose forward goes from std::vector<at::Tensor> to
/// std::vector<at::Tensor>, or from one tensor to one tensor. `module` outlives the stage. Errors:
/// kUsage, in a step, where a forward from one tensor gets another number.
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
