// What is said of attention over ranks that share rows: bytes are those of dry steps, in both
// forms; bits are promised only where they are the same; locks and plans of another cut are
// refused.
#include "train/context_of_run.h"

#include "grad/contract_lock.h"
#include "support/test.h"
#include "train/contract_of_run.h"
#include "train/dry/step_traffic.h"
#include "train/planned_steps.h"
#include "unit/train/run_case.h"

namespace tessera::train::context_of_run_test {
namespace {

constexpr auto kGather = ContextForm::kGather;
constexpr auto kHeads = ContextForm::kHeads;

/// A configuration whose rows are shared, and its model.
struct Shared {
  Shared(const std::string& family, int cp, ContextForm form)
      : config(run_case(folder, Head::kOwn)) {
    write_model(folder, family + "-fp32");
    config.precision.param_dtype.dtype = DType::kFloat32;
    config.training.seq_len = 256;
    config.training.local_batch_size = 2;
    config.training.global_batch_size = 2;
    config.parallelism.context_parallel_degree = cp;
    config.parallelism.context_parallel_form = form;
    source = open_model(config.model, config.lora);
  }
  ParallelDims dims() const {
    return resolve_parallelism(config.parallelism, config.parallelism.context_parallel_degree *
                                                       config.parallelism.tensor_parallel_degree);
  }
  ModelContract contract() const { return resolve_model(source, config, dims()); }
  ContextOfRun context() const {
    return context_of_run(config, source.spec, dims(), contract(), computes_on(config)).value();
  }
  /// The bytes that the rank of cp that sends most sends for attention in a dry step.
  std::int64_t sent() const {
    std::int64_t most = 0;
    for (int rank = 0; rank < dims().world_size(); ++rank) {
      const auto traffic =
          step_traffic(config, dry_step(config, source, rank, dims().world_size()));
      most = std::max(most, traffic.of_tokens->context);
    }
    return most;
  }
  TemporaryFolder folder;
  Config config;
  ModelSource source;
};

// Windows of 6 and 8 and chunks are shorter than a part: little of a row is reached.
TEST(ContextOfRun, BytesAreThoseOfDrySteps) {
  struct {
    const char* family;
    int cp;
    bool has_heads;
  } const cases[] = {{"qwen3", 2, true},       {"qwen3", 4, false},      {"gemma3-text", 4, false},
                     {"gpt-oss", 2, true},     {"llama4-text", 2, true}, {"deepseek-v2", 2, true},
                     {"deepseek-v2", 4, true}, {"gemma4", 2, false}};
  for (const auto& c : cases) {
    SCOPED_TRACE(concat(c.family, " over ", c.cp));
    const Shared gather(c.family, c.cp, kGather);
    const ContextOfRun context = gather.context();
    EXPECT_EQ(context.bytes.sent(), gather.sent());
    EXPECT_EQ(context.other.has_value(), c.has_heads);
    if (!c.has_heads) continue;
    const Shared heads(c.family, c.cp, kHeads);
    EXPECT_EQ(context.other->sent(), heads.sent());
    EXPECT_EQ(heads.context().bytes.sent(), heads.sent());
    EXPECT_EQ(heads.context().other->sent(), gather.sent());
  }
}

TEST(ContextOfRun, HeadAndTailBalanceACausalMask) {
  EXPECT_DOUBLE_EQ(Shared("qwen3", 2, kGather).context().slowest_over_mean, 1.0);
  Shared uneven("qwen3", 2, kGather);
  uneven.config.training.seq_len.reset();
  EXPECT_THAT(costs_text(uneven.context()), Says("set training.seq_len"));
}

TEST(ContextOfRun, BitsArePromisedWhereTheyAreTheSame) {
  Shared run("qwen3", 2, kGather);
  const std::string same = "as one rank with context_parallel_parts = 4, one thread a rank";
  EXPECT_EQ(run.context().forward_bits,
            same + "; bounds without parts, which have 64 positions, no multiple of 256");
  EXPECT_EQ(run.context().backward_bits, same);
  run.config.training.seq_len = 1024;
  EXPECT_EQ(run.context().forward_bits, same + "; as one rank without parts, too");
  models::ModelSpec of_three = run.source.spec;
  of_three.num_attention_heads = 3 * of_three.num_key_value_heads;
  EXPECT_EQ(
      context_of_run(run.config, of_three, run.dims(), run.contract(), KernelsOf::kCpu)
          ->forward_bits,
      same +
          "; bounds without parts, as blocks of queries with 3 heads a key head do not divide "
          "256");
  Shared chunks("llama4-text", 2, kGather);
  chunks.config.training.seq_len = 1024;
  EXPECT_THAT(chunks.context().forward_bits,
              Says("; bounds without parts, as a row without them is computed chunk by chunk"));
  run.config.precision.param_dtype.dtype = DType::kBFloat16;
  EXPECT_THAT(run.context().forward_bits, Says("bounds: computes in bfloat16 ("));
  EXPECT_THAT(Shared("qwen3", 2, kHeads).context().forward_bits,
              Says("as one rank with whole rows"));
  const Shared latent("deepseek-v2", 2, kGather);
  EXPECT_THAT(latent.context().forward_bits,
              Says("as one rank with context_parallel_parts = 4", "at least 4 on its rank"));
  EXPECT_THAT(latent.context().backward_bits,
              Says("bounds: the gradient of a latent has one addend from each of 2 ranks"));
}

TEST(ContextOfRun, TextSaysPlacementsAndTheCheaperForm) {
  const Shared run("qwen3", 2, kGather);
  EXPECT_THAT(contract_text(run.context()),
              Says("rows over cp 2: form gather, 4 parts, 128 of 256 positions on a rank\n",
                   "k, v of attention: S(cut) -> R, gradient P -> S(cut) in float32, in the order "
                   "of 4 parts\n"));
  EXPECT_THAT(contract_text(Shared("deepseek-v2", 2, kGather).context()),
              Says("latent of k, v: S(cut) -> R, gradient P -> S(cut) in float32, in the order of "
                   "2 ranks\n"));
  EXPECT_THAT(contract_text(Shared("qwen3", 2, kHeads).context()),
              Says("q, k, v of attention: S(cut) -> S(heads)"));
  EXPECT_THAT(costs_text(run.context()), Says("cheaper form: none, both send "));
  EXPECT_THAT(costs_text(Shared("gpt2", 2, kGather).context()),
              Says("cheaper form: heads (gather sends "));
  EXPECT_THAT(costs_text(Shared("deepseek-v2", 2, kHeads).context()),
              Says("cheaper form: gather (gather sends "));
  EXPECT_THAT(costs_text(Shared("qwen3", 4, kGather).context()),
              Says("4 ranks of cp and 1 of tp do not divide the heads"));
}

// Every rank's numbers depend on the cut: another one is another agreement.
TEST(ContextOfRun, ALockOfAnotherCutIsRefusedByName) {
  Shared run("qwen3", 2, kGather);
  run.config.contract.lock = run.folder / "lock";
  const auto locked = [&](const std::vector<std::string>& lines) {
    run.folder.write("lock", grad::contract_lock(run.contract(), lines));
    require_locked(run.config, run.contract(), SaysDifferences::kNo);
  };
  locked(context_lock_lines(run.dims()));
  EXPECT_REFUSED(kContract, locked({}), "found 3 lines other than those of ",
                 "+ context rows degree 2");
  ParallelDims other = run.dims();
  other.context_parts = 8;
  EXPECT_REFUSED(kContract, locked(context_lock_lines(other)), "- context rows parts 8",
                 "+ context rows parts 4");
  other = run.dims();
  other.context_form = kHeads;
  EXPECT_REFUSED(kContract, locked(context_lock_lines(other)), "- context rows form heads");
  EXPECT_EQ(context_lock_lines({}), std::vector<std::string>());
  EXPECT_EQ(context_text({}), "");
  EXPECT_EQ(context_text(run.dims()), "gather over 2 ranks, 4 parts");
}

}  // namespace
}  // namespace tessera::train::context_of_run_test
