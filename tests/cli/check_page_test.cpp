// `tessera check --html`: the page is written in addition to the text, whole or not at all.

#include "cli/program.h"
#include "support/test.h"

namespace tessera::cli::check_page_test {
namespace {

using Words = std::vector<std::string>;

Words check(const Words& more) {
  return joined({"check", TESSERA_CONFIGS "/qwen3-30b-a3b.toml", "--world", "4", "--model.config",
                 TESSERA_CONFIGS "/models/qwen3-30b-a3b/config.json", "--training.seq_len", "64",
                 "--parallelism.pipeline_parallel_degree", "2", "--training.global_batch_size", "8",
                 "--machine", "h100"},
                more);
}

TEST(CheckPage, HasThePicturesOfARun) {
  const TemporaryFolder folder;
  const Outcome plain = run_program(folder, check({}));
  const Outcome outcome = run_program(folder, check({"--html", "page.html"}));
  EXPECT_EQ(outcome.out, plain.out);
  EXPECT_EQ(outcome.err, "");
  const std::string page = read_file(folder / "page.html");
  EXPECT_THAT(page, StartsWith("<!DOCTYPE html>"));
  EXPECT_THAT(page, EndsWith("</html>\n"));
  for (const char* id : {"held", "step0", "step1", "sent", "time", "slots"}) {
    EXPECT_THAT(page, Says(concat("<title id=\"", id, "\">")));
  }
  EXPECT_THAT(page, Says("qwen3-30b-a3b on 4 ranks", "model.layers.", "gathers of parameters"));
}

TEST(CheckPage, IsRefusedWhereItCannotBeWritten) {
  const TemporaryFolder folder;
  const Outcome outcome = run_program(folder, check({"--html", "absent/page.html"}));
  EXPECT_THAT(outcome, Exits(2, "--html: ", "absent"));
  EXPECT_EQ(outcome.out, "");
}

}  // namespace
}  // namespace tessera::cli::check_page_test
