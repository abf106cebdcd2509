// `tessera measure`, and --machine of the verbs that forecast.
#include "check/machine.h"

#include "cli/program.h"
#include "support/test.h"

namespace tessera::cli::machine_test {
namespace {

using Words = std::vector<std::string>;

/// The rest of the line of `text` with `begin`; "" where there is none.
std::string behind(const std::string& text, const std::string& begin) {
  const auto at = text.find(begin);
  if (at == std::string::npos) return "";
  const auto first = at + begin.size();
  return text.substr(first, text.find('\n', first) - first);
}

std::string machine_text(const std::string& lines) {
  return concat("name = \"box\"\nsource = \"measured\"\n", lines);
}

/// The time of a step on two ranks, behind who says it.
std::string time_of(const SmallRun& folder, const std::string& verb, const std::string& by,
                    const Words& options, const std::string& world = "2") {
  const Words start =
      verb == "plan" ? Words{"plan", "run.toml"} : Words{"inspect", "--contract", "run.toml"};
  // Buckets of a GPU, which h100 is, are aligned otherwise.
  const Words more =
      joined({"--world", world, "--compile.mode", "plan", "--device", "cpu"}, options);
  return behind(succeeded(run_program(folder, joined(start, more))).out,
                concat("  a step by ", by, ": "));
}

TEST(MachineOption, AStepTakesAsLongAsWithTheSameNumbersAsOptions) {
  const SmallRun folder;
  folder.write("box.toml", machine_text("bandwidth = \"1MB/s\"\nhost_bandwidth = \"1MB/s\"\n"
                                        "[flops]\nbfloat16 = 1e7\nfloat32 = 1e7\n"));
  for (const std::string verb : {"plan", "inspect"}) {
    const auto by_options =
        time_of(folder, verb, "--flops and --bandwidth", {"--flops", "1e7", "--bandwidth", "1MB"});
    EXPECT_NE(by_options, "");
    EXPECT_EQ(time_of(folder, verb, "box", {"--machine", "box.toml"}), by_options);
    EXPECT_EQ(time_of(folder, verb, "box", {"--machine", "box.toml", "--ranks-per-host", "1"}),
              by_options);
    EXPECT_EQ(time_of(folder, verb, "h100 with --flops and --bandwidth",
                      {"--machine", "h100", "--flops", "1e7", "--bandwidth", "1MB"}),
              by_options);
  }
}

// Each line counts where it is meant: a change of it changes the time, others do not.
TEST(MachineOption, TheLineOfTheHostCountsWhereRanksOfAGroupDoNotShareOne) {
  const SmallRun folder;
  const auto timed = [&](const std::string& bandwidth, const std::string& of_hosts,
                         const std::string& latency, const std::string& per_host) {
    folder.write("box.toml",
                 machine_text(concat("bandwidth = \"", bandwidth, "\"\nhost_bandwidth = \"",
                                     of_hosts, "\"\nlatency = ", latency,
                                     "\n[flops]\nbfloat16 = 1e9\nfloat32 = 1e9\n")));
    return time_of(folder, "inspect", "box",
                   {"--machine", "box.toml", "--ranks-per-host", per_host});
  };
  const auto base = timed("1MB", "100kB", "0.0", "2");
  EXPECT_EQ(timed("1MB", "1kB", "0.0", "2"), base) << "both are on one host";
  EXPECT_NE(timed("2MB", "100kB", "0.0", "2"), base);
  EXPECT_NE(timed("1MB", "100kB", "0.5", "2"), base) << "a message takes half a second more";
  const auto beyond = timed("1MB", "100kB", "0.0", "1");
  EXPECT_NE(beyond, base);
  EXPECT_EQ(timed("2MB", "100kB", "0.0", "1"), beyond) << "nothing stays on the host";
}

TEST(MachineOption, ProductsAreCountedInTheirDtype) {
  const SmallRun folder;
  const auto computing = [&](const std::string& flops, const std::string& dtype) {
    folder.write("box.toml", machine_text("bandwidth = \"1GB\"\n[flops]\n" + flops));
    const auto line = behind(time_of(folder, "inspect", "box",
                                     {"--machine", "box.toml", "--precision.param_dtype", dtype}),
                             "of which computing ");
    return line.substr(0, line.find(" ms"));
  };
  const std::string narrow = "bfloat16 = 1e7\nfloat32 = 1e6\n";
  const std::string wide = "bfloat16 = 1e6\nfloat32 = 1e7\n";
  EXPECT_EQ(computing(narrow, "bfloat16"), computing(wide, "float32"));
  EXPECT_NE(computing(narrow, "bfloat16"), computing(wide, "bfloat16"));
}

TEST(MachineOption, ItsMemoryIsThatOfARankUnlessAnOptionSaysSo) {
  const SmallRun folder;
  folder.write("box.toml", machine_text("memory = \"1MB\"\n"));
  const auto fits = [&](const Words& more) {
    const Words words =
        joined({"inspect", "--contract", "run.toml", "--machine", "box.toml"}, more);
    return succeeded(run_program(folder, words)).out;
  };
  EXPECT_THAT(fits({}), Says("\n  memory of box 977 KiB: "));
  EXPECT_EQ(behind(fits({}), "a step by"), "") << "its speed is not given";
  EXPECT_THAT(fits({"--device-memory", "80GiB"}), Says("\n  --device-memory 80.0 GiB: fits"));
}

// Each rank gathers a slice of every rank: memory grows with their square.
TEST(Measure, MoreRanksThanMemoryHoldsAreRefusedBeforeTheyStart) {
  const TemporaryFolder folder;
  for (const std::string ranks : {"1024", "4096"}) {
    EXPECT_THAT(run_program(folder, {"measure", "--device", "cpu", "--nproc", ranks}),
                Exits(2, concat("measure: found ", ranks, " ranks"), "start fewer"));
  }
}

TEST(MachineOption, WhatIsNoMachineOrLacksALineIsRefused) {
  const SmallRun folder;
  folder.write("bad.toml", machine_text("memory = \"80GB\"\nbandwith = 3\n"));
  folder.write("alone.toml", machine_text("[flops]\nbfloat16 = 1e7\nfloat32 = 1e7\n"));
  folder.write("inside.toml", machine_text("ranks_per_host = 1\nbandwidth = \"1GB\"\n"
                                           "[flops]\nbfloat16 = 1e7\nfloat32 = 1e7\n"));
  const auto refused = [&](const std::string& machine, const std::string& world) {
    const Outcome outcome =
        run_program(folder, {"plan", "run.toml", "--world", world, "--machine", machine});
    EXPECT_EQ(outcome.code, 2) << machine << "\n" << outcome.out;
    EXPECT_EQ(outcome.out, "") << machine;
    return outcome.err;
  };
  EXPECT_THAT(refused("bad.toml", "2"),
              Says("bad.toml:4:1: unknown key 'bandwith'; the nearest is \"bandwidth\""));
  EXPECT_THAT(refused("h10", "2"), Says("--machine: found no file 'h10'", "the nearest is h100"));
  EXPECT_THAT(refused("run.toml", "2"), Says("run.toml:", "unknown key"));
  EXPECT_THAT(refused("alone.toml", "2"), Says("found no bandwidth of box, expected one for 2"));
  EXPECT_THAT(refused("inside.toml", "2"), Says("found no host_bandwidth of box"));
  succeeded(run_program(folder, {"plan", "run.toml", "--world", "1", "--machine", "alone.toml"}));
}

TEST(MachineOption, ScheduleHasMillisecondsOfAConfiguration) {
  const SmallRun folder;
  const Words words{"schedule",        "1F1B", "--ranks",      "2",
                    "--micro-batches", "3",    "--costs-from", "run.toml"};
  const auto makespan = [&](const Words& more) {
    return behind(succeeded(run_program(folder, joined(words, more))).out, "\nmakespan ");
  };
  const auto in_gflop = makespan({});
  EXPECT_THAT(in_gflop, EndsWith(" GFLOP"));
  const auto in_ms = makespan({"--flops", "1e12"});
  EXPECT_EQ(in_ms, in_gflop.substr(0, in_gflop.find(' ')) + " ms") << "1e12 a second: 1e9 a ms";
  EXPECT_THAT(makespan({"--machine", "h200"}), EndsWith(" ms"));
  EXPECT_EQ(makespan({"--machine", "h200", "--flops", "1e12"}), in_ms);
  const Outcome alone = run_program(
      folder, {"schedule", "1F1B", "--ranks", "2", "--micro-batches", "3", "--machine", "h200"});
  EXPECT_EQ(alone.code, 2);
  EXPECT_THAT(alone.err, Says("--costs-from"));
}

TEST(MeasureVerb, WhatItWritesIsReadByPlan) {
  const SmallRun folder;
  const Outcome outcome = succeeded(run_program(folder, {"measure", "--out", "here.toml"}));
  EXPECT_EQ(outcome.out, "");
  const std::string text = read_file(folder / "here.toml");
  EXPECT_THAT(text, StartsWith("# Measured by tessera measure on "));
  const check::Machine machine = check::parse_machine(text, "here.toml");
  EXPECT_EQ(machine.source, check::MachineSource::kMeasured);
  EXPECT_EQ(machine.ranks_per_host, 2);
  EXPECT_GT(machine.flops.value().float32, 1e8);
  EXPECT_GT(machine.bandwidth.value(), 1e6);
  EXPECT_GT(machine.latency.value(), 0.0);
  EXPECT_LT(machine.latency.value(), 1.0);
  EXPECT_GT(machine.memory_bandwidth.value(), 1e8);
  EXPECT_GT(machine.memory.value(), 1 << 20);
  EXPECT_FALSE(machine.host_bandwidth) << "there is one host";
  EXPECT_EQ(check::parse_machine(check::to_toml(machine), "x"), machine);
  EXPECT_NE(time_of(folder, "plan", machine.name, {"--machine", "here.toml"}), "");
}

TEST(MeasureVerb, OneRankSendsNothingAndOtherKeysAreRefused) {
  const SmallRun folder;
  const Outcome outcome = succeeded(run_program(folder, {"measure", "--nproc", "1"}));
  const check::Machine machine = check::parse_machine(outcome.out, "stdout");
  EXPECT_FALSE(machine.bandwidth);
  EXPECT_FALSE(machine.latency);
  EXPECT_THAT(outcome.out, Says("# bandwidth, latency: not measured, one rank sends nothing\n"));
  const Outcome refused = run_program(folder, {"measure", "--training.steps", "3"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, Says("measure: found --training.steps"));
}

}  // namespace
}  // namespace tessera::cli::machine_test
