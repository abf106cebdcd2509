// dry_run(): what one rank of any number holds and sends in a step of a program's own module, without
// the other ranks, weights or memory.
//
// The program gives what builds its model and what runs a step; both run as they are, on one thread,
// over a World in which nobody else is. Floating tensors have sizes, strides, dtypes and addresses, and
// no values: nothing is computed, and what would be allocated is counted. It says nothing of time, and
// nothing of what follows from values. dry_activations() counts what CompileOptions::activations takes.
//
// With KernelsOf::kGpu, World::device() is a device that stands for a GPU ("maia:0" in errors): the
// model and its inputs are to be there. Its memory alone is counted, in pieces of 512 bytes as by
// libtorch's allocator, with what collectives take over NCCL; work space inside of kernels, and of
// cuBLAS and NCCL, is not, and attention is flash's, where libtorch may take cuDNN's.
// Next: compile.h, recompute_mode.h; docs/compile.md.
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

/// A model and what steps it.
struct DryModel {
  std::shared_ptr<ShardedBase> model = nullptr;  ///< the outermost handle
  /// Forward, loss and backward of each micro-batch of a step, until gradients are complete. Called
  /// several times.
  std::function<void()> compute = {};
  std::shared_ptr<Optimizer> optimizer = nullptr;  ///< null: none
  /// Called between `compute` and the model's zero_grad(); empty: optimizer->step(), where there
  /// is one.
  std::function<void()> update = {};
};
/// Shards the model and makes its optimizer on a mesh of `world`. What it makes lives no longer than
/// `world`.
using DryBuild = std::function<DryModel(World& world)>;

/// A collective as it is issued.
struct DryRunCollective {
  std::string group = {};         ///< "gather of ranks 0,1"
  int ranks = 0;                  ///< in that group
  std::string kind = {};          ///< "all_gather", "reduce_scatter", ...
  std::string unit = {};          ///< who issues it: "layers.3", "(root)"
  std::uint32_t micro_batch = 0;  ///< by the unit's count of its passes
  std::int64_t bytes = 0;         ///< of the whole buffers; 0 for an all-to-all
  std::int64_t sent_bytes = 0;    ///< by this rank
  bool is_control = false;        ///< small, for the host: norms, counts, agreements
  bool operator==(const DryRunCollective&) const = default;
};

/// One end of a pipeline's message, as it is posted.
struct DryRunMessage {
  std::string tag = {};  ///< what it carries
  bool sends = false;    ///< else it receives
  int peer = 0;          ///< rank of the World
  std::int64_t bytes = 0;
  bool operator==(const DryRunMessage&) const = default;
};

/// Bytes of one rank, and what it issues, in a step that others are like.
struct DryRun {
  std::int64_t shards = 0;     ///< parameters as they are stored, frozen ones too
  std::int64_t gradients = 0;  ///< sums and what the optimizer reads, when gradients are complete
  std::int64_t moments = 0;    ///< of the optimizer
  std::int64_t masters = 0;    ///< fp32 values beside 16-bit shards
  std::int64_t unsharded = 0;  ///< the most gathered parameters at once
  std::int64_t pool = 0;       ///< blocks for gathers and reductions, those on hand too
  std::int64_t between_steps = 0;                  ///< all tensors that are there behind a step
  std::int64_t peak = 0;                           ///< the most of all tensors in a step
  std::vector<DryRunCollective> collectives = {};  ///< in order of issue
  std::vector<DryRunMessage> messages = {};        ///< in order of issue
};

/// Builds rank `rank` of `ranks` and runs three steps of it; the third one is counted: the first fills
/// pools and records for a plan of compile(), the second is the first that follows it. Regions are not
/// replayed. The peak leaves out what libtorch and backends of communication take for themselves. Not
/// collective. From the first call on the process takes memory of CPU tensors by an allocator that
/// counts, and asks libtorch's for it. Errors: kUsage for a rank that is none of `ranks`, for a DryModel
/// without `model` or `compute`, and for an operation whose results' sizes follow from values (a mask
/// as an index); those of what it calls. Code that reads elements through a pointer ends the process;
/// item() of a floating result gives 1, and 0 of what asks for faults (isnan, isinf, any). Threads: the
/// caller's alone; what other threads compute has real memory.
DryRun dry_run(const DryBuild& build, int rank, int ranks, KernelsOf kernels = KernelsOf::kCpu);

/// The numbers that a plan's choices go by, in bytes of one rank.
struct DryActivations {
  /// As CompileOptions::activations takes it: what units without units inside leave, by mode, of the
  /// last micro-batch of a step.
  ForwardActivations forward = {};
  /// Taken by the rank at its peak whatever a plan chooses: shards, gradients, optimizer state,
  /// reductions, other tensors of the program, gradients of activations. A rank that may take B bytes
  /// has CompileOptions::memory_budget = B - others.
  std::int64_t others = 0;
};

/// Builds the rank three times, and steps it with all units that plans may recompute set to one mode of
/// recomputation each time; plans of compile() are not followed. Errors: as dry_run(); kUsage where
/// units are called differently in these steps.
DryActivations dry_activations(const DryBuild& build, int rank, int ranks,
                               KernelsOf kernels = KernelsOf::kCpu);

}  // namespace tessera
