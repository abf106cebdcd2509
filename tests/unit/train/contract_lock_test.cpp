// contract.lock of a run: each change of what ranks agree on is refused by the parameter, and what
// changes nothing of it is not.
#include "grad/contract_lock.h"

#include <random>

#include "support/test.h"
#include "train/contract_of_run.h"
#include "unit/train/parallel_degrees.h"
#include "unit/train/run_case.h"

namespace tessera::train::contract_lock_test {
namespace {

struct Change {
  const char* what;
  std::function<void(Config&)> make;
};

/// Each changes what is agreed, independent of the others.
const std::vector<Change>& changes() {
  static const std::vector<Change> kAll{
      {"computes in fp32", [](Config& c) { c.precision.param_dtype.dtype = DType::kFloat32; }},
      {"computes in fp16", [](Config& c) { c.precision.param_dtype.dtype = DType::kFloat16; }},
      {"sums in bf16", [](Config& c) { c.precision.reduce_dtype.dtype = DType::kBFloat16; }},
      {"stored in bf16", [](Config& c) { c.precision.storage_dtype.dtype = DType::kBFloat16; }},
      {"a frozen embedding", [](Config& c) { c.model.freeze = {"embed_tokens"}; }},
      {"a frozen layer", [](Config& c) { c.model.freeze = {"layers.1"}; }},
      {"a rule for norms",
       [](Config& c) {
         PrecisionRule rule;
         rule.match = {"*norm*"};
         rule.accumulate_dtype = DType::kFloat64;
         c.precision.rule.push_back(rule);
       }},
      {"tensor parallel", [](Config& c) { c.parallelism.tensor_parallel_degree = 2; }},
      {"replicas", [](Config& c) { c.parallelism.data_parallel_replicate_degree = 2; }},
      {"weights without decay", [](Config& c) { c.optimizer.no_decay = {"*norm*"}; }},
      {"adapters", [](Config& c) { c.lora = {.rank = 2, .targets = {"q_proj"}}; }},
  };
  return kAll;
}

/// None does.
const std::vector<Change>& others() {
  static const std::vector<Change> kAll{
      {"another learning rate", [](Config& c) { c.optimizer.lr = 0.5; }},
      {"more steps", [](Config& c) { c.training.steps = 77; }},
      {"longer rows", [](Config& c) { c.training.seq_len = 64; }},
      {"more rows", [](Config& c) { c.training.local_batch_size = 4; }},
      {"another seed", [](Config& c) { c.debug.seed = 7; }},
      {"recomputation", [](Config& c) { c.activation_checkpoint.mode = RecomputeMode::kFull; }},
      {"kept parameters", [](Config& c) { c.parallelism.reshard_after_forward = false; }},
      {"a plan", [](Config& c) { c.compile.mode = CompileChoice::kPlan; }},
      {"a clip", [](Config& c) { c.training.max_norm = 3.0; }},
      {"reductions each time", [](Config& c) { c.training.sync_every_micro_batch = true; }},
      {"a dump folder", [](Config& c) { c.job.dump_folder = "elsewhere"; }},
      {"a warm-up", [](Config& c) { c.lr_scheduler.warmup_steps = 3; }},
  };
  return kAll;
}

constexpr int kRanks = 4;

ModelContract contract_of(const Config& config) {
  const ModelSource source = open_model(config.model, config.lora);
  return resolve_model(source, config, resolve_parallelism(config.parallelism, kRanks));
}

/// A run with a lock, of any of the families.
struct Locked {
  explicit Locked(const std::string& family) : config(run_case(folder, Head::kOwn)) {
    write_model(folder, family);
    config.model.path = "";
    folder.write("lock", grad::contract_lock(contract_of(config)));
    config.contract.lock = folder / "lock";
  }
  TemporaryFolder folder;
  Config config;
};

const char* const kFamilies[] = {"qwen3-fp32",     "llama-fp32",       "olmo2-fp32",
                                 "qwen3-moe-fp32", "deepseek-v2-fp32", "gpt-oss-fp32"};

template <class List>
const auto& one_of(const List& list, std::mt19937& random) {
  return list[std::uniform_int_distribution<std::size_t>(0, std::size(list) - 1)(random)];
}

TEST(ContractLockOfRun, RefusesEachOf100Changes) {
  for (unsigned seed = 1; seed <= 100; ++seed) {
    std::mt19937 random(seed);
    const char* family = one_of(kFamilies, random);
    Locked run(family);
    const Change& change = one_of(changes(), random);
    const Change& other = one_of(others(), random);
    change.make(run.config);
    other.make(run.config);
    SCOPED_TRACE(concat("seed ", seed, ": ", family, ", ", change.what, ", ", other.what));
    const ModelContract contract = contract_of(run.config);
    EXPECT_REFUSED(kContract, require_locked(run.config, contract, SaysDifferences::kNo),
                   "contract.lock: found ", "lines other than those of ", "parameter ",
                   "tessera inspect --contract CONFIG --lock ");
  }
}

TEST(ContractLockOfRun, TakesEachOf100RunsThatAgreeOnTheSame) {
  for (unsigned seed = 1; seed <= 100; ++seed) {
    std::mt19937 random(seed);
    const char* family = one_of(kFamilies, random);
    Locked run(family);
    for (int i = 0; i < 3; ++i) one_of(others(), random).make(run.config);
    SCOPED_TRACE(concat("seed ", seed, ": ", family));
    EXPECT_NO_THROW(require_locked(run.config, contract_of(run.config), SaysDifferences::kNo));
  }
}

}  // namespace
}  // namespace tessera::train::contract_lock_test
