#include "cli/arguments.h"

#include <gmock/gmock.h>

#include "train/config_keys.h"
#include "unit/io/temporary_folder.h"

namespace tessera::cli {
namespace {

using ::testing::HasSubstr;
using Words = std::vector<std::string>;

Arguments parse(const Words& words) {
  return parse_arguments(words, [] { return std::string("tessera 1 (git abc)"); });
}

std::string refusal(const Words& words) {
  return testing::error_of(ErrorKind::kUsage, [&] { parse(words); });
}

TEST(Arguments, TrainTakesFileRanksAndOverridesInAnyOrder) {
  const Overrides expected{{"training.steps", "5"}, {"optimizer.betas", "[0.9, 0.95]"}};
  for (const Words& words : {
           Words{"train", "a.toml", "--nproc", "2", "--training.steps", "5",
                 "--optimizer.betas=[0.9, 0.95]"},
           Words{"train", "--training.steps", "5", "--optimizer.betas", "[0.9, 0.95]", "--nproc=2",
                 "a.toml"},
       }) {
    const auto train = std::get<TrainArguments>(parse(words));
    EXPECT_EQ(train.config_file, "a.toml");
    EXPECT_EQ(train.nproc, 2);
    EXPECT_FALSE(train.print_config);
    EXPECT_EQ(train.overrides, expected);
  }
}

TEST(Arguments, NegativeValuesAndEqualSignsBelongToTheKey) {
  const auto train =
      std::get<TrainArguments>(parse({"train", "a.toml", "--parallelism.data_parallel_shard_degree",
                                      "-1", "--data.path=a=b", "--device", "cpu"}));
  EXPECT_EQ(train.overrides, (Overrides{{"parallelism.data_parallel_shard_degree", "-1"},
                                        {"data.path", "a=b"},
                                        {"device", "cpu"}}));
}

TEST(Arguments, GradientsTakesItsFilesAndFlags) {
  const auto gradients = std::get<GradientsArguments>(
      parse({"gradients", "--model", "m", "--batch", "b.safetensors", "--out", "o.safetensors",
             "--no-logits", "--precision.param_dtype", "float32"}));
  EXPECT_EQ(gradients.model, "m");
  EXPECT_EQ(gradients.batch, "b.safetensors");
  EXPECT_EQ(gradients.out, "o.safetensors");
  EXPECT_TRUE(gradients.no_logits);
  EXPECT_FALSE(gradients.impose_routing);
  EXPECT_EQ(gradients.nproc, std::nullopt);
  EXPECT_EQ(gradients.overrides, (Overrides{{"precision.param_dtype", "float32"}}));
}

TEST(Arguments, InspectTakesAFolderOrAContract) {
  EXPECT_EQ(std::get<InspectArguments>(parse({"inspect", "m", "--json"})).folder, "m");
  const auto contract =
      std::get<InspectArguments>(parse({"inspect", "--contract", "a.toml", "--world", "4"}));
  EXPECT_EQ(contract.contract_file, "a.toml");
  EXPECT_EQ(contract.world, 4);
}

TEST(Arguments, UnbuiltVerbsTakeAnythingAndSayWhoTheyAre) {
  EXPECT_EQ(std::get<UnbuiltVerb>(parse({"generate", "--model", "m", "--prompt", "x"})).name,
            "generate");
  EXPECT_EQ(std::get<UnbuiltVerb>(parse({"convert", "a", "b"})).name, "convert");
}

TEST(Arguments, HelpHasEveryKey) {
  for (const Words& words : {Words{"--help"}, Words{"train", "--help"}, Words{"gradients", "-h"}}) {
    const std::string text = std::get<ShowText>(parse(words)).text;
    for (const train::ConfigKey& key : train::config_keys()) {
      EXPECT_THAT(text, HasSubstr("  " + key.full_name() + "  " + key.type)) << words[0];
    }
  }
}

TEST(Arguments, VersionIsMadeOnlyWhenAsked) {
  EXPECT_EQ(std::get<ShowText>(parse({"--version"})).text, "tessera 1 (git abc)\n");
  EXPECT_NO_THROW(parse_arguments({"train", "a.toml"},
                                  []() -> std::string { throw std::logic_error("version made"); }));
}

TEST(Arguments, RefusalsAreOneLineAndNameTheWord) {
  EXPECT_THAT(refusal({}), HasSubstr("subcommand"));
  EXPECT_EQ(refusal({"trian"}), "unknown verb 'trian'; the nearest is train");
  EXPECT_THAT(refusal({"train"}), HasSubstr("config"));
  EXPECT_THAT(refusal({"train", "a.toml", "b.toml"}), HasSubstr("b.toml"));
  EXPECT_THAT(refusal({"train", "a.toml", "--nprocs", "2"}), HasSubstr("--nprocs"));
  EXPECT_THAT(refusal({"train", "a.toml", "--nproc", "0"}), HasSubstr("--nproc"));
  EXPECT_THAT(refusal({"train", "a.toml", "--nproc", "two"}), HasSubstr("--nproc"));
  EXPECT_THAT(refusal({"train", "a.toml", "--training.steps"}), HasSubstr("--training.steps"));
  EXPECT_THAT(refusal({"train", "a.toml", "--training.steps", "--optimizer.lr", "1"}),
              HasSubstr("--training.steps: found no value"));
  EXPECT_THAT(refusal({"gradients", "--model", "m", "--batch", "b"}), HasSubstr("--out"));
  EXPECT_THAT(refusal({"inspect"}), HasSubstr("inspect"));
  for (const Words& words : {Words{}, Words{"train"}, Words{"trian"}}) {
    EXPECT_EQ(refusal(words).find('\n'), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::cli
