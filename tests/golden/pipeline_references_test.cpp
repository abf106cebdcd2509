// Pipelines against transformers within its bounds: every folder under every kind of schedule, and
// the later families with other axes, a part in ./test --all, all of it under `scripts/full
// pipeline` and `families`. Against the same layout without a pipeline: pipeline_test.cpp.

#include <iterator>

#include "golden/pipeline_case.h"
#include "golden/reference.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::golden::pipeline_references_test {
namespace {

/// The reference's own batch of two rows; of more micro-batches some have none.
void expect_transformers(const PipelineCase& c, int micro_batches) {
  SCOPED_TRACE(to_string(c));
  const Reference& reference = Reference::of(c.folder);
  auto config = config_for(c.folder, c.degrees);
  config.activation_checkpoint.mode = c.recompute;
  config.pipeline.schedule = c.schedule;
  config.pipeline.micro_batches = micro_batches;
  config.pipeline.reshard = c.reshard;
  config.parallelism.pipeline_parallel_degree = c.stages;
  expect_within_bounds(
      run_gradients(config, with_stages(layout_of(c.degrees), c.stages), reference.batches()),
      reference);
}

/// Has two stages a rank only where there is a layer for each.
std::vector<std::string> kinds_of_folder(const std::string& folder) {
  const bool has_layers = spec_of(folder).num_hidden_layers >= 4;
  auto kinds = kKinds;
  std::erase_if(kinds, [&](const auto& kind) { return !has_layers && has_several_stages(kind); });
  return kinds;
}

// In ./test --all a third of the kinds for each folder; three adjacent folders have all of them.
TEST(PipelineOfReferences, EveryFolderIsTransformersUnderEveryKindThatItHasLayersFor) {
  for (const auto& folder : all_folders()) {
    for (const auto& kind : test::in_turn(kinds_of_folder(folder), 3, all_folders(), folder)) {
      const int micro_batches = kind == "DualPipeV" ? 4 : 2;
      EXPECT_NO_THROW(expect_transformers({folder, kind}, micro_batches));
    }
  }
}

// ------------------------------------------------------------------------ context parallelism

std::vector<std::string> attending_folders() {
  std::vector<std::string> all = all_folders();
  std::erase_if(all, [](const std::string& folder) {
    return folder.ends_with("-mixed") || has_state(spec_of(folder));
  });
  return all;
}

/// Whether the ranks can share out the heads of keys and values.
bool has_heads_for(const std::string& folder, const Degrees& degrees) {
  for (const std::int64_t heads : kv_heads_of(folder)) {
    if (heads % (degrees.cp * degrees.tp) != 0) return false;
  }
  return heads_of(folder) % degrees.tp == 0;
}

std::vector<Degrees> context_degrees(const std::string& folder) {
  constexpr auto kHeads = ContextForm::kHeads;
  std::vector<Degrees> all{{.cp = 2}, {.cp = 2, .form = kHeads}, {.tp = 2, .cp = 2}};
  if (experts_of(folder) == Experts::kSome) {
    all.push_back({.ep = 2, .cp = 2});
    all.push_back({.ep = 2, .cp = 2, .form = kHeads});
  }
  std::erase_if(all, [&](const Degrees& each) {
    if (each.form == kHeads) return !has_heads_for(folder, each);
    return heads_of(folder) % each.tp != 0;
  });
  return all;
}

// Naive: a stage without the embedding or the head takes whole rows for those of its border; in
// ./test --all a kind and a layout a folder, each in turn.
TEST(PipelineOfContext, EveryFolderIsTransformersWhereRanksShareRowsToo) {
  const auto folders = attending_folders();
  std::size_t turn = 0;
  for (const std::string& folder : folders) {
    const auto kinds = kinds_of_folder(folder);
    const auto all = context_degrees(folder);
    const std::size_t cases = kinds.size() * all.size();
    for (std::size_t i = 0; i < (test::full_proof() ? cases : 1); ++i, ++turn) {
      const std::size_t kind = test::full_proof() ? i / all.size() : turn % kinds.size();
      const std::size_t degrees = test::full_proof() ? i % all.size() : (turn / 2) % all.size();
      const PipelineCase c{.folder = folder,
                           .schedule = kinds[kind],
                           .degrees = all[degrees],
                           .recompute = kModes[turn % std::size(kModes)],
                           .reshard = kReshard[turn % std::size(kReshard)]};
      EXPECT_NO_THROW(expect_transformers(c, kinds[kind] == "DualPipeV" ? 4 : 2));
    }
  }
}

// Later families with every layout: above they are alone.

const std::vector<std::string>& later_folders() {
  static const auto all = [] {
    std::vector<std::string> folders;
    for (const std::string& family : kLaterFamilies) folders.push_back(family + "-fp32");
    return folders;
  }();
  return all;
}

const std::vector<std::string>& later_kinds() {
  static const std::vector<std::string> few{"1F1B", "ZBV"};
  return test::full_proof() ? kKinds : few;
}

const std::vector<Degrees>& later_degrees() {
  static const std::vector<Degrees> few{{.shard = 2}, {.tp = 2}, {.cp = 2}};
  static const std::vector<Degrees> all{{},
                                        {.shard = 2},
                                        {.replicate = 2},
                                        {.shard = 2, .ep = 2},
                                        {.tp = 2},
                                        {.tp = 2, .sequence = false},
                                        {.tp = 2, .ep = 2},
                                        {.tp = 2, .etp = 2},
                                        {.cp = 2},
                                        {.ep = 2, .cp = 2},
                                        {.tp = 2, .cp = 2}};
  return test::full_proof() ? all : few;
}

/// When memory is resharded does not depend on a family: it changes from case to case.
PipelineCase later_case(const test::Choice& choice) {
  const std::size_t turn = choice[1] + choice[2] + choice[3] + choice[4];
  return {.folder = later_folders()[choice[0]],
          .schedule = later_kinds()[choice[1]],
          .stages = kRanks[choice[2]],
          .degrees = later_degrees()[choice[3]],
          .recompute = kModes[choice[4]],
          .reshard = kReshard[turn % std::size(kReshard)]};
}

bool is_later_case(const PipelineCase& c) {
  const bool of_experts = c.degrees.ep > 1 || c.degrees.etp > 1;
  if (c.degrees.cp > 1 && has_state(spec_of(c.folder))) return false;
  if (of_experts && experts_of(c.folder) == Experts::kNone) return false;
  if (heads_of(c.folder) % c.degrees.tp != 0) return false;
  return c.stages * (has_several_stages(c.schedule) ? 2 : 1) <= spec_of(c.folder).num_hidden_layers;
}

TEST(PipelineOfLaterFamilies, IsTransformersWithTheOtherAxes) {
  constexpr std::uint32_t kSeed = 6;
  const std::vector<std::size_t> all{later_folders().size(), later_kinds().size(),
                                     std::size(kRanks), later_degrees().size(), std::size(kModes)};
  const auto choices = test::cases(
      all, [](const test::Choice& choice) { return is_later_case(later_case(choice)); }, kSeed);
  EXPECT_GE(choices.size(), later_folders().size());
  for (const auto& choice : choices) {
    EXPECT_NO_THROW(expect_transformers(later_case(choice), 8));
  }
}

}  // namespace
}  // namespace tessera::golden::pipeline_references_test
