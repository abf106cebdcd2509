// dry_run() of a program's own module against real ranks: what they hold to the byte, the most of a
// step except for control messages, what they issue; and budgets that use what it counts.
#include "tessera/dry_run.h"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <mutex>
#include <random>

#include "base/test_hooks.h"
#include "capture/dry/counted_step.h"
#include "comm/batch.h"
#include "dry/allocator.h"
#include "dry/memory_count.h"
#include "fsdp/handle.h"
#include "fsdp/held_bytes.h"
#include "nn/linear.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/compile.h"
#include "tessera/pipeline.h"
#include "tessera/recompute.h"
#include "tessera/step_scope.h"
#include "unit/train/inside_operations.h"

namespace tessera::test::dry_run_test {
namespace {

constexpr std::int64_t kText = 16 << 10;  // control messages, which come and go

struct Sizes {
  std::int64_t rows = 256, width = 96, hidden = 384;
  int layers = 4, micro_batches = 2, replicas = 1;
  bool reshards = true;  ///< each block behind its forward
  bool nests = false;    ///< two blocks in a unit of their own
  bool repeats = false;  ///< the first block comes once more behind the last
  bool clips = false;
  PrecisionPolicy policy = {};
  CompileOptions planned = {};
  std::function<void(const at::Tensor&)> reads = {};  ///< in the forward
};

/// x + down(gelu(up(norm(x)))): two products that a selective checkpoint keeps.
class Block : public torch::nn::Module, public Recomputable {
 public:
  explicit Block(const Sizes& sizes)
      : norm_(register_parameter("norm", at::ones({sizes.width}))),
        up_(register_module("up", linear(sizes.width, sizes.hidden))),
        down_(register_module("down", linear(sizes.hidden, sizes.width))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const std::vector<at::Tensor>& in) {
      const at::Tensor y = at::layer_norm(in[0], {norm_.numel()}, norm_);
      return in[0] + down_->forward(at::gelu(up_->forward(y)));
    };
    return checkpoint(run, {x}, recompute());
  }

 private:
  static std::shared_ptr<nn::Linear> linear(std::int64_t in, std::int64_t out) {
    auto made = std::make_shared<nn::Linear>(in, out, nn::Bias::kYes);
    const at::NoGradGuard no_grad;
    made->weight.set_data(at::randn({out, in}) * 0.05);
    made->bias.set_data(at::zeros({out}));
    return made;
  }
  at::Tensor norm_;
  std::shared_ptr<nn::Linear> up_, down_;
};

using ShardedBlock = std::shared_ptr<Sharded<Block>>;
ShardedBlock sharded_block(const Mesh& mesh, const Sizes& sizes) {
  ShardOptions options;
  options.reshard_after_forward = sizes.reshards;
  return std::make_shared<Sharded<Block>>(
      fully_shard(std::make_shared<Block>(sizes), mesh, sizes.policy, options));
}

/// Two units in one.
class Pair : public torch::nn::Module {
 public:
  Pair(const Mesh& mesh, const Sizes& sizes)
      : gain_(register_parameter("gain", at::ones({sizes.width}))),
        first_(register_module("first", sharded_block(mesh, sizes))),
        second_(register_module("second", sharded_block(mesh, sizes))) {}
  at::Tensor forward(const at::Tensor& x) {
    return second_->forward(at::tanh(first_->forward(x * gain_)));
  }

 private:
  at::Tensor gain_;
  ShardedBlock first_, second_;
};

class Net : public torch::nn::Module {
 public:
  Net(const Mesh& mesh, const Sizes& sizes)
      : scale_(register_parameter("scale", at::ones({sizes.width}))),
        head_(register_parameter("head", at::randn({32, sizes.width}) * 0.05)),
        reads_(sizes.reads) {
    for (int i = 0; i < sizes.layers; ++i) {
      blocks_.push_back(register_module(concat("block", i), sharded_block(mesh, sizes)));
    }
    if (sizes.repeats) blocks_.push_back(blocks_.front());
    if (!sizes.nests) return;
    pair_ = register_module("pair", std::make_shared<Sharded<Pair>>(fully_shard(
                                        std::make_shared<Pair>(mesh, sizes), mesh, sizes.policy)));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x * scale_;
    for (const auto& block : blocks_) y = block->forward(y);
    if (pair_) y = pair_->forward(y);
    if (reads_) reads_(y);
    return at::linear(y, head_);
  }

 private:
  at::Tensor scale_, head_;
  std::function<void(const at::Tensor&)> reads_;
  std::vector<ShardedBlock> blocks_;
  std::shared_ptr<Sharded<Pair>> pair_;
};

/// A user's program: a step of micro-batches inside a scope, AdamW.
DryModel program(World& world, const Sizes& sizes) {
  const Mesh mesh = data_mesh(world, sizes.replicas);
  auto model = std::make_shared<Sharded<Net>>(
      fully_shard(std::make_shared<Net>(mesh, sizes), mesh, sizes.policy));
  compile(*model, sizes.planned);
  const auto compute = [model, sizes, device = world.device()] {
    StepScopeOptions options;
    options.reshard = StepReshard::kMicroBatch;
    options.schedule = "micro-batches";
    options.micro_batches = sizes.micro_batches;
    StepScope scope(*model, options);
    for (int i = 0; i < sizes.micro_batches; ++i) {
      scope.begin_forward(0, i);
      const at::Tensor x = at::randn({sizes.rows, sizes.width}).to(device);
      const at::Tensor loss = model->forward(x).to(at::kFloat).square().mean();
      scope.begin_backward(0, i);
      backward(loss);
    }
    scope.finish();
  };
  DryModel built{
      .model = model, .compute = compute, .optimizer = make_adamw(*model, AdamWOptions())};
  if (sizes.clips) {
    built.update = [model, optimizer = built.optimizer] {
      clip_grad_norm(*model, 1.0);
      optimizer->step();
    };
  }
  return built;
}

DryBuild build_of(const Sizes& sizes) {
  return [sizes](World& world) { return program(world, sizes); };
}

void end_step(const DryModel& built) {
  built.update ? built.update() : built.optimizer->step();
  built.model->zero_grad();
}

/// Returns what each rank of a run holds in its third step: the second one, the first that follows
/// a plan, has the pool of the one that recorded. Leaves out what libtorch takes for itself in an
/// operation. Over Gloo: ranks of one process hold what they sent until all of them have it.
std::vector<DryRun> counted_run(int count, const Sizes& sizes) {
  dry::install_allocator();
  std::vector<DryRun> runs(static_cast<std::size_t>(count));
  ranks(count, ThreadBackend::kGloo).run([&](World& world) {
    DryRun& run = runs[static_cast<std::size_t>(world.rank())];
    dry::MemoryCount memory;
    train::InsideOperations inside;
    const kernels::WatchScope watch(inside);
    const DryModel built = program(world, sizes);
    const auto look = [&] {
      if (inside.is_inside()) return;
      run.peak = std::max(run.peak, memory.now());
      run.unsharded = std::max(run.unsharded, fsdp::unsharded_bytes(*built.model));
    };
    for (int step = 1; step <= 2; ++step) {
      built.compute();
      end_step(built);
    }
    memory.watch(look);
    inside.after = look;
    built.compute();
    const auto held = fsdp::held_bytes(*built.model);
    end_step(built);
    const auto state = fsdp::held_bytes(*built.optimizer);
    memory.watch({});
    run.shards = held.shards;
    run.gradients = held.gradients;
    run.pool = held.pool;
    run.moments = state.moments;
    run.masters = state.masters;
    run.between_steps = memory.now();
  });
  return runs;
}

/// Returns what each rank of a run issues in its second step.
std::vector<std::vector<DryRunCollective>> issued_by_run(int count, const Sizes& sizes) {
  std::mutex mutex;
  std::vector<std::vector<DryRunCollective>> issued(static_cast<std::size_t>(count));
  const test_hooks::Set seen(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    comm::Entry entry;
    comm::describe(batch, 0, entry);
    if (std::ranges::any_of(entry.ops, &comm::OpFacts::relayed)) return;
    const std::string unit = batch.label.unit;
    const std::lock_guard lock(mutex);
    issued[static_cast<std::size_t>(rank)].push_back(
        {.kind = std::string(to_string(batch.label.kind)),
         .unit = unit.empty() ? "(root)" : unit,
         .micro_batch = batch.label.micro_batch,
         .bytes = batch.bytes()});
  });
  ranks(count).run([&](World& world) {
    const DryModel built = program(world, sizes);
    built.compute();
    end_step(built);
    {
      const std::lock_guard lock(mutex);
      issued[static_cast<std::size_t>(world.rank())].clear();
    }
    built.compute();
    end_step(built);
  });
  return issued;
}

std::vector<DryRunCollective> issued_in(const DryRun& run) {
  std::vector<DryRunCollective> issued;
  for (const auto& one : run.collectives) {
    if (one.is_control) continue;
    issued.push_back(
        {.kind = one.kind, .unit = one.unit, .micro_batch = one.micro_batch, .bytes = one.bytes});
  }
  return issued;
}

struct Case {
  int ranks = 2;
  Sizes sizes = {};
};
Case drawn(std::uint32_t seed) {
  std::mt19937 draw(seed);
  const auto below = [&](std::uint32_t count) { return static_cast<int>(draw() % count); };
  Case found;
  found.ranks = 2 + below(3);
  auto& sizes = found.sizes;
  sizes.replicas = found.ranks == 4 && below(2) == 0 ? 2 : 1;
  sizes.rows = 64 * (1 + below(6));
  sizes.width = 32 * (1 + below(4));
  sizes.hidden = 96 * (1 + below(5));
  sizes.layers = 1 + below(4);
  sizes.micro_batches = 1 + below(3);
  sizes.reshards = below(4) > 0;
  sizes.nests = below(2) == 0;
  sizes.repeats = below(3) == 0;
  sizes.clips = below(2) == 0;
  if (below(2) == 0) sizes.policy.param_dtype = DType::kBFloat16;
  if (below(3) == 0) sizes.policy.storage_dtype = DType::kBFloat16;
  return found;
}
std::vector<Case> cases() {
  std::vector<Case> all{{}, {}};
  all[1].sizes.policy.param_dtype = DType::kBFloat16;
  for (std::uint32_t seed = 1; seed <= 10; ++seed) all.push_back(drawn(seed));
  return all;
}

TEST(DryRunOfAModule, HoldsWhatARunHolds) {
  int number = 0;
  for (const auto& [count, sizes] : cases()) {
    SCOPED_TRACE(concat("case ", number++));
    const auto real = counted_run(count, sizes);
    for (int rank = 0; rank < count; ++rank) {
      SCOPED_TRACE(concat("rank ", rank, " of ", count));
      const DryRun dry = dry_run(build_of(sizes), rank, count);
      const DryRun& run = real[static_cast<std::size_t>(rank)];
      EXPECT_EQ(dry.shards, run.shards);
      EXPECT_EQ(dry.gradients, run.gradients);
      EXPECT_EQ(dry.moments, run.moments);
      EXPECT_EQ(dry.masters, run.masters);
      EXPECT_EQ(dry.pool, run.pool);
      EXPECT_EQ(dry.unsharded, run.unsharded);
      EXPECT_NEAR(double(dry.between_steps), double(run.between_steps), kText);
      EXPECT_NEAR(double(dry.peak), double(run.peak), kText);
      EXPECT_GT(dry.peak, dry.between_steps);
    }
  }
}

TEST(DryRunOfAModule, IssuesWhatARunIssues) {
  int number = 0;
  for (const auto& [count, sizes] : cases()) {
    SCOPED_TRACE(concat("case ", number++));
    const auto real = issued_by_run(count, sizes);
    for (int rank = 0; rank < count; ++rank) {
      SCOPED_TRACE(concat("rank ", rank, " of ", count));
      const auto dry = issued_in(dry_run(build_of(sizes), rank, count));
      EXPECT_FALSE(dry.empty());
      EXPECT_EQ(dry, real[static_cast<std::size_t>(rank)]);
    }
  }
}

TEST(DryRunOfAModule, NamesGroupsAndBytesOfEachCollective) {
  Sizes sizes;
  sizes.layers = 1;
  const DryRun run = dry_run(build_of(sizes), 1, 2);
  const auto gather = std::ranges::find_if(run.collectives, [](const DryRunCollective& one) {
    return one.kind == "all_gather" && one.unit == "block0";
  });
  ASSERT_NE(gather, run.collectives.end());
  EXPECT_EQ(gather->group, "gather of ranks 0,1");
  EXPECT_EQ(gather->ranks, 2);
  const auto numel = sizes.width + 2 * sizes.width * sizes.hidden + sizes.hidden + sizes.width;
  EXPECT_GE(gather->bytes, 4 * numel);
  EXPECT_EQ(gather->sent_bytes, gather->bytes / 2);
  EXPECT_TRUE(run.messages.empty());
}

TEST(DryRunOfAModule, CountsAnyNumberOfRanks) {
  const Sizes sizes;
  const DryRun one = dry_run(build_of(sizes), 0, 1);
  constexpr int kRanks = 4096;
  const DryRun many = dry_run(build_of(sizes), kRanks - 1, kRanks);
  constexpr std::int64_t kAligned = 256;  // bytes of each unit's part
  EXPECT_LE(many.shards, one.shards / kRanks + kAligned * (sizes.layers + 1));
  EXPECT_GE(many.shards * kRanks, one.shards);
  EXPECT_REFUSED(kUsage, dry_run(build_of(sizes), 2, 2), "found rank 2, expected 0 to 1");
  EXPECT_REFUSED(kUsage, dry_run(build_of(sizes), -1, 2), "found rank -1");
}

/// Returns what is issued, without its bytes: a device's parts of units are aligned otherwise.
std::vector<std::string> in_order(const DryRun& run) {
  std::vector<std::string> issued;
  for (const auto& one : run.collectives) {
    issued.push_back(concat(one.kind, " of ", one.unit, " in ", one.group));
  }
  return issued;
}

// On an absent device a rank issues the same, and all of its memory comes in pieces of 512 bytes.
// tests/sim/nccl/dry_device_test.cpp compares the sums with real runs.
TEST(DryRunOfAModule, OnAGpuThatIsNotThere) {
  int number = 0;
  for (const auto& [count, sizes] : cases()) {
    SCOPED_TRACE(concat("case ", number++));
    const DryRun cpu = dry_run(build_of(sizes), 0, count);
    const DryRun gpu = dry_run(build_of(sizes), 0, count, KernelsOf::kGpu);
    EXPECT_EQ(in_order(gpu), in_order(cpu));
    EXPECT_GE(gpu.shards, cpu.shards);
    EXPECT_GT(gpu.peak, gpu.between_steps);
    EXPECT_GT(gpu.between_steps, gpu.shards + gpu.moments);
    EXPECT_EQ(gpu.between_steps % 512, 0);
    EXPECT_EQ(gpu.peak % 512, 0);
    const DryActivations kept = dry_activations(build_of(sizes), 0, count, KernelsOf::kGpu);
    EXPECT_GT(kept.forward.units.size(), 0U);
  }
}

/// Modules of torch alone, with their own initial values: ids, dropout, a loss of labels.
struct Classifier : torch::nn::Module {
  Classifier()
      : table(register_module("table", torch::nn::Embedding(50, 24))),
        linear(register_module("linear", torch::nn::Linear(24, 10))) {}
  at::Tensor forward(const at::Tensor& ids) {
    return linear(at::dropout(table(ids), 0.1, is_training()));
  }
  torch::nn::Embedding table;
  torch::nn::Linear linear;
};

TEST(DryRunOfAModule, TakesModulesOfTorch) {
  const auto build = [](World& world) -> DryModel {
    auto model = std::make_shared<Sharded<Classifier>>(
        fully_shard(std::make_shared<Classifier>(), data_mesh(world)));
    return {.model = model, .compute = [model] {
              const at::Tensor ids = at::arange(64, at::kLong) % 50;
              const at::Tensor loss = at::cross_entropy_loss(model->forward(ids), ids % 10);
              EXPECT_TRUE(std::isfinite(loss.item<double>()));
              backward(loss);
            }};
  };
  const DryRun run = dry_run(build, 0, 2);
  EXPECT_GE(run.shards, 4 * (50 * 24 + 24 * 10 + 10) / 2);
  EXPECT_GE(run.gradients, run.shards);
  const auto found = dry_activations(build, 0, 2);
  ASSERT_EQ(found.forward.units.size(), 1U);  // it is the only unit
  EXPECT_EQ(found.forward.units[0].unit, "(root)");
}

// The first of two stages: what it sends is noted, and it waits for no rank.
TEST(DryRunOfAModule, NotesMessagesOfAPipeline) {
  constexpr int kMicroBatches = 4;
  const pipeline::Boundary border{.activations = {{.shape = {16, 24}}}};
  const auto build = [&](World& world) -> DryModel {
    const Mesh mesh = world.mesh(MeshShape::dense(2, 1, 1, 1, 1));
    auto line = std::make_shared<Pipeline>(mesh, PipelineOptions{.micro_batches = kMicroBatches});
    auto part = std::make_shared<Sharded<torch::nn::LinearImpl>>(
        fully_shard(std::make_shared<torch::nn::LinearImpl>(24, 24), mesh));
    line->set_stages({make_stage(*part, border.activations, border.activations)}, part.get());
    return {.model = part, .compute = [line, part] {
              const auto inputs = [](std::int64_t) {
                return pipeline::Tensors{at::randn({16, 24})};
              };
              const auto loss = [](std::int64_t, const pipeline::Tensors& out) {
                return out[0].square().mean();
              };
              line->step(inputs, loss);
            }};
  };
  for (const int rank : {0, 1}) {
    const DryRun run = dry_run(build, rank, 2);
    const auto sends = std::ranges::count_if(run.messages, &DryRunMessage::sends);
    EXPECT_EQ(sends, kMicroBatches) << rank;
    EXPECT_EQ(std::ssize(run.messages), 2 * kMicroBatches) << rank;
    for (const auto& one : run.messages) {
      EXPECT_EQ(one.peer, 1 - rank);
      EXPECT_EQ(one.bytes, 16 * 24 * 4);
    }
  }
}

// ------------------------------------------------------------------------------------ activations

using Kept = std::map<std::string, std::int64_t>;

/// Returns what each block of a rank that computes leaves for its backward.
Kept kept_by_run(RecomputeMode mode, const Sizes& sizes) {
  dry::install_allocator();
  Kept kept;
  ranks(2, ThreadBackend::kGloo).run([&](World& world) {
    dry::MemoryCount memory;
    const DryModel built = program(world, sizes);
    fsdp::set_planned_recompute(*built.model, mode);
    const auto step = [&] {
      built.compute();
      end_step(built);
    };
    step();
    const auto counted = capture::counted_step(*built.model, memory, step);
    if (world.rank() > 0) return;
    for (const auto& pass : counted.passes) {
      if (pass.is_forward && pass.is_innermost) kept[pass.unit] = pass.after - pass.before;
    }
  });
  return kept;
}

TEST(DryActivations, AreThoseOfARunInEachMode) {
  for (const bool narrow : {false, true}) {
    Sizes sizes;
    if (narrow) sizes.policy.param_dtype = DType::kBFloat16;
    const auto found = dry_activations(build_of(sizes), 0, 2);
    ASSERT_EQ(std::ssize(found.forward.units), sizes.layers);
    for (const auto mode :
         {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
      const auto kept = kept_by_run(mode, sizes);
      ASSERT_EQ(std::ssize(kept), sizes.layers);
      for (const auto& unit : found.forward.units) {
        EXPECT_EQ(unit.kept(mode), kept.at(unit.unit)) << unit.unit << ' ' << int(mode);
        EXPECT_GE(unit.in_backward(mode), unit.kept(mode)) << unit.unit;
      }
    }
    for (const auto& unit : found.forward.units) {
      EXPECT_LT(unit.full, unit.selective);
      EXPECT_LT(unit.selective, unit.none);
    }
  }
}

/// All of a forward without recomputation.
std::int64_t all_of(const ForwardActivations& of) {
  std::int64_t bytes = of.outside + of.after;
  for (const auto& unit : of.units) bytes += unit.none;
  return bytes;
}

TEST(DryActivations, AddUpToThePeakWithOthersAndGathered) {
  int number = 0;
  for (const auto& [count, sizes] : cases()) {
    SCOPED_TRACE(concat("case ", number++));
    if (sizes.repeats) continue;  // a unit counts by its largest call, for each
    const DryRun run = dry_run(build_of(sizes), 0, count);
    const auto found = dry_activations(build_of(sizes), 0, count);
    // More, where a unit's inputs are freed before the whole forward ends.
    const std::int64_t sum = found.others + all_of(found.forward) + run.unsharded;
    EXPECT_GE(sum, run.peak);
    EXPECT_LE(sum, number <= 2 ? run.peak : run.peak + run.peak / 100);
    EXPECT_GE(found.others, run.shards + run.moments);
    EXPECT_EQ(std::ssize(found.forward.units), sizes.layers + (sizes.nests ? 2 : 0));
  }
}

// Without a scope, without an optimizer, with a loss outside of the model that the host reads.
TEST(DryActivations, OfALoopWithoutAScope) {
  const auto build = [](World& world) -> DryModel {
    const Sizes sizes;
    const Mesh mesh = data_mesh(world);
    auto model = std::make_shared<Sharded<Net>>(
        fully_shard(std::make_shared<Net>(mesh, sizes), mesh, PrecisionPolicy()));
    return {.model = model, .compute = [model, sizes] {
              const auto loss =
                  model->forward(at::randn({sizes.rows, sizes.width})).square().mean();
              backward(loss);
              EXPECT_EQ(loss.item<float>(), 1.0f);
            }};
  };
  const auto found = dry_activations(build, 1, 2);
  EXPECT_EQ(std::ssize(found.forward.units), Sizes().layers);
  EXPECT_EQ(found.forward.units, dry_activations(build_of({}), 1, 2).forward.units);
}

// Budgets between the least and all: plans recompute less and less, and neither the dry run of a
// plan nor a run that follows it takes more than what the budget leaves it. Several forwards run
// before the first backward, as for an accumulated loss: the last micro-batch's units come on top
// of all that the others keep.
TEST(DryActivations, OfMicroBatchesThatAreUnderWayAtOnce) {
  const Sizes sizes;
  const auto build = [&](World& world) -> DryModel {
    const Mesh mesh = data_mesh(world);
    auto model = std::make_shared<Sharded<Net>>(
        fully_shard(std::make_shared<Net>(mesh, sizes), mesh, PrecisionPolicy()));
    return {.model = model, .compute = [model, sizes] {
              at::Tensor loss;
              for (int i = 0; i < 3; ++i) {
                const at::Tensor x = at::randn({sizes.rows, sizes.width});
                const at::Tensor one = model->forward(x).square().mean();
                loss = i == 0 ? one : loss + one;
              }
              backward(loss);
            }};
  };
  const DryRun run = dry_run(build, 0, 2);
  const auto found = dry_activations(build, 0, 2);
  EXPECT_EQ(std::ssize(found.forward.units), sizes.layers);
  std::int64_t units = 0;
  for (const auto& unit : found.forward.units) units += unit.none;
  EXPECT_GE(found.forward.outside, 2 * units);
  const std::int64_t sum = found.others + all_of(found.forward) + run.unsharded;
  EXPECT_GE(sum, run.peak);
  EXPECT_LE(sum, run.peak + run.peak / 100);
}

TEST(DryActivations, BudgetsThatGoByThemAreKept) {
  for (const auto& [layers, nests, repeats, clips] : std::vector{
           std::tuple{6, false, false, false}, {3, true, false, true}, {4, false, true, false}}) {
    SCOPED_TRACE(concat(layers, " blocks", nests ? ", nested" : "", repeats ? ", repeated" : ""));
    Sizes sizes;
    sizes.layers = layers;
    sizes.nests = nests;
    sizes.repeats = repeats;
    sizes.clips = clips;
    const auto found = dry_activations(build_of(sizes), 0, 2);
    const DryRun eager = dry_run(build_of(sizes), 0, 2);
    const std::int64_t all = all_of(found.forward) + eager.unsharded;
    int refused = 0, recomputing = 0, keeping = 0;
    for (int part = 1; part <= 6; ++part) {
      SCOPED_TRACE(concat("part ", part));
      Sizes planned = sizes;
      planned.planned = {.mode = CompileMode::kPlan,
                         .memory_budget = all * part / 4,
                         .activations = found.forward,
                         .micro_batches = sizes.micro_batches};
      DryRun dry;
      try {
        dry = dry_run(build_of(planned), 0, 2);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kConfig) << error.what();
        ++refused;
        continue;
      }
      const std::int64_t most = found.others + *planned.planned.memory_budget;
      EXPECT_LE(dry.peak, most + kText);
      const DryRun real = counted_run(2, planned)[0];
      EXPECT_LE(real.peak, most + kText);
      EXPECT_NEAR(double(dry.peak), double(real.peak), kText);
      (dry.peak < eager.peak - eager.unsharded ? recomputing : keeping) += 1;
    }
    EXPECT_GT(refused, 0);
    EXPECT_GE(recomputing, 2);
    EXPECT_GE(keeping, 1);
  }
}

// ------------------------------------------------------------------------------------ refusals

// In a forward, inside of a step scope.
TEST(DryRunErrors, BodiesThatReadValuesAreNamed) {
  Sizes sizes;
  sizes.reads = [](const at::Tensor& x) { static_cast<void>(at::masked_select(x, x > 0)); };
  EXPECT_REFUSED(kUsage, dry_run(build_of(sizes), 0, 2),
                 "found aten::masked_select, whose results' sizes follow from values");
  sizes.reads = [](const at::Tensor& x) { static_cast<void>(at::equal(x, x)); };
  EXPECT_REFUSED(kUsage, dry_activations(build_of(sizes), 0, 2), "found aten::equal");
  EXPECT_GT(dry_run(build_of({}), 0, 2).peak, 0);  // nothing is left of the failed ones
}

TEST(DryRunErrors, PartsThatAreNotThereAreNamed) {
  EXPECT_REFUSED(kUsage, dry_run([](World&) { return DryModel(); }, 0, 2), "without `model`");
  const auto build = [](World& world) {
    DryModel built = program(world, {});
    built.compute = {};
    return built;
  };
  EXPECT_REFUSED(kUsage, dry_activations(build, 0, 2), "without `compute`");
}

TEST(DryRunErrors, UnitsThatAreCalledDifferentlyAreRefused) {
  int builds = 0;
  const auto build = [&builds](World& world) {
    Sizes sizes;
    sizes.layers = 2 + builds++;
    return program(world, sizes);
  };
  EXPECT_REFUSED(kUsage, dry_activations(build, 0, 2), "call units alike in every step");
}

}  // namespace
}  // namespace tessera::test::dry_run_test
