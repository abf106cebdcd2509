// Faults of ranks that share the positions of rows: exchanges that join or sum wrongly, masks and
// positions of a rank instead of the row, counts of one rank, sums over other ranks. The numbers
// are those of docs/context.md. Rows have 24 positions; a part has 24 / (2 cp).
#include <ATen/ATen.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

#include "golden/faults.h"
#include "layout/context_cut.h"
#include "nn/documents.h"
#include "parallel/collectives.h"
#include "tessera/clip.h"

namespace tessera::golden {
namespace {

using Kind = parallel::ContextSite::Kind;
using parallel::ContextSite;

constexpr std::int64_t kIgnored = -100;

int cp_rank(const RankParts& rank) { return rank.mesh.coordinate(axis::kContext); }
int cp_size(const RankParts& rank) { return rank.mesh.size_of(axis::kContext); }

/// As the model cuts rows of one document.
layout::ContextCut cut_of(std::int64_t positions, int ranks) {
  return layout::head_tail(positions, ranks, 2 * ranks);
}

at::Tensor places_of(const layout::ContextCut& cut, int rank) {
  return at::tensor(cut.places_of(rank), at::kLong);
}

at::Tensor own_places(const RankParts& rank, std::int64_t positions) {
  return places_of(cut_of(positions, cp_size(rank)), cp_rank(rank));
}

/// `way` of the tensors at places of that kind; it says whether it changed them.
using Exchange =
    std::function<bool(const RankParts&, const ContextSite&, std::vector<at::Tensor>&)>;
Changes exchange(Kind kind, Exchange way) {
  return {.context = [=](const RankParts& rank) {
    return ContextStandIn{.exchange = [=](const ContextSite& site, std::vector<at::Tensor>& all) {
      if (site.kind == kind && !site.axis.alone() && way(rank, site, all)) rank.act();
    }};
  }};
}

/// The same of each tensor.
Changes each(Kind kind, std::function<at::Tensor(const ContextSite&, const at::Tensor&)> way) {
  return exchange(kind,
                  [=](const RankParts&, const ContextSite& site, std::vector<at::Tensor>& all) {
                    for (at::Tensor& one : all) one = way(site, one);
                    return true;
                  });
}

/// Changes the mask; `way` says whether it did.
Changes mask(std::function<bool(nn::AttentionMask&, const layout::ContextCut&)> way) {
  return {.context = [=](const RankParts& rank) {
    return ContextStandIn{.mask = [=](nn::AttentionMask& mask, const nn::Documents& documents) {
      if (way(mask, documents.context->cut)) rank.act();
    }};
  }};
}

/// Writes to the rank's batch, after all have agreed on it.
Changes batch(std::function<void(const RankParts&, const train::MicroBatch&)> way) {
  return {.context = [=](const RankParts& rank) {
    return ContextStandIn{.batch = [=](const train::MicroBatch& micro_batch) {
      way(rank, micro_batch);
      rank.act();
    }};
  }};
}

/// The sum over ranks is `way` of every rank's values.
using Sum = std::function<std::vector<double>(const RankParts&, const SumStandIn::Values&)>;
Changes sum(train::RankSum of, Sum way) {
  return {.sums = [=](const RankParts& rank) {
    return std::make_unique<SumStandIn>(
        [=](train::RankSum what, const SumStandIn::Values& of_ranks) {
          if (what != of) return train::added_by_rank(of_ranks);
          rank.act();
          return way(rank, of_ranks);
        });
  }};
}

Changes reductions(const std::string& ending, ReductionPlan plan) {
  return {.parts = [=](const RankParts& rank) {
    on_contracts(rank, ending, [&](GradContract& contract) {
      contract.reductions.shard_axes = plan.shard_axes;
      contract.reductions.replica_axes = plan.replica_axes;
    });
  }};
}

// ---------------------------------------------------------------- what is joined, and summed

at::Tensor rank_by_rank(const ContextSite& site, const at::Tensor& whole) {
  std::vector<at::Tensor> places;
  for (int rank = 0; rank < site.cut.ranks; ++rank) places.push_back(places_of(site.cut, rank));
  return whole.index_select(1, at::cat(places));
}

/// [A, G, T, C]: blocks of positions where there should be heads.
at::Tensor blocks_of_positions(const ContextSite&, const at::Tensor& heads) {
  return heads.transpose(1, 2).reshape(heads.sizes());
}

bool is_second_part(const ContextSite& site) {
  return site.part == site.cut.parts_of(site.axis.rank).at(1);
}

bool swap_on_second_rank(const RankParts& rank, const ContextSite&, std::vector<at::Tensor>& all) {
  if (cp_rank(rank) != 1 || all.size() != 2) return false;
  std::swap(all[0], all[1]);
  return true;
}

bool first_rank_alone(const RankParts& rank, const ContextSite&, std::vector<at::Tensor>& all) {
  if (cp_rank(rank) == 0) return false;
  for (at::Tensor& one : all) one = at::zeros_like(one);
  return true;
}

std::vector<Fault> of_exchanges() {
  const Degrees two{.cp = 2};
  return {
      {"GatheredRankByRank", "Gathered positions stand rank by rank", "slime #1871", kDense, two,
       each(Kind::kGathered, rank_by_rank), CaughtBy::kGradients, "k_proj.weight", Setting::kPlain,
       false, 1},
      {"HeadsCutForPositions",
       "The all-to-all of heads cuts them where positions are",
       "next to torchtitan #3978",
       kLearned,
       {.cp = 2, .form = ContextForm::kHeads},
       each(Kind::kHeads, blocks_of_positions),
       CaughtBy::kGradients,
       "attn.c_attn.weight",
       Setting::kPlain,
       false,
       2},
      {"AddendsInBFloat16", "Addends to dK and dV travel in bf16", "torchtitan #3972", kDense, two,
       each(Kind::kAddends,
            [](const ContextSite&, const at::Tensor& x) {
              return x.to(at::kBFloat16).to(x.scalar_type());
            }),
       CaughtBy::kGradients, "k_proj.weight", Setting::kPlain, true, 3},
      {"OnePartAlone", "The second part of a rank adds nothing to dK and dV",
       "next to ring-flash-attention #82", kDense, two,
       each(Kind::kAddends,
            [](const ContextSite& site, const at::Tensor& x) {
              return is_second_part(site) ? at::zeros_like(x) : x;
            }),
       CaughtBy::kGradients, "k_proj.weight", Setting::kPlain, true, 4},
      {"KeyGradientsAllReduced", "dK and dV are all-reduced where the owner has the sum",
       "next to ring-flash-attention #82", kDense, two,
       each(Kind::kSums,
            [](const ContextSite& site, const at::Tensor& x) {
              return parallel::exchange_sum(x, site.axis, std::nullopt, "once more");
            }),
       CaughtBy::kGradients, "k_proj.weight", Setting::kPlain, true, 5},
      {"KeyGradientsDivided", "dK and dV are divided by cp", "next to verl #6609", kDense, two,
       each(Kind::kSums,
            [](const ContextSite& site, const at::Tensor& x) { return x / site.axis.size; }),
       CaughtBy::kGradients, "k_proj.weight", Setting::kPlain, true, 6},
      {"LatentsGradientOfOneRank", "The gradient of gathered latents is what one rank adds",
       "next to Megatron-Bridge #4783", kDeepseek, two, exchange(Kind::kAddends, first_rank_alone),
       CaughtBy::kGradients, "kv_a_proj_with_mqa.weight", Setting::kPlain, true, 27},
      {"KeysForValuesOnOneRank",
       "One rank takes keys and values in another order (they travel in one batch; here they are "
       "swapped when they have arrived)",
       "next to VeOmni #979", kDense, two, exchange(Kind::kGathered, swap_on_second_rank),
       CaughtBy::kGradients, "k_proj.weight", Setting::kPlain, false, 30},
  };
}

// ---------------------------------------------------------------------- masks and positions

/// Each rank takes the first n of a row's numbers for those of its own positions.
at::Tensor not_cut(const at::Tensor& numbers, const layout::ContextCut& cut) {
  at::Tensor found = numbers.clone();
  const std::int64_t own = cut.positions_of_rank();
  for (int rank = 0; rank < cut.ranks; ++rank) {
    found.index_copy_(1, places_of(cut, rank), numbers.narrow(1, 0, own));
  }
  return found;
}

bool begins_not_cut(nn::AttentionMask& mask, const layout::ContextCut& cut) {
  if (!mask.begins.defined()) return false;
  mask.begins = not_cut(mask.begins, cut);
  return true;
}

bool ends_at_the_run(nn::AttentionMask& mask, const layout::ContextCut& cut) {
  if (!mask.ends.defined()) return false;
  mask.ends = mask.ends.clone();
  for (int rank = 0; rank < cut.ranks; ++rank) {
    for (const layout::Range& run : cut.runs_of(rank)) {
      mask.ends.narrow(1, run.begin, run.size()).clamp_max_(run.end);
    }
  }
  return true;
}

/// A rank's positions count from 0. The model cuts ids and targets by the places that rope takes:
/// these are moved to where it will look.
Changes positions_from_zero() {
  return {.context = [](const RankParts& rank) {
    ContextStandIn stand_in;
    stand_in.batch = [=](const train::MicroBatch& batch) {
      const at::Tensor places = own_places(rank, batch.input_ids.size(1));
      for (const at::Tensor& whole : {batch.input_ids, batch.targets}) {
        whole.narrow(1, 0, places.numel()).copy_(whole.index_select(1, places));
      }
    };
    stand_in.rows = [=](const models::ModelInputs&, const ContextStandIn::Rows& rows) {
      rank.act();
      nn::ContextRows local = *rows;
      local.places = at::arange(rows->places.numel(), at::kLong);
      return std::make_shared<const nn::ContextRows>(std::move(local));
    };
    return stand_in;
  }};
}

/// Positions count from the beginning of the row: its documents are one document, but for the mask.
Changes positions_of_the_row() {
  return {.context = [](const RankParts& rank) {
    const auto kept = std::make_shared<at::Tensor>();
    ContextStandIn stand_in;
    stand_in.batch = [=](const train::MicroBatch& batch) {
      *kept = batch.documents.starts.clone();
      batch.documents.starts.zero_();
    };
    stand_in.mask = [=](nn::AttentionMask& mask, const nn::Documents&) {
      mask.begins = *kept;
      rank.act();
    };
    return stand_in;
  }};
}

Changes dropout_by_local_position() {
  return {.context = [](const RankParts& rank) {
    return ContextStandIn{
        .rows = [=](const models::ModelInputs&, const ContextStandIn::Rows& rows) {
          rank.act();
          nn::ContextRows local = *rows;
          std::vector<std::int64_t> numbers(rows->numbers->size());
          std::iota(numbers.begin(), numbers.end(), std::int64_t{0});
          local.numbers = std::make_shared<const std::vector<std::int64_t>>(std::move(numbers));
          return std::make_shared<const nn::ContextRows>(std::move(local));
        }};
  }};
}

/// On the second rank: the parts that it has by the documents of its own half alone.
Changes cut_by_local_starts() {
  Changes changes{.context = [](const RankParts& rank) {
    return ContextStandIn{
        .rows = [=](const models::ModelInputs& batch, const ContextStandIn::Rows& rows) {
          if (cp_rank(rank) != 1) return rows;
          rank.act();
          const int parts = rows->cut.parts();
          std::vector<double> work(static_cast<std::size_t>(parts));
          for (int part = 0; part < parts; ++part) {
            work[static_cast<std::size_t>(part)] = part % 2 == 0 ? 1 : 2;
          }
          return nn::context_rows(layout::by_work(rows->cut.positions, rows->cut.ranks, work), 1,
                                  batch.input_ids.device());
        }};
  }};
  return changes;
}

/// tp has halves of the row, and cp the parts of each: what the ranks of tp hold together.
void cut_by_tp_first(const RankParts& rank, const train::MicroBatch& batch) {
  const std::int64_t positions = batch.input_ids.size(1);
  const int halves = rank.mesh.size_of(axis::kTensor);
  const layout::ContextCut of_half = cut_of(positions / halves, cp_size(rank));
  std::vector<at::Tensor> others;
  for (int half = 0; half < halves; ++half) {
    others.push_back(places_of(of_half, cp_rank(rank)) + half * positions / halves);
  }
  const at::Tensor own = own_places(rank, positions);
  for (const at::Tensor& whole : {batch.input_ids, batch.targets}) {
    whole.index_copy_(1, own, whole.index_select(1, at::cat(others)));
  }
}

std::vector<Fault> of_masks() {
  const Degrees two{.cp = 2};
  return {
      {"WindowJudgedByOwnPositions",
       "A window longer than a rank's positions is left out",
       "accelerate #4177",
       kWindows,
       {.cp = 4},
       mask([](nn::AttentionMask& mask, const layout::ContextCut& cut) {
         if (!mask.window || *mask.window < cut.positions_of_rank()) return false;
         mask.window.reset();
         return true;
       }),
       CaughtBy::kGradients,
       "q_proj.weight",
       Setting::kPlain,
       false,
       15},
      {"SinksDropped", "Sinks do not reach the attention", "prime-rl #3397", kGptOss, two,
       mask([](nn::AttentionMask& mask, const layout::ContextCut&) {
         const bool has_sinks = mask.sinks.defined();
         if (has_sinks) mask.sinks = at::full_like(mask.sinks, -1e30) + 0 * mask.sinks;
         return has_sinks;
       }),
       CaughtBy::kGradients, "self_attn.sinks", Setting::kPlain, false, 16},
      {"ImagesEndAtTheRun", "Queries of an image see keys up to the end of their run",
       "next to accelerate #4177", kGemma, two, mask(ends_at_the_run), CaughtBy::kGradients,
       "q_proj.weight", Setting::kPlain, false, 18},
      {"StartsNotCut", "A rank's queries go by the first starts of the row", "prime-rl #2392",
       kDense, two, mask(begins_not_cut), CaughtBy::kGradients, "q_proj.weight", Setting::kPacked,
       false, 19},
      {"ChunksOfLocalPositions", "Chunks begin where a rank's positions do",
       "next to accelerate #4177", kLlama4, two, mask(begins_not_cut), CaughtBy::kGradients,
       "q_proj.weight", Setting::kPlain, false, 20},
  };
}

std::vector<Fault> of_positions() {
  const Degrees two{.cp = 2};
  return {
      {"RopeFromZero", "Rope counts from 0 on each rank", "next to Automodel #1482", kDense, two,
       positions_from_zero(), CaughtBy::kGradients, "q_proj.weight", Setting::kPlain, false, 13},
      {"PositionsOfTheRow",
       "Positions of packed rows count from the row's beginning (learned ones: rope sees "
       "differences alone)",
       "Megatron-LM #5243", kLearned, two, positions_of_the_row(), CaughtBy::kGradients,
       "wpe.weight", Setting::kPacked, false, 14},
      {"TemperatureOfLocalPositions",
       "The temperature of queries (and rope, which has the same places) counts from 0 on each "
       "rank",
       "next to Automodel #1482", kLlama4, two, positions_from_zero(), CaughtBy::kGradients,
       "layers.3.self_attn.q_proj.weight", Setting::kPlain, false, 21},
      {"DropoutOfLocalPositions", "Dropout is drawn by positions from 0 on each rank",
       "next to Automodel #1482", kDense, two, dropout_by_local_position(), CaughtBy::kGradients,
       "q_proj.lora_A.weight", Setting::kDropout, false, 22},
      {"CutByTpFirst",
       "tp cuts rows before cp (the model cuts by cp alone; here a rank is given the tokens of "
       "such a cut)",
       "next to Automodel #1482",
       kDense,
       {.tp = 2, .cp = 2},
       batch(cut_by_tp_first),
       CaughtBy::kGradients,
       "q_proj.weight",
       Setting::kPlain,
       false,
       29},
      {"CutByLocalStarts", "One rank's parts go by other work than those of all",
       "next to VeOmni #979", kDense, two, cut_by_local_starts(), CaughtBy::kStep,
       "ranks disagree: all_to_all of keys and values", Setting::kPlain, false, 31},
  };
}

// ------------------------------------------------------------------------- labels and counts

/// Targets are shifted after the cut (whole rows have shifted ones; here their own positions get
/// those of the rank's next position).
void shift_after_the_cut(const RankParts& rank, const train::MicroBatch& batch) {
  const at::Tensor own = own_places(rank, batch.input_ids.size(1));
  const at::Tensor ids = batch.input_ids.index_select(1, own);
  const at::Tensor last = at::full({ids.size(0), 1}, kIgnored, ids.options());
  const at::Tensor shifted = at::cat({ids.narrow(1, 1, ids.size(1) - 1), last}, 1);
  const at::Tensor is_kept = batch.targets.index_select(1, own).ne(kIgnored);
  batch.targets.index_copy_(1, own, at::where(is_kept, shifted, kIgnored));
}

/// Unmasked targets of the reference's batch at a rank's positions.
double own_labels(const RankParts& rank) {
  const at::Tensor labels = Reference::of(kDense).result("labels");
  const std::int64_t positions = labels.size(1);
  const at::Tensor shifted = at::cat({labels.narrow(1, 1, positions - 1),
                                      at::full({labels.size(0), 1}, kIgnored, labels.options())},
                                     1);
  return shifted.index_select(1, own_places(rank, positions)).ne(kIgnored).sum().item<double>();
}

std::vector<double> times(std::vector<double> values, double factor) {
  for (double& one : values) one *= factor;
  return values;
}

/// A rank's values as often as all would have added theirs.
std::vector<double> of_one_rank(const RankParts& rank, const SumStandIn::Values& of_ranks) {
  return times(of_ranks.at(static_cast<std::size_t>(cp_rank(rank))), cp_size(rank));
}

/// The losses of all, and the rank's counts.
std::vector<double> counts_of_own_tokens(const RankParts& rank,
                                         const SumStandIn::Values& of_ranks) {
  constexpr std::size_t kLosses = 2;
  auto sums = train::added_by_rank(of_ranks);
  const auto own = of_one_rank(rank, of_ranks);
  std::copy(own.begin() + kLosses, own.end(), sums.begin() + kLosses);
  return sums;
}

/// A rank's tokens have the experts of the row's first ones.
void routing_not_cut(const RankParts& rank, const train::MicroBatch& batch) {
  const std::int64_t rows = batch.input_ids.size(0), positions = batch.input_ids.size(1);
  for (const at::Tensor& indices : batch.imposed_routing) {
    const at::Tensor by_row = indices.view({rows, positions, indices.size(1)});
    const at::Tensor own = own_places(rank, positions);
    by_row.index_copy_(1, own, by_row.narrow(1, 0, own.numel()).clone());
  }
}

/// The second rank's image tokens are the first of the batch: the others are moved behind them, to
/// positions that it does not have.
void move_soft_tokens(const RankParts& rank, const train::MicroBatch& batch) {
  constexpr std::int64_t kImage = 120, kText = 9;
  const at::Tensor& ids = batch.input_ids;
  const at::Tensor own = own_places(rank, ids.size(1));
  const at::Tensor is_own = at::zeros_like(ids, at::kBool).index_fill_(1, own, true);
  const at::Tensor others = ids.eq(kImage).logical_and(is_own.logical_not());
  const auto moved = others.sum().item<std::int64_t>();
  ids.masked_fill_(others, kText);
  ids[ids.size(0) - 1].narrow(0, ids.size(1) * 3 / 4, moved).fill_(kImage);
  batch.token_types->copy_(ids.eq(kImage));
}

/// The mask stays that of the batch.
Changes soft_tokens_from_zero() {
  return {.context = [](const RankParts& rank) {
    const auto ends = std::make_shared<at::Tensor>();
    ContextStandIn stand_in;
    stand_in.batch = [=](const train::MicroBatch& batch) {
      if (cp_rank(rank) != 1) return;
      *ends = nn::ends_of_runs(batch.token_types->eq(1), batch.documents);
      move_soft_tokens(rank, batch);
      rank.act();
    };
    stand_in.mask = [=](nn::AttentionMask& mask, const nn::Documents&) {
      if (mask.ends.defined() && ends->defined()) mask.ends = *ends;
    };
    return stand_in;
  }};
}

std::vector<Fault> of_counts() {
  const Degrees two{.cp = 2};
  return {
      {"LabelsTimesCp", "Unmasked targets are counted by every rank", "prime-rl #2562", kDense, two,
       sum(train::RankSum::kLabels,
           [](const RankParts& rank, const SumStandIn::Values& of_ranks) {
             return times(train::added_by_rank(of_ranks), cp_size(rank));
           }),
       CaughtBy::kGradients, "embed_tokens.weight", Setting::kPlain, false, 10},
      {"MeanOfOwnLabels", "Each rank's loss is the mean over its own targets", "next to verl #6609",
       kDense, two,
       sum(train::RankSum::kLabels,
           [](const RankParts& rank, const SumStandIn::Values&) {
             return std::vector<double>{own_labels(rank) * cp_size(rank)};
           }),
       CaughtBy::kGradients, "embed_tokens.weight", Setting::kPlain, false, 11},
      {"LabelsShiftedAfterTheCut",
       "Targets are shifted within a rank's positions (rows have shifted ones when they are cut; "
       "here they are replaced before)",
       "next to Megatron-LM #4494", kDense, two, batch(shift_after_the_cut), CaughtBy::kGradients,
       "embed_tokens.weight", Setting::kPlain, false, 12},
      {"RoutingNotCut", "Imposed experts are those of the row's first tokens",
       "next to Megatron-LM #4302", kQwen, two, batch(routing_not_cut), CaughtBy::kGradients,
       "mlp.experts", Setting::kRouting, false, 23},
      {"AuxiliaryLossOfOneRank", "The auxiliary loss weighs by one rank's choices",
       "Megatron-LM #3768, #4302", kQwen, two, sum(train::RankSum::kRouterLoad, of_one_rank),
       CaughtBy::kGradients, "mlp.gate.weight", Setting::kAuxiliaryLoss, false, 24},
      {"BiasOfLocalCounts", "Each rank moves the experts' bias by its own tokens",
       "torchtitan #4154", kQwen, two, sum(train::RankSum::kStep, counts_of_own_tokens),
       CaughtBy::kBias, "mlp.expert_bias", Setting::kBalance, true, 25},
      {"SoftTokensOfARank", "Soft tokens are counted from the first of each rank's positions",
       "next to Megatron-Bridge #4783", kGemma, two, soft_tokens_from_zero(), CaughtBy::kGradients,
       "embed_vision", Setting::kPlain, false, 28},
  };
}

// ---------------------------------------------------------------------- sums over other ranks

/// As if sinks were cut by heads as the form "heads" cuts them: a rank keeps its own heads' alone.
Changes sinks_of_own_heads() {
  return {.parts = [](const RankParts& rank) {
    on_raw_gradient(rank, "self_attn.sinks", [=](const at::Tensor& own) {
      const std::int64_t heads = own.size(0) / cp_size(rank);
      at::Tensor kept = at::zeros_like(own);
      kept.narrow(0, cp_rank(rank) * heads, heads)
          .copy_(own.narrow(0, cp_rank(rank) * heads, heads));
      return kept;
    });
  }};
}

std::vector<Fault> of_sums() {
  const Degrees two{.cp = 2};
  const std::string shard(axis::kShard), context(axis::kContext);
  return {
      {"DenseNotSummedOverCp", "Dense gradients are not summed over cp", "next to verl #6609",
       kDense, two, reductions("q_proj", {}), CaughtBy::kSharding, "q_proj.weight", Setting::kPlain,
       false, 7},
      {"DenseSummedTwice", "Dense gradients are summed over cp, and again as replicas",
       "next to verl #6609", kDense, two, reductions("q_proj", {{context}, {context}, 1}),
       CaughtBy::kSharding, "q_proj.weight", Setting::kPlain, false, 8},
      {"CpAsReplicas",
       "Ranks of cp are taken for replicas of HSDP",
       "Automodel #2768",
       kDense,
       {.shard = 2, .cp = 2},
       reductions("q_proj", {{shard}, {context}, 1}),
       CaughtBy::kSharding,
       "q_proj.weight",
       Setting::kPlain,
       false,
       9},
      {"SinksOfOwnHeads", "The gradient of sinks is taken for one that is cut by heads",
       "torchtitan #3978, #4450", kGptOss, two, sinks_of_own_heads(), CaughtBy::kGradients,
       "self_attn.sinks", Setting::kPlain, true, 17},
      {"ExpertsSummedOverCp",
       "Experts are summed over the ranks of cp that hold others",
       "next to Megatron-LM #1622",
       kQwen,
       {.ep = 2, .cp = 2},
       reductions("mlp.experts", {{context}, {}, 1}),
       CaughtBy::kSharding,
       "mlp.experts",
       Setting::kPlain,
       false,
       26},
      {"NormOfEveryRankOfCp",
       "The norm counts each shard once a rank of cp",
       "next to verl #6609",
       kDense,
       two,
       {.norm =
            [](const RankParts& rank, const ShardedBase& model) {
              rank.act();
              return gradient_norm(model) * std::sqrt(1.0 * cp_size(rank));
            }},
       CaughtBy::kNorm,
       "",
       Setting::kPlain,
       true,
       33},
  };
}

}  // namespace

std::vector<Fault> faults_of_context() {
  std::vector<Fault> faults;
  for (const auto& part : {of_exchanges(), of_masks(), of_positions(), of_counts(), of_sums()}) {
    faults.insert(faults.end(), part.begin(), part.end());
  }
  std::ranges::sort(faults, {}, &Fault::number);
  return faults;
}

std::vector<std::string> other_rows_of_context() {
  return {
      "| 32 | A batch brings the cut of rows of another length | next to Megatron-LM #4494 | tp 1, "
      "cp 2 | refusal in the step | `expected one of these rows` |",
      "| 34 | The second piece of a row's logits is dropped as a replica's | next to slime #1871 | "
      "tp 1, cp 2 | refusal of the file | `was written not at all` |",
      "| 35 | A recorded region holds the gather, which a replay would leave out | next to VeOmni "
      "#979 | "
      "tp 1, cp 2 | refusal of the recording | `attention over ranks of a context region` |",
      "| 36 | Addends to dK and dV are added as they arrive | next to ring-flash-attention #42 | "
      "tp 1, cp 2 | bits | `k` |",
  };
}

}  // namespace tessera::golden
