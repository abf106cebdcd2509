// `tessera gradients --precision-what-if` as a user runs it: what it prints, and what it refuses.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace tessera::cli {
namespace {

const std::string kModel = TESSERA_TEST_DATA "/llama-fp32";

std::vector<std::string> what_if(const std::vector<std::string>& more) {
  return joined({"gradients", "--model", kModel, "--batch", kModel + "/reference.safetensors",
                 "--precision-what-if"},
                more);
}

// Property: one and two processes print the same policy but for what travels, and the printed
// lines train.
TEST(PrecisionWhatIf, PrintsLinesThatAConfigurationTakes) {
  const TemporaryFolder folder;
  const auto on_one = nlohmann::json::parse(
      succeeded(run_program(folder, what_if({"--bound", "0.02", "--json"}))).out);
  const auto on_two = nlohmann::json::parse(
      succeeded(run_program(folder, what_if({"--bound", "0.02", "--json", "--nproc", "2"}))).out);
  EXPECT_EQ(on_one.at("policy").at("rule"), on_two.at("policy").at("rule"));
  EXPECT_GT(on_one.at("policy").at("rule").size(), 0U);
  EXPECT_TRUE(on_one.at("policy").at("is_within_bound").get<bool>());
  EXPECT_FALSE(on_one.contains("bfloat16_on_the_wire"));
  EXPECT_TRUE(on_two.contains("bfloat16_on_the_wire"));
  const std::string lines = on_one.at("policy").at("config");
  const auto text = succeeded(run_program(folder, what_if({"--bound", "0.02"}))).out;
  EXPECT_THAT(text, Says(lines));
  folder.write("run.toml", "[model]\npath = \"" + kModel + "\"\n[data]\npath = \"" + kModel +
                               "/reference.safetensors\"\n[training]\nsteps = 1\n[optimizer]\n"
                               "lr = 0.001\n[job]\ndump_folder = \"run\"\n" +
                               lines);
  succeeded(run_program(folder, {"train", "run.toml"}));
}

TEST(PrecisionWhatIf, OutIsTheReportAsJson) {
  const TemporaryFolder folder;
  const auto shown = succeeded(run_program(folder, what_if({"--out", "report.json"})));
  EXPECT_THAT(shown.out, Says("cheapest policy found within 0.05"));
  const auto report = nlohmann::json::parse(read_so_far(folder / "report.json"));
  EXPECT_EQ(report.at("bound"), 0.05);
  EXPECT_EQ(report.at("bfloat16").at("errors").size(), 38U);
}

TEST(PrecisionWhatIf, BadInputIsRefusedBeforeARun) {
  const TemporaryFolder folder;
  for (const std::string bound : {"x", "nan", "inf", "0", "-0.1", "1.5", "", "0.02x"}) {
    EXPECT_THAT(run_program(folder, what_if({"--bound", bound})), Exits(2, "--bound")) << bound;
  }
  EXPECT_THAT(run_program(folder, {"gradients", "--model", kModel, "--precision-what-if"}),
              Exits(2, "found no --batch"));
  EXPECT_THAT(run_program(folder, {"gradients", "--model", kModel, "--batch", "absent.safetensors",
                                   "--precision-what-if"}),
              Exits(2, "--batch", "absent.safetensors"));
  EXPECT_THAT(run_program(folder, {"gradients", "--model", kModel, "--batch",
                                   kModel + "/reference.safetensors", "--bound", "0.1"}),
              Exits(2, "--bound", "--precision-what-if"));
  EXPECT_THAT(run_program(folder, what_if({"--precision.param_dtype", "float32"})),
              Exits(2, "--precision.param_dtype", "leave one of them out"));
  EXPECT_THAT(run_program(folder, what_if({"--compile.mode", "replay"})),
              Exits(2, "compile.mode: found replay"));
  EXPECT_THAT(run_program(folder, what_if({"--out", "no/such/report.json"})),
              Exits(2, "--out", "no/such/report.json"));
  EXPECT_THAT(run_program(folder, what_if({"--out", kModel + "/reference.safetensors"})),
              Exits(2, "--out", "which is read"));
}

}  // namespace
}  // namespace tessera::cli
