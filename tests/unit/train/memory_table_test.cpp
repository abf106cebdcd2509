// The memory table of `inspect --contract` beside counted bytes: real steps on ranks as threads,
// whose allocations and tensors are counted.
//
// Batches are random tokens. What is exact is compared exactly; what autograd keeps within 5 %.
// Where experts lie on several ranks, or a vocabulary does, each rank has what the tokens happen to
// choose: there the mean over ranks is compared.
#include <ATen/ops/randint.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "fsdp/optim/optimizer_registry.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "tessera/clip.h"
#include "tessera/optim.h"
#include "train/data/data.h"
#include "train/expert_balance.h"
#include "train/parallelize.h"
#include "train/plan_of_run.h"
#include "train/rank_memory.h"
#include "unit/train/run_case.h"

namespace tessera::train::memory_table_test {
namespace {

/// While alive counts what this thread's tensors take and give back, and calls `at_each` at every
/// such place. On CPUs backward runs on the thread that calls it.
class CountedBytes {
 public:
  CountedBytes() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}
  std::int64_t now() const { return counter_->bytes; }
  void watch(std::function<void()> at_each) { counter_->at_each = std::move(at_each); }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t,
                           c10::Device) override {
      bytes += size;
      if (at_each) at_each();
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::int64_t bytes = 0;
    std::function<void()> at_each;
  };
  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  c10::DebugInfoGuard guard_;
};

struct MemoryCase {
  std::string name;
  std::string family = "qwen3";
  ParallelDims dims = {};
  RecomputeMode mode = RecomputeMode::kNone;
  DType compute = DType::kFloat32;
  std::int64_t rows = 2;
  std::int64_t positions = 64;
  std::int64_t micro_batches = 1;
  std::function<void(Config&)> change = {};
};
void PrintTo(const MemoryCase& c, std::ostream* out) { *out << c.name; }

/// The reference's model, wide enough that layers are no small buckets.
void write_model(const testing::TemporaryFolder& folder, const std::string& family) {
  std::ifstream in(std::string(TESSERA_TEST_DATA) + "/" + family + "-fp32/config.json");
  auto model = nlohmann::json::parse(in);
  auto& text = model.contains("text_config") ? model["text_config"] : model;
  text["hidden_size"] = 128;
  text["intermediate_size"] = 192;
  text["vocab_size"] = 512;
  if (text.contains("moe_intermediate_size")) text["moe_intermediate_size"] = 96;
  if (family == "gemma4") {
    text["vocab_size_per_layer_input"] = 512;
    text["sliding_window"] = 48;
  }
  folder.write("model.json", model.dump());
}

Config config_of(const MemoryCase& c, const testing::TemporaryFolder& folder) {
  Config config = run_case(folder, Head::kOwn);
  write_model(folder, c.family);
  ParallelismConfig& degrees = config.parallelism;
  degrees.data_parallel_replicate_degree = c.dims.dp_replicate;
  degrees.data_parallel_shard_degree = c.dims.dp_shard;
  degrees.tensor_parallel_degree = c.dims.tp;
  degrees.expert_parallel_degree = c.dims.ep;
  degrees.expert_tensor_parallel_degree = c.dims.etp;
  degrees.sequence_parallel = c.dims.sequence == SequenceParallel::kYes;
  degrees.moe_router = c.dims.router;
  config.precision.param_dtype.dtype = c.compute;
  config.activation_checkpoint.mode = c.mode;
  config.training.seq_len = c.positions;
  config.training.local_batch_size = c.rows;
  config.training.global_batch_size = c.rows * c.dims.data_ranks() * c.micro_batches;
  if (c.change) c.change(config);
  return config;
}

/// Memories of tensors, each once.
class Memories {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined() || !seen_.insert(tensor.storage().unsafeGetStorageImpl()).second) return;
    bytes_ += static_cast<std::int64_t>(tensor.storage().nbytes());
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::set<const c10::StorageImpl*> seen_;
  std::int64_t bytes_ = 0;
};

/// What one rank was found to hold.
struct Found {
  RankMemory memory;
  std::int64_t kept = 0;
  std::int64_t other = 0;  ///< counted beside all lines of the table, between two steps
  std::int64_t pool = 0;
};

class Rank {
 public:
  Rank(const MemoryCase& c, const Config& config, const ModelSource& source, World& world)
      : case_(c), config_(config), spec_(source.spec) {
    const ParallelDims dims = resolve_parallelism(config.parallelism, world.size());
    model_ = parallelize(source, config, world.mesh(mesh_shape(dims)));
    optimizer_ = fsdp::make_optimizer(config.optimizer.name, *model_, *config.optimizer.lr,
                                      config.optimizer);
    EXPECT_EQ(std::ssize(optimizer_->states()),
              fsdp::kept_states(config.optimizer.name, config.optimizer));
  }

  Found run() {
    for (int number = 0; number < 3; ++number) step();
    count_shards();
    found_.pool = runtime().pool()->total_bytes();
    found_.other = counted_.now() - found_.pool - found_.memory.parameters -
                   found_.memory.gradients - found_.memory.moments - found_.memory.master;
    return found_;
  }

 private:
  fsdp::Runtime& runtime() { return model_->unit()->runtime(); }

  void step() {
    counted_.watch([this] { look(); });
    for (std::int64_t i = 0; i < case_.micro_batches; ++i) {
      const bool last = i + 1 == case_.micro_batches;
      model_->set_requires_gradient_sync(last || config_.training.sync_every_micro_batch);
      model_->set_requires_replica_reduce(last);
      micro_batch();
    }
    clip_grad_norm(*model_, config_.training.max_norm);
    optimizer_->step();
    count_gradients();
    model_->zero_grad();
    counted_.watch({});
  }

  void micro_batch() {
    models::ModelInputs inputs;
    const at::Tensor tokens =
        at::randint(0, 500, {case_.rows, case_.positions}, at::TensorOptions(at::kLong));
    inputs.input_ids = tokens;
    inputs.targets = tokens.clone();
    if (spec_.moe) inputs.router_statistics = models::RouterStatistics::kCounts;
    const auto beside = [&] { return runtime().pool()->total_bytes(); };
    const std::int64_t before = counted_.now() - beside();
    auto output = model_->call(&models::LanguageModel::forward_routed, inputs);
    found_.kept = counted_.now() - beside() - before;
    output.loads.clear();
    output.result.backward(at::full_like(output.result, 1e-3));
  }

  void look() {
    std::int64_t unsharded = 0;
    for (const fsdp::Unit* unit : runtime().units()) {
      if (!unit->gathered() && !unit->gather_pending()) continue;
      for (const auto& bucket : unit->buckets()) {
        if (!bucket->aliases_shard()) unsharded += layout::gathered_bytes(bucket->plan());
      }
    }
    found_.memory.unsharded = std::max(found_.memory.unsharded, unsharded);
  }

  void count_gradients() {
    Memories gradients;
    for (const fsdp::Unit* unit : runtime().units()) {
      for (const auto& bucket : unit->buckets()) {
        gradients.add(bucket->accumulator());
        gradients.add(bucket->final_memory());
      }
    }
    for (const ShardView& view : model_->shards()) gradients.add(view.shard.grad());
    found_.memory.gradients = gradients.bytes();
  }

  void count_shards() {
    Memories shards, moments, masters;
    for (const fsdp::Unit* unit : runtime().units()) {
      for (const auto& bucket : unit->buckets()) shards.add(bucket->shard());
    }
    found_.memory.parameters = shards.bytes();
    const auto states = optimizer_->states();
    for (const auto& state : optimizer_->state()) {
      for (const auto& kept : state.kept) {
        const bool is_moment =
            std::ranges::any_of(states, [&](const auto& one) { return one.name == kept.name; });
        (is_moment ? moments : masters).add(kept.values);
      }
    }
    found_.memory.moments = moments.bytes();
    found_.memory.master = masters.bytes();
  }

  const MemoryCase& case_;
  const Config& config_;
  const models::ModelSpec& spec_;
  CountedBytes counted_;
  std::shared_ptr<Sharded<models::LanguageModel>> model_;
  std::unique_ptr<Optimizer> optimizer_;
  Found found_;
};

class MemoryTableOfRun : public ::testing::TestWithParam<MemoryCase> {};

TEST_P(MemoryTableOfRun, IsWhatIsCounted) {
  const MemoryCase& c = GetParam();
  const testing::TemporaryFolder folder;
  const Config config = config_of(c, folder);
  const ModelSource source = open_model(config.model, config.lora);
  const int world_size = c.dims.world_size();
  const ParallelDims dims = resolve_parallelism(config.parallelism, world_size);
  const ModelContract contract = resolve_model(source, config, dims);
  const auto plan = plan_model(source.description, contract.parameters, mesh_shape(dims));
  const MemoryTable table = memory_table(config, source.spec, dims, contract, plan,
                                         aux_loss_coef(config.model.aux_loss_coef, source.spec));

  std::vector<Found> found(static_cast<std::size_t>(world_size));
  on_ranks(world_size, [&](World& world) {
    at::manual_seed(7);
    found[static_cast<std::size_t>(world.rank())] = Rank(c, config, source, world).run();
  });
  std::int64_t kept = 0;
  for (const Found& each : found) {
    kept += each.kept;
    std::cerr << c.name << ": params " << each.memory.parameters << " grads "
              << each.memory.gradients << " moments " << each.memory.moments << " master "
              << each.memory.master << " unsharded " << each.memory.unsharded << " pool "
              << each.pool << " other " << each.other << " kept " << each.kept << "\n";
  }
  kept /= world_size;
  const auto said = table.activations->in(c.mode);
  std::cerr << c.name << " said: params " << table.held.parameters << " grads "
            << table.held.gradients << " moments " << table.held.moments << " master "
            << table.held.master << " unsharded " << table.held.unsharded << " reductions "
            << table.held.reductions << " kept " << said.kept << " peak " << said.peak << " ratio "
            << static_cast<double>(said.kept) / static_cast<double>(kept) << "\n";
}

constexpr auto kFull = RecomputeMode::kFull;
constexpr auto kSelective = RecomputeMode::kSelective;
constexpr auto kBf16 = DType::kBFloat16;

INSTANTIATE_TEST_SUITE_P(
    Cases, MemoryTableOfRun,
    ::testing::Values(
        MemoryCase{.name = "dense"},
        MemoryCase{.name = "dense_bf16", .dims = {.dp_shard = 2}, .compute = kBf16},
        MemoryCase{.name = "dense_long", .dims = {.dp_shard = 2}, .positions = 300},
        MemoryCase{.name = "dense_full", .dims = {.dp_shard = 2}, .mode = kFull, .compute = kBf16},
        MemoryCase{.name = "dense_selective", .dims = {.dp_shard = 2}, .mode = kSelective},
        MemoryCase{.name = "hsdp", .dims = {.dp_replicate = 2, .dp_shard = 2}},
        MemoryCase{.name = "micro_batches", .dims = {.dp_shard = 2}, .micro_batches = 2},
        MemoryCase{.name = "tp", .dims = {.dp_shard = 2, .tp = 2}},
        MemoryCase{.name = "tp_whole",
                   .dims = {.dp_shard = 1, .tp = 2, .sequence = SequenceParallel::kNo},
                   .compute = kBf16},
        MemoryCase{.name = "moe", .family = "qwen3-moe", .dims = {.dp_shard = 2}},
        MemoryCase{.name = "moe_bf16", .family = "qwen3-moe", .compute = kBf16},
        MemoryCase{.name = "moe_ep", .family = "qwen3-moe", .dims = {.dp_shard = 2, .ep = 2}},
        MemoryCase{.name = "moe_ep_selective",
                   .family = "qwen3-moe",
                   .dims = {.dp_shard = 2, .ep = 2},
                   .mode = kSelective},
        MemoryCase{.name = "moe_tp_ep",
                   .family = "qwen3-moe",
                   .dims = {.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2}},
        MemoryCase{.name = "moe_tp_ep_sliced",
                   .family = "qwen3-moe",
                   .dims = {.dp_shard = 1, .tp = 2, .ep = 2, .sequence = SequenceParallel::kNo}},
        MemoryCase{.name = "moe_tp_all_routed",
                   .family = "qwen3-moe",
                   .dims = {.dp_shard = 1, .tp = 2, .router = RouterTokens::kAll}},
        MemoryCase{.name = "deepseek", .family = "deepseek-v2", .compute = kBf16},
        MemoryCase{.name = "gpt_oss", .family = "gpt-oss", .compute = kBf16},
        MemoryCase{.name = "gpt_oss_fp32", .family = "gpt-oss"},
        MemoryCase{.name = "gemma", .family = "gemma4", .compute = kBf16},
        MemoryCase{.name = "gemma_full", .family = "gemma4", .mode = kFull},
        MemoryCase{.name = "gemma_tp", .family = "gemma4", .dims = {.tp = 2}},
        MemoryCase{.name = "narrow_storage",
                   .dims = {.dp_shard = 2},
                   .compute = kBf16,
                   .change =
                       [](Config& config) {
                         config.precision.storage_dtype.dtype = kBf16;
                         config.precision.reduce_dtype.dtype = kBf16;
                       }}),
    [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace tessera::train::memory_table_test
