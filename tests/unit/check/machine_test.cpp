// Descriptions of machines: files say the same value, and what is none is refused by its line.
#include "check/machine.h"

#include <cmath>
#include <optional>
#include <random>

#include "base/text/byte_size.h"
#include "support/test.h"

namespace tessera::check::machine_test {
namespace {

constexpr const char* kWhole = R"(name = "box"
source = "measured"
memory = "80GiB"
memory_bandwidth = "3.35TB/s"
ranks_per_host = 8
bandwidth = 450e9
host_bandwidth = "50GB"
latency = 5e-6
[flops]
bfloat16 = 989e12
float32 = 67000000000000
)";

std::string refusal(const std::string& text) {
  return error_of(ErrorKind::kConfig, [&] { parse_machine(text, "box.toml"); });
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Machine, LinesAreNumbersOrSizesAsPeopleWriteThem) {
  const Machine machine = parse_machine(kWhole, "box.toml");
  EXPECT_EQ(machine, (Machine{.name = "box",
                              .source = MachineSource::kMeasured,
                              .memory = std::int64_t{80} << 30,
                              .memory_bandwidth = 3.35e12,
                              .ranks_per_host = 8,
                              .bandwidth = 450e9,
                              .host_bandwidth = 50e9,
                              .latency = 5e-6,
                              .flops = ProductFlops{989e12, 67e12}}));
  EXPECT_EQ(machine.flops->of(DType::kBFloat16), 989e12);
  EXPECT_EQ(machine.flops->of(DType::kFloat16), 989e12);
  EXPECT_EQ(machine.flops->of(DType::kFloat32), 67e12);
}

TEST(Machine, WhatNoOneKnowsHasNoLine) {
  const Machine machine = parse_machine("name = \"box\"\nsource = \"published\"\n", "x");
  EXPECT_EQ(machine, (Machine{.name = "box"}));
  EXPECT_EQ(to_toml(machine), "name = \"box\"\nsource = \"published\"\n");
}

TEST(Machine, ShippedOnesAreAsPublishedAndReadBack) {
  EXPECT_THAT(shipped_machines(), ElementsAre("h100", "h200"));
  for (const std::string& name : shipped_machines()) {
    const Machine machine = shipped_machine(name).value();
    EXPECT_EQ(machine.name, name);
    EXPECT_EQ(machine.source, MachineSource::kPublished);
    EXPECT_EQ(parse_machine(to_toml(machine), name), machine);
  }
  EXPECT_EQ(shipped_machine("h100")->memory, 80'000'000'000);
  EXPECT_EQ(shipped_machine("h200")->memory_bandwidth, 4.8e12);
  EXPECT_EQ(shipped_machine("H100"), std::nullopt);
  EXPECT_EQ(to_toml(*shipped_machine("h100"), {"one", "two"}),
            "# one\n# two\nname = \"h100\"\nsource = \"published\"\nmemory = \"80GB\"\n"
            "memory_bandwidth = \"3.35TB/s\"\nranks_per_host = 8\nbandwidth = \"450GB/s\"\n"
            "host_bandwidth = \"50GB/s\"\n\n[flops]\nbfloat16 = 9.89e+14\nfloat32 = 6.7e+13\n");
}

// Drawn over the ranges, any line left out. Naive: six digits of a number.
TEST(Machine, WhatIsWrittenIsReadAsTheSameValue) {
  for (std::uint32_t seed = 1; seed <= 400; ++seed) {
    std::mt19937_64 draw(seed);
    const auto one_of = [&](int count) {
      return static_cast<int>(draw() % static_cast<unsigned>(count));
    };
    const auto between = [&](double least, double most) {
      std::uniform_real_distribution<double> power(std::log(least), std::log(most));
      return std::clamp(std::exp(power(draw)), least, most);
    };
    const auto rate = [&] {
      return one_of(3) == 0 ? std::nullopt : std::optional(between(1e3, 1e18));
    };
    Machine machine{.name = "m" + std::to_string(seed)};
    if (one_of(2) == 0) machine.source = MachineSource::kMeasured;
    if (one_of(2) == 0) machine.memory = std::llround(between(1 << 20, 1e15));
    machine.memory_bandwidth = rate();
    if (one_of(2) == 0) machine.ranks_per_host = 1 + one_of(4096);
    machine.bandwidth = rate();
    machine.host_bandwidth = rate();
    if (one_of(2) == 0) machine.latency = one_of(4) == 0 ? 0.0 : between(1e-9, 1e3);
    if (one_of(2) == 0) machine.flops = ProductFlops{between(1.0, 1e21), between(1.0, 1e21)};
    const std::string text = to_toml(machine, {"a comment"});
    EXPECT_EQ(parse_machine(text, "x"), machine) << "seed " << seed << "\n" << text;
  }
}

struct Bad {
  std::string from, to;
  std::string place, says;
};

TEST(Machine, WhatIsWrongIsNamedWithItsLine) {
  const std::vector<Bad> all{
      {"ranks_per_host", "rank_per_host",
       "box.toml:5:1: ", "unknown key 'rank_per_host'; the nearest is \"ranks_per_host\""},
      {"bfloat16 ", "bfloat17 ",
       "box.toml:10:1: ", "unknown key 'flops.bfloat17'; the nearest is \"flops.bfloat16\""},
      {"latency", "colour", "box.toml:8:1: ", "unknown key 'colour', expected one of name, "},
      {"\"80GiB\"", "80",
       "box.toml:3:10: ", "memory: found 80 (integer), expected from 1MB to 1000TB"},
      {"\"80GiB\"", "\"80 gigs\"", "box.toml:3:10: ", "memory: found '80 gigs', expected from"},
      {"\"80GiB\"", "true", "box.toml:3:10: ", "memory: found true (boolean)"},
      {"\"80GiB\"", "\"-80GB\"", "box.toml:3:10: ", "memory: found '-80GB'"},
      {"\"3.35TB/s\"", "\"400Gb/s\"", "box.toml:4:20: ", "memory_bandwidth: found '400Gb/s'"},
      {"\"3.35TB/s\"", "\"3.35TB/h\"", "box.toml:4:20: ", "memory_bandwidth: found '3.35TB/h'"},
      {"\"3.35TB/s\"", "\"3.3.5TB\"", "box.toml:4:20: ", "memory_bandwidth: found '3.3.5TB'"},
      {"\"3.35TB/s\"", "nan", "box.toml:4:20: ", "memory_bandwidth: found nan (number)"},
      {"\"3.35TB/s\"", "inf", "box.toml:4:20: ", "memory_bandwidth: found inf (number)"},
      {"host = 8", "host = 0", "box.toml:5:18: ", "found 0 (integer), expected an integer from 1"},
      {"host = 8", "host = 8.0", "box.toml:5:18: ", "found 8.0 (number), expected an integer"},
      {"host = 8", "host = 1e9999", "box.toml:5:", "ranks_per_host: found a number that 64 bits"},
      {"450e9", "[450e9]", "box.toml:6:13: ", "bandwidth: found an array"},
      {"5e-6", "-5e-6",
       "box.toml:8:11: ", "latency: found -5e-06 (number), expected a number from 0"},
      {"5e-6", "\"5us\"", "box.toml:8:11: ", "latency: found '5us'"},
      {"5e-6", "1979-05-27", "box.toml:8:11: ", "found a date"},
      {"989e12", "0", "box.toml:10:12: ", "flops.bfloat16: found 0 (integer)"},
      {"989e12", "1e30", "box.toml:10:12: ", "flops.bfloat16: found 1e+30 (number)"},
      {"measured", "guessed",
       "box.toml:2:10: ", "source: found 'guessed', expected one of published, measured"},
      {"\"box\"", "\"\"", "box.toml:1:8: ", "name: found ''"},
      {"\"box\"", "\"a\\u001b[2J\"", "box.toml:1:8: ", "name: found 'a\\x1b[2J'"},
      {"\"box\"", "3", "box.toml:1:8: ", "name: found 3 (integer)"},
      {"[flops]\n", "[flops", "box.toml:9:", "Error while parsing"},
      {"[flops]\nbfloat16 = 989e12\nfloat32 = 67000000000000\n", "flops = 989e12\n",
       "box.toml:9:9: ", "flops: found 9.89e+14 (number), expected a section [flops]"},
      {"name = \"box\"\n", "", "box.toml: ", "found no name, expected it"},
      {"float32 = 67000000000000\n", "", "box.toml: ", "found no flops.float32, expected it"},
  };
  for (const Bad& bad : all) {
    const std::string message = refusal(replaced(kWhole, bad.from, bad.to));
    EXPECT_THAT(message, AllOf(StartsWith(bad.place), Says(bad.says))) << bad.from << bad.to;
  }
  EXPECT_THAT(refusal(std::string(kMostMachineBytes + 1, '#')),
              Says("expected a machine, of at most"));
}

// Bytes of a right file changed, cut and doubled: a value or a refusal of one line, nothing else.
TEST(Machine, HostileFilesAreRefused) {
  int refused = 0;
  for (std::uint32_t seed = 1; seed <= 3000; ++seed) {
    std::mt19937 draw(seed);
    std::string text = kWhole;
    for (std::uint32_t change = draw() % 4 + 1; change > 0 && !text.empty(); --change) {
      const std::size_t at = draw() % text.size();
      switch (draw() % 4) {
        case 0:
          text[at] = static_cast<char>(draw() % 256);
          break;
        case 1:
          text.resize(at);
          break;
        case 2:
          text.insert(at, text.substr(draw() % text.size(), draw() % 40));
          break;
        default:
          text.erase(at, draw() % 20);
      }
    }
    try {
      const Machine machine = parse_machine(text, "x");
      EXPECT_EQ(parse_machine(to_toml(machine), "x"), machine) << "seed " << seed;
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.kind(), ErrorKind::kConfig) << "seed " << seed;
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << seed;
    }
  }
  EXPECT_GT(refused, 1500) << "most changes break something";
  EXPECT_LT(refused, 3000) << "some do not";
}

// The decimal number is rounded once. Naive: 3.35 x 1e12 is another double.
TEST(ByteAmounts, AreReadAndWrittenWithFractions) {
  EXPECT_EQ(byte_amount("3.35TB"), 3.35e12);
  EXPECT_EQ(byte_amount("80GiB"), 80.0 * (1 << 30));
  EXPECT_EQ(byte_amount("1.5Ki"), 1536.0);
  EXPECT_EQ(byte_amount("17"), 17.0);
  for (const char* wrong : {"", ".", "GB", "-1GB", "1e3GB", "+1", "1 GB", "0x1GB", "1.2.3", "nan",
                            "11111111111111111111111111111111111111111GB"}) {
    EXPECT_EQ(byte_amount(wrong), std::nullopt) << wrong;
  }
  EXPECT_EQ(amount_text(3.35e12), "3.35TB");
  EXPECT_EQ(amount_text(450e9), "450GB");
  EXPECT_EQ(amount_text(1e18), "1000000TB");
  EXPECT_EQ(amount_text(999.0), "999B");
  EXPECT_EQ(amount_text(0.25), "0.25B");
  for (std::uint32_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 draw(seed);
    const double value = std::exp(std::uniform_real_distribution<double>(-5.0, 45.0)(draw));
    EXPECT_EQ(byte_amount(amount_text(value)), value) << amount_text(value);
  }
}

}  // namespace
}  // namespace tessera::check::machine_test
