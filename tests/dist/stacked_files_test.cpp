// Experts that are one parameter here and many tensors in files: loaded, refused.
#include "dist/stacked_files.h"

#include "dist/cut_modules.h"
#include "support/temporary_folder.h"
#include "train/hf/weights.h"

namespace tessera::test::stacked_files_test {
namespace {

const train::FileForms kForms = train::file_forms(StackedExperts::table());

/// {replicas, shards, tp}, {dp_shard_mod_ep, ep, etp}
const Degrees kDegrees[] = {{1, 1, 1, 1, 1, 1}, {1, 2, 1, 2, 1, 1}, {1, 3, 1, 3, 1, 1},
                            {1, 1, 2, 1, 1, 2}, {1, 1, 2, 1, 2, 1}, {1, 2, 2, 1, 2, 2},
                            {2, 1, 2, 1, 2, 1}, {1, 2, 1, 1, 2, 1}, {1, 4, 1, 2, 2, 1},
                            {1, 1, 3, 1, 1, 3}};

// Naive: a part is read from the beginning of its tensor, or of all of its columns.
TEST(StackedFiles, EveryRankOfEveryLayoutReadsItsPartOfEveryExpert) {
  const StackedExperts expected(11);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto source = TensorsInMemory::of(expected, dtype);
    for (const auto& degrees : kDegrees) {
      ranks(degrees.ranks()).run([&](World& world) {
        const auto handle = shard_experts(world.mesh(degrees.shapes()), 77);
        train::load_weights(handle, source, kForms);
        expect_same(whole_parameters(handle),
                    {{"gate_up", expected.gate_up.detach().to(dtype).to(at::kFloat)},
                     {"down", expected.down.detach().to(dtype).to(at::kFloat)},
                     {"norm", expected.norm.detach()}},
                    to_string(degrees.shapes()));
      });
    }
  }
}

// Naive: drawn by an element's number in the rank's part.
TEST(StackedFiles, DrawnValuesAreTheSameUnderEveryLayout) {
  Tensors expected;
  for (const auto& degrees : kDegrees) {
    ranks(degrees.ranks()).run([&](World& world) {
      const auto handle = shard_experts(world.mesh(degrees.shapes()), 77);
      train::draw_weights(handle, StackedExperts::table(), 3);
      const auto found = whole_parameters(handle);
      if (expected.empty()) expected = found;  // of the first layout, which is one rank
      expect_same(found, expected, to_string(degrees.shapes()));
    });
  }
  EXPECT_GT(expected.at("down").abs().min().item<float>(), 0);
}

std::string refusal(const TensorSource& source) {
  return error_of(ErrorKind::kFormat,
                  [&] { train::check_tensors(source, StackedExperts::table(), {}); });
}

TEST(StackedFiles, AWholeFolderIsTaken) {
  EXPECT_NO_THROW(
      train::check_tensors(TensorsInMemory::of(StackedExperts()), StackedExperts::table(), {}));
}

// Naive: an expert that is not there keeps its initial values.
TEST(StackedFiles, AMissingExpertIsNamedAndHowManyMoreAre) {
  auto source = TensorsInMemory::of(StackedExperts());
  source.remove("experts.2.up_proj.weight");
  EXPECT_THAT(refusal(source),
              AllOf(Says("found no tensor experts.2.up_proj.weight, expected all 8 that "
                         "gate_up stacks"),
                    Not(Says("more"))));
  source.remove("experts.1.gate_proj.weight");
  source.remove("experts.3.gate_proj.weight");
  EXPECT_THAT(refusal(source), Says("experts.1.gate_proj.weight (and 2 more)"));
}

TEST(StackedFiles, AnExpertTooManyIsNamedWithHowManyThereAre) {
  auto source = TensorsInMemory::of(StackedExperts());
  for (const char* part : {"gate", "up", "down"}) {
    source.add(concat("experts.4.", part, "_proj.weight"), at::zeros({6, 5}));
  }
  EXPECT_THAT(refusal(source), Says("found the tensor experts.4.down_proj.weight (and 2 more)",
                                    "as many experts as config.json describes: "
                                    "experts.0.gate_proj.weight to experts.3.up_proj.weight"));
}

// Naive: one of the two wins.
TEST(StackedFiles, ExpertsThatAreThereTwiceOnceFusedAreRefused) {
  auto source = TensorsInMemory::of(StackedExperts());
  source.add("gate_up", at::zeros({4, 12, 5}));
  EXPECT_THAT(refusal(source), Says("found the tensor gate_up, expected only the 8 tensors "
                                    "experts.0.gate_proj.weight"));
}

TEST(StackedFiles, AnExpertOfAnotherShapeOrDtypeIsNamed) {
  auto source = TensorsInMemory::of(StackedExperts());
  source.add("experts.1.down_proj.weight", at::zeros({6, 5}));
  EXPECT_THAT(refusal(source), Says("tensor experts.1.down_proj.weight: found shape [6, 5], "
                                    "expected [5, 6]"));
  source.add("experts.1.down_proj.weight", at::zeros({5, 6}, at::kBFloat16));
  EXPECT_THAT(refusal(source),
              Says("tensor experts.1.down_proj.weight: found dtype bfloat16, expected float32 "
                   "as of experts.0.down_proj.weight: both are part of down"));
}

}  // namespace
}  // namespace tessera::test::stacked_files_test
