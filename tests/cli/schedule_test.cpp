// `tessera schedule`: what it prints and writes, and how it ends.

#include "cli/program.h"
#include "support/test.h"

namespace tessera::cli::schedule_test {
namespace {

using Words = std::vector<std::string>;

Words schedule(const Words& more) { return joined({"schedule"}, more); }

TEST(ScheduleVerb, PrintsListsAndTimes) {
  const TemporaryFolder folder;
  const Outcome outcome = succeeded(run_program(
      folder,
      schedule({"DualPipeV", "--ranks", "2", "--micro-batches", "4", "--costs", "1,1,1,2.5"})));
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, Says("'DualPipeV': 2 ranks, 4 stages, 4 micro-batches",
                                "rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 "
                                "(3F3;0B1) 3B3 0I2 0W2 0I3 0W3\n",
                                "makespan 24\n", "valid; "));
}

// Pairs cost what their turns take, or FB where it is given; F and B alone wait for each exchange.
TEST(ScheduleVerb, SimulatesPairsByTheirTurns) {
  const TemporaryFolder folder;
  const auto of_pairs = [&](const std::string& kind, const std::string& costs, const Words& more) {
    const Words words = joined(Words{kind, "--micro-batches", "8", "--costs", costs, "--exchanges",
                                     "3,2", "--layers", "4", "--exchange-cost", "5"},
                               more);
    return succeeded(run_program(folder, schedule(words))).out;
  };
  const std::string alone = of_pairs("Paired1F1B", "10,10,10", {"--ranks", "1"});
  EXPECT_THAT(alone, Says("makespan 641.538\n",
                          "longest pair (0F1;0B0): 73.0769, F 70 and B 60 alone; of its exchanges "
                          "56.9231 hidden, 43.0769 exposed\n"
                          "turns: B1 F1 B2 F2 ... B13 F13\n",
                          "rank       hidden      exposed\n"
                          "   0      398.462      401.538\n"));
  EXPECT_THAT(of_pairs("Paired1F1B", "10,10,10,130", {"--ranks", "1"}),
              Says("makespan 1040\n", "longest pair (0F1;0B0): 130,", " 0 hidden, 100 exposed\n"));
  EXPECT_THAT(of_pairs("DualPipeV", "10,10,10", {"--ranks", "2"}), Says("makespan 1576.92\n"));
  // No pass runs with another one.
  const std::string in_turn = of_pairs("1F1B", "10,10,10", {"--ranks", "2"});
  EXPECT_THAT(in_turn, Says("makespan 1170\n", "   1            0          800\n"));
  EXPECT_THAT(in_turn, Not(Says("turns")));
}

// The verb reads what it writes: the same lists, the same times out of its own trace.
TEST(ScheduleVerb, ReadsItsOwnFiles) {
  const TemporaryFolder folder;
  for (const std::string form : {"compute_only", "compute_comms"}) {
    const Outcome made = succeeded(run_program(
        folder, schedule({"zbvzerobubble", "--ranks", "3", "--micro-batches", "7", "--csv", "a.csv",
                          "--csv-form", form, "--svg", "a.svg", "--trace", "a.json"})));
    EXPECT_THAT(read_file(folder / "a.svg"), Says("</svg>"));
    const Outcome read =
        succeeded(run_program(folder, schedule({"a.csv", "--costs-from", "a.json"})));
    const auto lists = [](const Outcome& outcome) {
      const auto begin = outcome.out.find("rank 0:");
      return outcome.out.substr(begin, outcome.out.find("\nvalid; ") - begin);
    };
    EXPECT_EQ(lists(read), lists(made));
    EXPECT_THAT(made.out, Says("makespan 44\n"));
    EXPECT_THAT(read.out, Says("makespan 44 ms\n"));
  }
}

// A configuration's stages: 8 layers alike and a head, over two ranks.
TEST(ScheduleVerb, CostsOfAConfigurationAreItsStages) {
  const TemporaryFolder folder;
  const auto config = [&](const std::string& more) {
    folder.write("run.toml", concat("model.config = \"", TESSERA_CONFIGS,
                                    "/models/llama3_8b/config.json\"\n"
                                    "training.seq_len = 1024\ntraining.steps = 1\n"
                                    "data.path = \"none.bin\"\noptimizer.lr = 1.0\n",
                                    more));
    const Outcome outcome = succeeded(run_program(
        folder,
        schedule({"1F1B", "--ranks", "2", "--micro-batches", "4", "--costs-from", "run.toml"})));
    const auto begin = outcome.out.find("makespan ") + 9;
    EXPECT_THAT(outcome.out.substr(begin), Says(" GFLOP\n"));
    return std::stod(outcome.out.substr(begin));
  };
  // 7.5 G parameters in products, of 1,024 tokens, half of them a rank: 3 x 2 x 3.75 x 1024 GFLOP
  // for each of 4 micro-batches, and one more before the pipe is full.
  const double once = config("");
  EXPECT_GT(once, 5 * 3 * 2 * 3.75 * 1024);
  EXPECT_LT(once, 5 * 3 * 2 * 3.75 * 1024 * 1.1) << "attention, and stages that are not equal";
  EXPECT_NEAR(config("training.local_batch_size = 2\n"), 2 * once, 1e-3 * once);
  EXPECT_NEAR(config("parallelism.tensor_parallel_degree = 4\n"), once / 4, 1e-3 * once);
  EXPECT_NEAR(config("activation_checkpoint.mode = \"full\"\n"), once * 4 / 3, 1e-3 * once);
}

// Exit code 3 and every finding, nothing written.
TEST(ScheduleVerb, NamesEveryFindingOfAFile) {
  const TemporaryFolder folder;
  folder.write("bad.csv", "0F0,0F1,0B0,0B0\n1F0,1B0,1F1\n");
  const Outcome outcome = run_program(folder, schedule({"bad.csv", "--csv", "out.csv"}));
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_THAT(outcome.out, Says("repeated: rank 0, slot 3 (0B0)",
                                "missing: stage 0: found no B, nor I and W, of "
                                "micro-batch 1",
                                "missing: stage 1:", "'bad.csv': 3 findings"));
  EXPECT_EQ(read_so_far(folder / "out.csv"), "");
  folder.write("locked.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n");
  const Outcome locked = run_program(folder, schedule({"locked.csv"}));
  EXPECT_EQ(locked.code, 3) << locked.err;
  EXPECT_THAT(locked.out, Says("deadlock: ranks wait for each other: rank 0 before 0B0 waits"));
  std::string many;
  for (int i = 0; i < 150; ++i) many += "0F0,";
  folder.write("many.csv", many + "0B0\n");
  const Outcome counted = run_program(folder, schedule({"many.csv"}));
  EXPECT_EQ(counted.code, 3) << counted.err;
  EXPECT_THAT(counted.out, Says("\n'many.csv': 149 findings\n"));
  EXPECT_EQ(std::ranges::count(counted.out, '\n'), 150) << "a line each: all are named";
}

TEST(ScheduleVerb, RefusesWithNumbers) {
  const TemporaryFolder folder;
  folder.write("two.csv", "0F0,0B0\n1F0,1B0\n");
  folder.write("torn.csv", "0F0,0Q0\n");
  folder.write("t.json", "{\"traceEvents\": []}");
  const std::vector<std::pair<Words, std::string>> cases{
      {{"1F1B", "--ranks", "4", "--micro-batches", "3"},
       "1F1B on 4 ranks: found 3 micro-batches, expected at least 4"},
      {{"DualPipeV", "--ranks", "4", "--micro-batches", "7"}, "expected at least 8"},
      {{"ZBV", "--ranks", "0", "--micro-batches", "7"},
       "--ranks: found '0', expected a whole number from 1"},
      {{"ZBV", "--ranks", "4", "--micro-batches", "7", "--stages-per-rank", "3"},
       "found 3 stages a rank, expected 2"},
      {{"1F1B", "--ranks", "4"}, "found no --micro-batches"},
      {{"2F2B", "--ranks", "4", "--micro-batches", "8"}, "expected one of GPipe, 1F1B"},
      {{"two.csv", "--ranks", "3"}, "--ranks: found 3, expected 2"},
      {{"two.csv", "--stages-per-rank", "2"}, "--stages-per-rank: found 2"},
      {{"torn.csv"}, "row 1, cell 2: found '0Q0'"},
      {{"absent.csv"}, "FILE.csv: cannot open 'absent.csv'"},
      {{"two.csv", "--costs-from", "absent.json"}, "--costs-from: cannot open 'absent.json'"},
      {{"two.csv", "--costs", "1e13,1,1,1"}, "--costs: found '1e13', expected a number from 0"},
      {{"two.csv", "--costs", "1,1"}, "--costs: found '1,1', expected 3 or 4 numbers"},
      {{"two.csv", "--exchanges", "-1,2", "--exchange-cost", "1"},
       "--exchanges: found '-1', expected a whole number from 0 to 64"},
      {{"two.csv", "--exchanges", "64,64", "--exchange-cost", "1", "--layers", "4096"},
       "--exchanges: found 64, 64 in 4096 layers of 2 stages, 1048576 in all, expected at most"},
      {{"two.csv", "--exchanges", "3,2", "--exchange-cost", "-1"},
       "--exchange-cost: found '-1', expected a number from 0"},
      {{"two.csv", "--exchanges", "3,2", "--exchange-cost", "1", "--costs-from", "t.json"},
       "--exchanges: found with measured costs"},
      {{"two.csv", "--exchanges", "3,2", "--exchange-cost", "1", "--costs-from", "t.toml"},
       "--exchange-cost: found with costs in GFLOP, expected --machine or --flops"},
      {{"GPipe", "--ranks", "1", "--micro-batches", "10000", "--costs", "1e9,1e9,1e9,1e9",
        "--trace", "a.json"},
       "trace: found a makespan of"},
      {{"two.csv", "--costs-from", "t.json"}, "found no span of the row 'slots'"},
  };
  for (const auto& [words, says] : cases) {
    const Outcome outcome = run_program(folder, schedule(words));
    EXPECT_EQ(outcome.code, 2) << says << outcome.out;
    EXPECT_EQ(outcome.out, "") << says;
    EXPECT_THAT(outcome.err, Says(says));
  }
}

// A file that cannot be written is refused before the schedule is made.
TEST(ScheduleVerb, IsRefusedWhereItCannotWrite) {
  const TemporaryFolder folder;
  for (const std::string option : {"--csv", "--svg", "--trace"}) {
    EXPECT_THAT(run_program(folder, schedule({"GPipe", "--ranks", "2", "--micro-batches", "2",
                                              option, "absent/a"})),
                Exits(2, option + ": ", "absent"));
  }
}

}  // namespace
}  // namespace tessera::cli::schedule_test
