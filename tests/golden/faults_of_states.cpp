// Layers with a state that carry it over a border, decay by a rounded rate, or hold parts of other
// heads.

#include <ATen/ops/zeros_like.h>

#include "golden/faults.h"

namespace tessera::golden {
namespace {

constexpr int kRanksOfTp = 2;

ParameterLayout cut_in(std::vector<std::int64_t> sections) {
  return {.axes = {AxisPlacement::shard("tp", kRanksOfTp, 0)}, .sections = std::move(sections)};
}

Changes misplaced(const std::string& ending, const ParameterLayout& layout) {
  return {.parts = [=](const RankParts& rank) { place(rank, ending, layout); }};
}

/// The part takes a row for one document.
Changes without_borders(nn::StatePart part) {
  return {.starts = [=](nn::StatePart of, const at::Tensor& starts) {
    return of == part ? at::zeros_like(starts) : starts;
  }};
}

void compute_narrow(GradContract& contract) { contract.compute.dtype = DType::kBFloat16; }

}  // namespace

std::vector<Fault> faults_of_states() {
  const Degrees shards{.tp = kRanksOfTp};
  const Degrees whole{.tp = kRanksOfTp, .sequence = false};
  const ParameterLayout everywhere{.axes = {AxisPlacement::invariant("tp", kRanksOfTp)}};
  const auto narrow = [](const std::string& parameter) {
    return Changes{
        .parts = [=](const RankParts& rank) { on_contracts(rank, parameter, compute_narrow); }};
  };
  return {
      {"DecayInBFloat16", "The logarithm of a state's decay is computed with in bf16",
       "NeMo Automodel #2484", kHybrid, Degrees{.shard = 2}, narrow("linear_attn.A_log"),
       CaughtBy::kGradients, "linear_attn.A_log"},
      {"StateOverBorders", "A state is carried over the borders of documents",
       "NeMo Automodel #2147, torchtitan #3892", kHybrid, shards,
       without_borders(nn::StatePart::kRecurrence), CaughtBy::kGradients,
       "linear_attn.in_proj_qkvz.weight", Setting::kPacked},
      {"ConvolutionOverBorders", "A convolution sees the document before",
       "NeMo Automodel #2147, torchtitan #3892", kHybrid, shards,
       without_borders(nn::StatePart::kConvolution), CaughtBy::kGradients,
       "linear_attn.conv1d.weight", Setting::kPacked},
      {"FiltersOfOtherHeads", "Filters of [q \\| k \\| v] are cut as rows of one matrix",
       "Megatron-LM #1989", kHybrid, shards, misplaced("linear_attn.conv1d", cut_in({})),
       CaughtBy::kGradients, "linear_attn.conv1d.weight"},
      {"RowsOfOtherHeads", "Rows that stand by key heads are cut as [q \\| k \\| v \\| z]",
       "next to Megatron-LM #1989", kHybrid, shards,
       misplaced("linear_attn.in_proj_qkvz", cut_in({16, 16, 48, 48})), CaughtBy::kGradients,
       "linear_attn.in_proj_qkvz.weight"},
      {"RatesOfOtherHeads", "Rates that stand by key heads are cut as [b \\| a]", "vLLM #36242",
       kHybrid, shards, misplaced("linear_attn.in_proj_ba", cut_in({4, 4})), CaughtBy::kGradients,
       "linear_attn.in_proj_ba.weight"},
      {"GatedNormUnreduced", "The norm of cut value heads counts as Invariant",
       "next to SkyRL #2226", kHybrid, whole, misplaced("linear_attn.norm", everywhere),
       CaughtBy::kInvariance, "linear_attn.norm.weight"},
      {"DecayOfStateSpaceInBFloat16", "The logarithm of Mamba-2's decay is computed with in bf16",
       "NeMo Automodel #2484", kMamba, Degrees{.shard = 2}, narrow("mixer.A_log"),
       CaughtBy::kGradients, "mixer.A_log"},
      {"StateSpaceOverBorders", "The state of Mamba-2 is carried over the borders of documents",
       "NeMo Automodel #2147", kMamba, shards, without_borders(nn::StatePart::kRecurrence),
       CaughtBy::kGradients, "mixer.in_proj.weight", Setting::kPacked},
      {"ConvolutionOfStateSpaceOverBorders", "The convolution of Mamba-2 sees the document before",
       "NeMo Automodel #2147, torchtitan #3892", kMamba, shards,
       without_borders(nn::StatePart::kConvolution), CaughtBy::kGradients, "mixer.conv1d.weight",
       Setting::kPacked},
      {"InputsOfOtherGroups",
       "Rows of [gate \\| x \\| B \\| C \\| dt] are cut as rows of one matrix", "Megatron-LM #1989",
       kMamba, shards, misplaced("mixer.in_proj", cut_in({})), CaughtBy::kGradients,
       "mixer.in_proj.weight"},
      {"StateInputsNotGrouped", "Filters of [x \\| B \\| C] are cut as [x \\| B and C]",
       "next to Megatron-LM #1989", kMamba, shards, misplaced("mixer.conv1d", cut_in({48, 48})),
       CaughtBy::kGradients, "mixer.conv1d.weight"},
  };
}

}  // namespace tessera::golden
