// Compares the memory table of `inspect --contract` with counted bytes: real steps on ranks as
// threads, whose allocations and tensors are counted.
//
// Batches are random tokens. What is exact is compared exactly; what autograd keeps within 5 %.
// Where experts lie on several ranks, or a vocabulary does, each rank has what the tokens happen to
// choose: there the mean over ranks is compared.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/dry_world.h"
#include "dry/allocator.h"
#include "dry/fake_operations.h"
#include "dry/memory_count.h"
#include "fsdp/held_bytes.h"
#include "fsdp/optim/optimizer_registry.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/group.h"
#include "tessera/optim.h"
#include "train/data/data.h"
#include "train/dry/dry_step.h"
#include "train/dry/rank_memory.h"
#include "train/parallelize.h"
#include "unit/train/inside_operations.h"
#include "unit/train/parallel_degrees.h"
#include "unit/train/run_case.h"

namespace tessera::train::memory_table_test {
namespace {

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
  bool packed = false;  ///< documents of a third of a row
};
void PrintTo(const MemoryCase& c, std::ostream* out) { *out << c.name; }

void write_model_of(const TemporaryFolder& folder, const std::string& family) {
  write_model(folder, family + "-fp32", [&](auto& model, auto& text) {
    if (family == "gpt2") {
      text.update({{"n_embd", 128}, {"n_positions", 64}, {"vocab_size", 512}});
      return;
    }
    widen(model, text);
    if (family == "phi3") text["num_hidden_layers"] = 4;  // as others: shares are of all layers
    if (family == "gemma4") text["sliding_window"] = 48;
  });
}

Config config_of(const MemoryCase& c, const TemporaryFolder& folder) {
  Config config = run_case(folder, Head::kOwn);
  write_model_of(folder, c.family);
  set_parallelism(config, c.dims);
  config.precision.param_dtype.dtype = c.compute;
  config.activation_checkpoint.mode = c.mode;
  config.training.seq_len = c.positions;
  config.training.local_batch_size = c.rows;
  config.training.global_batch_size = c.rows * c.dims.data_ranks() * c.micro_batches;
  // A projector that no batch uses is never stepped.
  if (c.family == "gemma4") config.model.freeze = {"model.vision_tower", "model.embed_vision"};
  if (c.change) c.change(config);
  return config;
}

/// The bytes that one rank was found to hold.
struct Found {
  RankMemory memory;
  std::int64_t kept = 0;
  std::int64_t other = 0;  ///< counted outside of all lines of the table, between two steps
  std::int64_t pool = 0;
  std::int64_t peak = 0;
  std::int64_t peak_outside = 0;  ///< of libtorch's operations
};

enum class ValuesOf : std::uint8_t { kRun, kNone };

class Rank {
 public:
  Rank(const MemoryCase& c, const Config& config, const ModelSource& source, World& world,
       InitialWeights weights = InitialWeights::kOfSource)
      : case_(c), config_(config), spec_(source.spec), world_(world) {
    const ParallelDims dims = resolve_parallelism(config.parallelism, world.size());
    model_ = parallelize(source, config, world.mesh(mesh_shape(dims)), weights);
    optimizer_ = fsdp::make_optimizer(config.optimizer.name, *model_, *config.optimizer.lr,
                                      config.optimizer);
    EXPECT_EQ(std::ssize(optimizer_->states()),
              fsdp::kept_states(config.optimizer.name, config.optimizer));
  }

  Found run(ValuesOf values = ValuesOf::kRun) {
    {
      std::optional<kernels::WatchScope> watch;
      if (values == ValuesOf::kRun) watch.emplace(inside_);
      for (int number = 0; number < 3; ++number) step();
    }
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
    inside_.after = [this] { look(); };
    for (std::int64_t i = 0; i < case_.micro_batches; ++i) {
      const bool last = i + 1 == case_.micro_batches;
      model_->set_requires_gradient_sync(last || config_.training.sync_every_micro_batch);
      model_->set_requires_replica_reduce(last);
      micro_batch();
    }
    clip_grad_norm(*model_, config_.training.max_norm);
    optimizer_->step();
    found_.memory.gradients = fsdp::held_bytes(*model_).gradients;
    model_->zero_grad();
    counted_.watch({});
    inside_.after = {};
  }

  void micro_batch() {
    models::ModelInputs inputs;
    // Ranks of tp have the same rows. Low numbers are what Gemma has for images.
    auto generator = at::detail::createCPUGenerator(
        static_cast<std::uint64_t>(100 * ++batches_ + data_rank(model_->mesh())));
    const std::int64_t vocabulary = spec_.vocab_size;
    const at::Tensor tokens = at::randint(vocabulary / 4 + 2, vocabulary,
                                          {case_.rows, case_.positions}, generator, at::kLong);
    inputs.input_ids = tokens;
    inputs.targets = tokens.clone();
    if (case_.packed) inputs.documents.starts = documents();
    if (spec_.moe) inputs.router_statistics = models::RouterStatistics::kCounts;
    const auto outside = [&] { return runtime().pool()->total_bytes(); };
    // A rank that is still in the last exchange of the in-process backend holds what others sent.
    world_.group().barrier("before a forward");
    const std::int64_t before = counted_.now() - outside();
    auto output = model_->call(&models::LanguageModel::forward_routed, inputs);
    world_.group().barrier("after a forward");
    found_.kept = counted_.now() - outside() - before;
    found_.kept -= static_cast<std::int64_t>(output.result.nbytes());
    for (models::RouterLoad& load : output.loads) {
      found_.kept -= static_cast<std::int64_t>(load.counts.nbytes());
    }
    output.loads.clear();
    before_ = before;
    found_.peak = found_.peak_outside = 0;
    output.result.backward(at::full_like(output.result, 1e-3));
  }

  at::Tensor documents() const {
    const at::Tensor starts = at::zeros({case_.rows, case_.positions}, at::kLong);
    const std::int64_t third = case_.positions / 3;
    for (const std::int64_t begin : {third, 2 * third}) {
      starts.narrow(1, begin, case_.positions - begin).fill_(begin);
    }
    return starts;
  }

  void look() {
    const std::int64_t bytes = counted_.now() - runtime().pool()->total_bytes() - before_;
    found_.peak = std::max(found_.peak, bytes);
    if (!inside_.is_inside()) found_.peak_outside = std::max(found_.peak_outside, bytes);
    const std::int64_t unsharded = fsdp::unsharded_bytes(*model_);
    found_.memory.unsharded = std::max(found_.memory.unsharded, unsharded);
  }

  void count_shards() {
    const auto kept = fsdp::held_bytes(*optimizer_);
    found_.memory.parameters = fsdp::held_bytes(*model_).shards;
    found_.memory.moments = kept.moments;
    found_.memory.master = kept.masters;
  }

  const MemoryCase& case_;
  const Config& config_;
  const models::ModelSpec& spec_;
  World& world_;
  dry::MemoryCount counted_;
  InsideOperations inside_;
  std::shared_ptr<Sharded<models::LanguageModel>> model_;
  std::unique_ptr<Optimizer> optimizer_;
  Found found_;
  std::int64_t before_ = 0;
  int batches_ = 0;
};

constexpr double kShare = 0.05;  // scalars, counters, what ranks of tp hold for others

/// Compares the table, which is of rank 0, with what that rank was found to hold.
void expect_table(const MemoryTable& table, const Found& found, const MemoryCase& c) {
  RankMemory held = table.held;
  EXPECT_EQ(held.unsharded + held.reductions, found.pool);
  held.reductions = 0;
  EXPECT_EQ(held, found.memory);
  // Nothing of size is outside of the lines: tables, counters, an optimizer's memory for a part.
  EXPECT_LE(std::abs(found.other), (1 << 15) + 2 * held.master);
  if (c.dims.ep > 1) return;  // as many tokens as routers choose
  const auto& said = table.activations.at(c.mode);
  const auto kept = static_cast<double>(found.kept);
  EXPECT_NEAR(static_cast<double>(said.kept), kept, kShare * kept);
  // oneDNN takes memory for bf16 products, which cannot be seen before they run.
  EXPECT_GE(static_cast<double>(said.peak), (1 - kShare) * static_cast<double>(found.peak_outside));
}

/// Compares a rank without values with the one that has them. Experts get as many tokens each.
void expect_dry(const Found& real, const Found& dry, const MemoryCase& c, const ModelSource& source,
                int rank) {
  EXPECT_EQ(real.memory, dry.memory) << "rank " << rank;
  EXPECT_EQ(real.pool, dry.pool) << "rank " << rank;
  EXPECT_NEAR(static_cast<double>(real.other), static_cast<double>(dry.other), 64) << rank;
  if (c.dims.ep > 1) return;
  // A counter of a message comes and goes.
  EXPECT_NEAR(static_cast<double>(real.kept), static_cast<double>(dry.kept), 64) << rank;
  // Ranks of one process hold what they sent until all of them have it, on each axis; tiles of
  // experts follow their loads, which are even here.
  const int others = c.dims.tp - 1 + c.dims.cp - 1;
  const double may_differ = others > 0 ? 0.02 * (1 + others) : source.spec.moe ? 0.02 : 0.0;
  const auto peak = static_cast<double>(real.peak_outside);
  EXPECT_NEAR(peak, static_cast<double>(dry.peak_outside), 64 + may_differ * peak) << rank;
}

class MemoryTableOfRun : public ::testing::TestWithParam<MemoryCase> {};

TEST_P(MemoryTableOfRun, IsWhatIsCounted) {
  const MemoryCase& c = GetParam();
  const TemporaryFolder folder;
  const Config config = config_of(c, folder);
  const ModelSource source = open_model(config.model, config.lora);
  const int world_size = c.dims.world_size();
  const ParallelDims dims = resolve_parallelism(config.parallelism, world_size);

  dry::install_allocator();
  std::vector<Found> found(static_cast<std::size_t>(world_size));
  on_ranks(world_size, [&](World& world) {
    found[static_cast<std::size_t>(world.rank())] = Rank(c, config, source, world).run();
  });
  for (int rank = 0; rank < world_size; ++rank) {
    const auto world = comm::dry_world(rank, world_size);
    const dry::FakeScope no_values;
    const Found dry = Rank(c, config, source, *world, InitialWeights::kNone).run(ValuesOf::kNone);
    expect_dry(found[static_cast<std::size_t>(rank)], dry, c, source, rank);
    const DryStep step = dry_step(config, source, rank, world_size);
    const RankMemory& memory = found[static_cast<std::size_t>(rank)].memory;
    EXPECT_EQ(step.held.shards, memory.parameters) << "rank " << rank;
    EXPECT_EQ(step.held.gradients, memory.gradients) << "rank " << rank;
    EXPECT_EQ(step.held.unsharded, memory.unsharded) << "rank " << rank;
    EXPECT_EQ(step.optimizer.moments, memory.moments) << "rank " << rank;
    EXPECT_EQ(step.optimizer.masters, memory.master) << "rank " << rank;
  }
  const MemoryTable table =
      memory_table(config, source, dims, dry_step(config, source, 0, world_size));
  expect_table(table, found.front(), c);
}

constexpr auto kFull = RecomputeMode::kFull;
constexpr auto kSelective = RecomputeMode::kSelective;
constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kWhole = SequenceParallel::kNo;

void adapters(Config& config) {
  config.model.config.clear();
  config.model.path = std::string(TESSERA_TEST_DATA) + "/qwen3-mixed";
  config.lora = {.rank = 4, .alpha = 8.0, .targets = {"q_proj", "v_proj", "down_proj"}};
}

void expert_adapters(Config& config) {
  config.model.config.clear();
  config.model.path = std::string(TESSERA_TEST_DATA) + "/qwen3-moe-mixed";
  config.lora = {.rank = 4, .alpha = 8.0, .targets = {"q_proj", "experts.*"}};
}

void bf16_shards(Config& config) {
  config.precision.storage_dtype.dtype = kBf16;
  config.precision.reduce_dtype.dtype = kBf16;
}

void no_reshard_and_momentum(Config& config) {
  config.parallelism.reshard_after_forward = false;
  config.optimizer.name = OptimizerName::kSgd;
  config.optimizer.momentum = 0.9;
}

std::vector<MemoryCase> dense_cases() {
  return {{.name = "one_rank"},
          {.name = "bf16", .dims = {.dp_shard = 2}, .compute = kBf16},
          {.name = "two_blocks_of_attention", .dims = {.dp_shard = 2}, .positions = 300},
          {.name = "full", .dims = {.dp_shard = 2}, .mode = kFull, .compute = kBf16},
          {.name = "selective", .dims = {.dp_shard = 2}, .mode = kSelective},
          {.name = "hsdp", .dims = {.dp_replicate = 2, .dp_shard = 2}},
          {.name = "micro_batches", .dims = {.dp_shard = 2}, .micro_batches = 2},
          {.name = "no_reshard", .dims = {.dp_shard = 2}, .change = no_reshard_and_momentum},
          {.name = "bf16_shards", .dims = {.dp_shard = 2}, .compute = kBf16, .change = bf16_shards},
          {.name = "lora", .dims = {.dp_shard = 2}, .compute = kBf16, .change = adapters},
          {.name = "lora_full",
           .dims = {.dp_shard = 2},
           .mode = kFull,
           .compute = kBf16,
           .change = adapters},
          {.name = "tp", .dims = {.dp_shard = 2, .tp = 2}},
          {.name = "tp_selective", .dims = {.tp = 2}, .mode = kSelective},
          {.name = "tp_whole_sequence", .dims = {.tp = 2, .sequence = kWhole}, .compute = kBf16},
          {.name = "cp", .dims = {.cp = 2, .context_parts = 4}, .positions = 128},
          {.name = "cp4", .dims = {.cp = 4, .context_parts = 8}, .positions = 256},
          {.name = "cp_full_bf16",
           .dims = {.cp = 2, .context_parts = 4},
           .mode = kFull,
           .compute = kBf16,
           .positions = 128},
          {.name = "cp_heads",
           .dims = {.cp = 2, .context_form = ContextForm::kHeads, .context_parts = 4},
           .positions = 128},
          {.name = "cp_packed",
           .dims = {.cp = 2, .context_parts = 16},
           .positions = 256,
           .packed = true},
          {.name = "cp_tp_selective",
           .dims = {.cp = 2, .tp = 2, .context_parts = 4},
           .mode = kSelective,
           .positions = 128},
          {.name = "olmo2", .family = "olmo2", .compute = kBf16},
          {.name = "olmo2_tp", .family = "olmo2", .dims = {.tp = 2}},
          {.name = "gpt2", .family = "gpt2", .compute = kBf16},
          {.name = "gpt2_selective", .family = "gpt2", .mode = kSelective},
          {.name = "gpt2_tp", .family = "gpt2", .dims = {.tp = 2}},
          {.name = "gemma3", .family = "gemma3-text", .compute = kBf16},
          {.name = "gemma3_cp",
           .family = "gemma3-text",
           .dims = {.cp = 2, .context_parts = 4},
           .positions = 128},
          {.name = "gemma3_tp", .family = "gemma3-text", .dims = {.tp = 2}, .mode = kSelective},
          {.name = "granite", .family = "granite", .compute = kBf16},
          {.name = "granite_tp", .family = "granite", .dims = {.tp = 2}},
          {.name = "smollm3", .family = "smollm3", .dims = {.dp_shard = 2}},
          {.name = "phi3", .family = "phi3", .compute = kBf16},
          {.name = "phi3_tp", .family = "phi3", .dims = {.tp = 2}, .mode = kSelective},
          {.name = "qwen3_5", .family = "qwen3-5-text", .compute = kBf16},
          {.name = "qwen3_5_tp", .family = "qwen3-5-text", .dims = {.tp = 2}}};
}

std::vector<MemoryCase> expert_cases() {
  const std::string moe = "qwen3-moe";
  return {
      {.name = "moe", .family = moe, .dims = {.dp_shard = 2}},
      {.name = "moe_full", .family = moe, .mode = kFull, .compute = kBf16},
      {.name = "ep", .family = moe, .dims = {.dp_shard = 2, .ep = 2}},
      {.name = "ep_selective",
       .family = moe,
       .dims = {.dp_shard = 2, .ep = 2},
       .mode = kSelective,
       .compute = kBf16},
      {.name = "lora_of_experts",
       .family = moe,
       .dims = {.dp_shard = 2},
       .compute = kBf16,
       .change = expert_adapters},
      {.name = "lora_of_experts_ep_etp_selective",
       .family = moe,
       .dims = {.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2},
       .mode = kSelective,
       .compute = kBf16,
       .change = expert_adapters},
      {.name = "tp_ep_etp", .family = moe, .dims = {.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2}},
      {.name = "tp_ep_whole_sequence",
       .family = moe,
       .dims = {.tp = 2, .ep = 2, .sequence = kWhole}},
      {.name = "tp_router_on_all", .family = moe, .dims = {.tp = 2, .router = RouterTokens::kAll}},
      {.name = "deepseek", .family = "deepseek-v2", .compute = kBf16},
      {.name = "deepseek_cp",
       .family = "deepseek-v2",
       .dims = {.cp = 2, .context_parts = 4},
       .positions = 128},
      {.name = "gpt_oss_cp",
       .family = "gpt-oss",
       .dims = {.cp = 2, .context_parts = 4},
       .positions = 128},
      {.name = "gpt_oss", .family = "gpt-oss", .compute = kBf16},
      {.name = "mixtral", .family = "mixtral", .compute = kBf16},
      {.name = "qwen3_next", .family = "qwen3-next", .compute = kBf16},
      {.name = "qwen3_next_tp", .family = "qwen3-next", .dims = {.tp = 2}, .mode = kSelective},
      {.name = "qwen3_next_ep_full",
       .family = "qwen3-next",
       .dims = {.dp_shard = 2, .ep = 2},
       .mode = kFull},
      {.name = "nemotron_h", .family = "nemotron-h", .dims = {.dp_shard = 2}},
      {.name = "nemotron_h_tp", .family = "nemotron-h", .dims = {.tp = 2}, .mode = kSelective},
      {.name = "gemma", .family = "gemma4", .compute = kBf16},
      {.name = "gemma_full", .family = "gemma4", .mode = kFull},
      {.name = "gemma_tp", .family = "gemma4", .dims = {.tp = 2}, .mode = kSelective}};
}

TEST(MemoryTableText, MarksTheModeAndSaysWhatIsMissing) {
  MemoryTable table{.mode = RecomputeMode::kFull, .rows = 2, .positions = 512};
  table.held.parameters = std::int64_t{3} << 30;
  EXPECT_THAT(to_string(table), Says("set training.seq_len"));
  table.activations[RecomputeMode::kNone] = table.activations[RecomputeMode::kSelective] = {};
  table.activations[RecomputeMode::kFull] = {std::int64_t{1} << 30, std::int64_t{2} << 30};
  const std::string text = to_string(table);
  EXPECT_THAT(text, Says("parameters              3.00 GiB  stored shards\n",
                         "micro-batch of 2 x 512 tokens",
                         "    full        1.00 GiB      2.00 GiB          5.00 GiB  <- "));
}

const auto kName = [](const auto& one) { return one.param.name; };
INSTANTIATE_TEST_SUITE_P(Dense, MemoryTableOfRun, ::testing::ValuesIn(dense_cases()), kName);
INSTANTIATE_TEST_SUITE_P(Experts, MemoryTableOfRun, ::testing::ValuesIn(expert_cases()), kName);

}  // namespace
}  // namespace tessera::train::memory_table_test
