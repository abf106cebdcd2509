// dry_run(): counts what one rank holds and sends in a step of a custom module, in a world of any
// size, without the other ranks, weights or memory.
//
// The program passes a function that builds its model and one that runs a step. Both run unchanged,
// on one thread, over a World without other ranks. Floating tensors have sizes, strides, dtypes and
// addresses, but no values: nothing is computed, and allocations are only counted. The result does
// not include times, or anything that depends on values. dry_activations() counts the bytes that
// CompileOptions::activations takes.
//
// With KernelsOf::kGpu, World::device() is a device that stands for a GPU ("maia:0" in errors), and
// the model and its inputs belong on it. Only the memory of this device is counted, in blocks of
// 512 bytes as in libtorch's allocator, including buffers of NCCL collectives. Workspaces inside of
// kernels, cuBLAS and NCCL are not counted. Attention is counted as flash attention, where libtorch
// may use cuDNN's. Next: compile.h, recompute_mode.h; docs/compile.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/kernels_of.h"
#include "tessera/optim.h"
#include "tessera/recompute_mode.h"
#include "tessera/shard.h"
#include "tessera/world.h"

namespace tessera {

/// A model, its step and its optimizer.
struct DryModel {
  std::shared_ptr<ShardedBase> model = nullptr;  ///< the outermost handle
  /// Runs forward, loss and backward of each micro-batch of a step, until gradients are complete.
  /// Called several times.
  std::function<void()> compute = {};
  std::shared_ptr<Optimizer> optimizer = nullptr;  ///< null = none
  /// Runs between `compute` and the model's zero_grad(). Empty = optimizer->step(), where there is
  /// an optimizer.
  std::function<void()> update = {};
};
/// Shards the model and makes its optimizer on a mesh of `world`. The objects that it makes do not
/// outlive `world`.
using DryBuild = std::function<DryModel(World& world)>;

/// A collective as it is issued.
struct DryRunCollective {
  std::string group = {};         ///< "gather of ranks 0,1"
  int ranks = 0;                  ///< number in that group
  std::string kind = {};          ///< "all_gather", "reduce_scatter", ...
  std::string unit = {};          ///< the unit that issues it: "layers.3", "(root)"
  std::uint32_t micro_batch = 0;  ///< by the unit's count of its passes
  std::int64_t bytes = 0;         ///< the whole buffers; 0 for an all-to-all
  std::int64_t sent_bytes = 0;    ///< sent by this rank
  bool is_control = false;        ///< small, for the host: norms, counts, agreements
  bool operator==(const DryRunCollective&) const = default;
};

/// One end of a pipeline's message, as it is posted.
struct DryRunMessage {
  std::string tag = {};    ///< names its content
  bool sends = false;      ///< true = a send, false = a receive
  int peer = 0;            ///< rank of the World
  std::int64_t bytes = 0;  ///< size of the message
  bool operator==(const DryRunMessage&) const = default;
};

/// Bytes that one rank holds, and the operations that it issues, in a typical step.
struct DryRun {
  std::int64_t shards = 0;         ///< parameters as stored, frozen ones included
  std::int64_t gradients = 0;      ///< accumulators and final gradients, once they are complete
  std::int64_t moments = 0;        ///< moments of the optimizer
  std::int64_t masters = 0;        ///< full-precision values next to 16-bit shards
  std::int64_t unsharded = 0;      ///< peak of gathered parameters
  std::int64_t pool = 0;           ///< blocks for gathers and reductions, free ones included
  std::int64_t between_steps = 0;  ///< all tensors after a step
  std::int64_t peak = 0;           ///< peak of all tensors in a step
  std::vector<DryRunCollective> collectives = {};  ///< in order of issue
  std::vector<DryRunMessage> messages = {};        ///< in order of issue
};

/// Builds rank `rank` of `ranks`, runs three steps of it, and returns the counts of the third. The
/// first step fills pools and records for a plan of compile(), and the second is the first to
/// follow the plan. Regions are not replayed. The peak excludes memory of libtorch itself and of
/// communication backends. `item()` of a floating result gives 1, and of a test for faults (isnan,
/// isinf, any) 0. Code that reads elements through a pointer ends the process. From the first call
/// on, the process allocates CPU tensors through an allocator that counts and forwards to
/// libtorch's. Not collective. Threads: only the caller's is counted; tensors of other threads have
/// real memory. Errors: kUsage for a rank outside of `ranks`, for a DryModel without `model` or
/// `compute`, and for an operation whose result's size depends on values (a mask as an index); the
/// errors of `build` and of the DryModel's functions.
DryRun dry_run(const DryBuild& build, int rank, int ranks, KernelsOf kernels = KernelsOf::kCpu);

/// The numbers that the passes of compile() choose by, in bytes of one rank.
struct DryActivations {
  /// For CompileOptions::activations: the bytes that units without inner units keep from forward to
  /// backward, by mode, in the last micro-batch of a step.
  ForwardActivations forward = {};
  /// Bytes at the rank's peak that no plan changes: shards, gradients, optimizer state, reductions,
  /// gradients of activations, and other tensors of the program. For a rank that may take B bytes
  /// set CompileOptions::memory_budget to B - others.
  std::int64_t others = 0;
};

/// Builds the rank three times and steps it once for each mode of recomputation, with all
/// Recomputable units set to that mode. Plans of compile() are not followed. Errors: as dry_run();
/// kUsage where the steps call units differently.
DryActivations dry_activations(const DryBuild& build, int rank, int ranks,
                               KernelsOf kernels = KernelsOf::kCpu);

}  // namespace tessera
