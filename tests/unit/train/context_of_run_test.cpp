// What is said of attention over ranks that share rows: bytes are those of dry steps, in both
// forms; bits are promised only where they are the same; locks and plans of another cut are
// refused.
#include "train/context_of_run.h"

#include <span>

#include "grad/contract_lock.h"
#include "io/safetensors.h"
#include "layout/context_cut.h"
#include "support/test.h"
#include "train/contract_of_run.h"
#include "train/dry/dry_batches.h"
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

/// The most pairs of a rank over the mean, counted query by query.
double counted_balance(const Shared& run) {
  const auto cut = layout::head_tail(256, run.dims().cp, run.dims().context_parts);
  double most = 0.0, sum = 0.0;
  for (int rank = 0; rank < cut.ranks; ++rank) {
    double pairs = 0.0;
    for (std::int64_t layer = 0; layer < run.source.spec.num_hidden_layers; ++layer) {
      const auto window = models::attention_of(run.source.spec, layer).window;
      const std::int64_t chunk = run.source.spec.is_chunked(layer)
                                     ? run.source.spec.chunked->attention_chunk_size
                                     : std::int64_t{256};
      for (const std::int64_t place : cut.places_of(rank)) {
        pairs += static_cast<double>(std::min(place % chunk + 1, window.value_or(256)));
      }
    }
    most = std::max(most, pairs);
    sum += pairs;
  }
  return most * cut.ranks / sum;
}

// Windows and chunks leave the tail of a row less than its share; all layers have the same heads.
TEST(ContextOfRun, BalanceIsThatOfPairsCountedOneByOne) {
  for (const char* family : {"gemma3-text", "llama4-text", "mistral"}) {
    for (const int parts : {4, 8, 64}) {
      SCOPED_TRACE(concat(family, ", ", parts, " parts"));
      Shared run(family, 2, kGather);
      run.config.parallelism.context_parallel_parts = parts;
      EXPECT_DOUBLE_EQ(run.context().slowest_over_mean, counted_balance(run));
    }
  }
}

// A dry step reads no data, but the rows of its files are those of the run.
TEST(ContextOfRun, RowsOfFilesThatRanksCannotShareAreRefused) {
  Shared run("qwen3", 2, kGather);
  const auto path = run.folder / "rows.safetensors";
  SafetensorsWriter writer(path, {{.name = "input_ids", .dtype = DType::kInt64, .shape = {2, 63}}});
  const std::vector<std::int64_t> ids(2 * 63);
  writer.write("input_ids", std::as_bytes(std::span(ids)));
  writer.finish();
  const auto refused = [&] {
    return error_of(ErrorKind::kConfig, [&] { check_rows_of_files(run.config, run.source); });
  };
  run.config.data.path = {"/nowhere/rows.safetensors"};
  EXPECT_NO_THROW(check_rows_of_files(run.config, run.source));
  run.config.validation.path = {path};
  EXPECT_THAT(refused(), Says("validation.path: found rows of 63 tokens, expected a multiple of "
                              "the 4 parts"));
  run.config.validation.path.clear();
  run.config.data.path = {path};
  EXPECT_THAT(refused(), Says("found rows of 63 tokens"));
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
