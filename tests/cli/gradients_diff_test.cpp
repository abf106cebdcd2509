// `tessera gradients --diff` as a user runs it: of files that gradients wrote, whole and damaged,
// and of two configurations.
//
// TESSERA_CHECK_FROM and TESSERA_CHECK_DRAWS choose draws.
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "cli/draws.h"
#include "cli/program.h"
#include "io/safetensors.h"

namespace tessera::cli::gradients_diff_test {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

const std::string kLlama = TESSERA_TEST_DATA "/llama-fp32";
const std::string kMoe = TESSERA_TEST_DATA "/qwen3-moe-fp32";

/// Files of one model: of one rank, of two, and of another model.
class GradientFiles : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    files_ = new TemporaryFolder;
    write("one", kLlama, {});
    write("two", kLlama, {"--parallelism.tensor_parallel_degree", "2"});
    write("moe", kMoe, {});
  }
  static void TearDownTestSuite() {
    delete files_;
    files_ = nullptr;
  }

  static std::string path(const std::string& name) {
    return (*files_ / (name + ".safetensors")).string();
  }
  static Outcome diff(const std::string& a, const std::string& b, const Words& more = {}) {
    return run_program(*files_, joined({"gradients", "--diff", a, b}, more));
  }

 private:
  static void write(const std::string& name, const std::string& model, const Words& more) {
    succeeded(run_program(
        *files_, joined({"gradients", "--model", model, "--batch", model + "/reference.safetensors",
                         "--out", path(name), "--precision.param_dtype", "float32", "--no-logits"},
                        more)));
  }

  static inline TemporaryFolder* files_ = nullptr;
};

std::int64_t count_of(const json& report, const std::string& verdict) {
  return std::ranges::count_if(report.at("parameters"),
                               [&](const json& one) { return one.at("verdict") == verdict; });
}

TEST_F(GradientFiles, AFileIsEqualToItself) {
  const auto report = json::parse(succeeded(diff(path("one"), path("one"), {"--json"})).out);
  EXPECT_TRUE(report.at("is_right").get<bool>());
  EXPECT_EQ(count_of(report, "equal"), std::ssize(report.at("parameters")));
  EXPECT_EQ(report.at("loss_a"), report.at("loss_b"));
}

TEST_F(GradientFiles, TwoLayoutsDifferByRounding) {
  const Outcome text = succeeded(diff(path("one"), path("two")));
  const auto report = json::parse(succeeded(diff(path("one"), path("two"), {"--json"})).out);
  EXPECT_EQ(report.at("dtype"), "float32");
  EXPECT_EQ(count_of(report, "wrong"), 0);
  EXPECT_GT(count_of(report, "rounding"), 0);
  EXPECT_THAT(text.out, Says(concat("right: ", report.at("parameters").size(), " parameters, ",
                                    count_of(report, "equal"), " equal, ",
                                    count_of(report, "rounding"), " apart by rounding, 0 wrong")));
}

// Property: one gradient that is another multiple of what it was is wrong, alone, and by its name.
TEST_F(GradientFiles, AScaledGradientIsNamed) {
  const SafetensorsFile file(path("two"));
  std::vector<const TensorInfo*> gradients;
  for (const TensorInfo& tensor : file.header().tensors) {
    if (tensor.name.starts_with("grad/")) gradients.push_back(&tensor);
  }
  ASSERT_FALSE(gradients.empty());
  const std::string whole = read_file(path("two"));
  each_draw(8, [&](std::mt19937& random) {
    constexpr std::array kFactors{2.0F, 0.5F, -1.0F, 0.0F, 1.01F, 4.0F};
    const TensorInfo& tensor = *gradients.at(random() % gradients.size());
    const float factor = kFactors.at(random() % kFactors.size());
    std::string bytes = whole;
    for (auto at = static_cast<std::size_t>(tensor.begin); std::cmp_less(at, tensor.end); at += 4) {
      float value = 0;
      std::memcpy(&value, bytes.data() + at, sizeof value);
      value *= factor;
      std::memcpy(bytes.data() + at, &value, sizeof value);
    }
    const TemporaryFolder folder;
    const std::string edited = folder.write("edited.safetensors", bytes);
    const Outcome text = diff(edited, path("one"));
    const Outcome as_json = diff(edited, path("one"), {"--json"});
    EXPECT_EQ(text.code, 3) << tensor.name << " x " << factor << "\n" << text.out << text.err;
    EXPECT_EQ(as_json.code, 3);
    const auto report = json::parse(as_json.out);
    EXPECT_FALSE(report.at("is_right").get<bool>());
    ASSERT_EQ(count_of(report, "wrong"), 1) << as_json.out;
    const std::string name = tensor.name.substr(std::string("grad/").size());
    for (const json& one : report.at("parameters")) {
      if (one.at("verdict") != "wrong") continue;
      EXPECT_EQ(one.at("parameter"), name);
      EXPECT_THAT(text.out,
                  Says(concat("'", name, "': A has ", one.at("found").get<std::string>(), "\n")));
    }
    if (factor == 2.0F) EXPECT_THAT(text.out, Says("A has 2 times the expected values"));
  });
}

// Property: a file that is cut, at any byte, is refused by its name.
TEST_F(GradientFiles, CutFilesAreRefused) {
  const std::string whole = read_file(path("two"));
  each_draw(6, [&](std::mt19937& random) {
    const std::size_t bytes = random() % (random() % 2 == 0 ? 4096 : whole.size());
    const TemporaryFolder folder;
    const std::string cut = folder.write("cut.safetensors", whole.substr(0, bytes));
    EXPECT_THAT(diff(path("one"), cut), Exits(2, "--diff", "cut.safetensors")) << bytes;
  });
}

// Property: of a header that is a character off nothing is read that is not there.
TEST_F(GradientFiles, EditedHeadersAreReadOrRefused) {
  const std::string whole = read_file(path("two"));
  std::uint64_t length = 0;
  std::memcpy(&length, whole.data(), sizeof length);
  each_draw(6, [&](std::mt19937& random) {
    std::string bytes = whole;
    bytes[random() % (8 + length)] = static_cast<char>(random() % 256);
    const TemporaryFolder folder;
    const std::string edited = folder.write("edited.safetensors", bytes);
    const Outcome outcome = diff(path("one"), edited);
    EXPECT_THAT(outcome.code, ::testing::AnyOf(0, 2)) << outcome.out << outcome.err;
    if (outcome.code == 2) EXPECT_THAT(outcome.err, Says("edited.safetensors"));
  });
}

TEST_F(GradientFiles, WhatCannotBeComparedIsRefused) {
  const TemporaryFolder folder;
  const std::string text = folder.write("text.safetensors", "not safetensors at all\n");
  const std::string empty = folder.write("empty.safetensors", "");
  folder.write("run.toml", "[model]\npath = \"" + kLlama + "\"\n");
  EXPECT_THAT(diff(path("one"), text), Exits(2, "--diff", "text.safetensors"));
  EXPECT_THAT(diff(empty, path("one")), Exits(2, "--diff", "empty.safetensors"));
  EXPECT_THAT(diff(path("one"), path("moe")), Exits(2, "--diff", "parameters", "moe.safetensors"));
  EXPECT_THAT(diff(path("one"), path("absent")), Exits(2, "--diff", "absent.safetensors"));
  EXPECT_THAT(diff(path("one"), kLlama + "/reference.safetensors"),
              Exits(2, "--diff", "reference.safetensors"));
  EXPECT_THAT(diff(path("one"), (folder / "run.toml").string()),
              Exits(2, "--diff", "two files of gradients, or two configurations"));
  EXPECT_THAT(run_program(folder, {"gradients", "--diff", path("one")}), Exits(2, "--diff"));
  const std::string other = folder.write("one.st", read_file(path("one")));
  EXPECT_THAT(diff(path("one"), other), Exits(2, "--diff", "one.st", "end in .safetensors"));
  EXPECT_THAT(run_program(folder, {"gradients", "--diff", "run.toml", "run.toml"}),
              Exits(2, "--batch"));
  EXPECT_THAT(run_program(folder, {"gradients", "--diff", "run.toml", "absent.toml", "--batch",
                                   kLlama + "/reference.safetensors"}),
              Exits(2, "--diff", "absent.toml"));
}

// The layouts of two files, run here.
TEST(GradientConfigurations, OfRightLayoutsAreRight) {
  const TemporaryFolder folder;
  const std::string one = "[model]\npath = \"" + kMoe + "\"\n";
  folder.write("one.toml", one + "[precision]\nparam_dtype = \"float32\"\n");
  folder.write("four.toml", one +
                                "[precision]\nparam_dtype = \"float32\"\n[parallelism]\n"
                                "tensor_parallel_degree = 2\nexpert_parallel_degree = 2\n"
                                "data_parallel_shard_degree = 2\n");
  const Words words{"gradients", "--diff",  "one.toml",
                    "four.toml", "--batch", kMoe + "/reference.safetensors"};
  const Outcome text = succeeded(run_program(folder, words));
  const auto report = json::parse(succeeded(run_program(folder, joined(words, {"--json"}))).out);
  EXPECT_TRUE(report.at("is_right").get<bool>());
  EXPECT_EQ(report.at("findings").size(), 0U);
  EXPECT_EQ(report.at("dtype"), "float32");
  EXPECT_GT(count_of(report, "rounding"), 0);
  EXPECT_THAT(text.out, Says("A 'one.toml on pp 1 ", "B 'four.toml on pp 1 ", "\nright: "));
}

}  // namespace
}  // namespace tessera::cli::gradients_diff_test
