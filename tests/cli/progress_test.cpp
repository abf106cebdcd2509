// The progress line, on a terminal and without one.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <thread>

#include "cli/program.h"
#include "support/test.h"

namespace tessera::cli::progress_test {
namespace {

/// Receives as a terminal of 100 columns.
class Terminal {
 public:
  Terminal() : master_(::posix_openpt(O_RDWR | O_NOCTTY)) {
    if (master_ < 0 || ::grantpt(master_) != 0 || ::unlockpt(master_) != 0) {
      throw std::runtime_error("no pseudo terminal");
    }
    name_ = ::ptsname(master_);
    // Held open, so that reading does not end before the program begins.
    slave_ = ::open(name_.c_str(), O_RDWR | O_NOCTTY);
    const winsize size{.ws_row = 25, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
    ::ioctl(slave_, TIOCSWINSZ, &size);
    termios raw{};
    ::tcgetattr(slave_, &raw);
    ::cfmakeraw(&raw);
    ::tcsetattr(slave_, TCSANOW, &raw);
    reader_ = std::thread([this] {
      char buffer[4096];
      for (ssize_t n = 0; (n = ::read(master_, buffer, sizeof buffer)) > 0;) {
        received_.append(buffer, static_cast<std::size_t>(n));
      }
    });
  }
  ~Terminal() {
    if (reader_.joinable()) text();
    ::close(master_);
  }
  const std::string& name() const { return name_; }
  /// All of it, when no program has the terminal open any more.
  std::string text() {
    ::close(slave_);
    reader_.join();
    return received_;
  }

 private:
  int master_;
  int slave_ = -1;
  std::string name_;
  std::string received_;
  std::thread reader_;
};

/// The lines that a person sees in the end, without what was erased.
std::vector<std::string> screen(const std::string& received) {
  std::vector<std::string> lines(1);
  for (std::size_t i = 0; i < received.size(); ++i) {
    if (received.compare(i, 4, "\r\x1B[K") == 0) {
      lines.back().clear();
      i += 3;
    } else if (received[i] == '\n') {
      lines.emplace_back();
    } else if (received[i] != '\r') {
      lines.back() += received[i];
    }
  }
  return lines;
}

Outcome run_on(Terminal& terminal, const TemporaryFolder& folder,
               const std::vector<std::string>& words, bool also_stdout) {
  std::string command =
      "cd '" + folder.path().string() + "' && OMP_NUM_THREADS=1 timeout 60 '" + TESSERA_PROGRAM "'";
  for (const std::string& word : words) command += " '" + word + "'";
  command += also_stdout ? " > " + terminal.name() : " > stdout.txt";
  command += " 2> " + terminal.name() + " < /dev/null";
  const int status = std::system(command.c_str());
  Outcome outcome;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (!also_stdout) outcome.out = read_file(folder / "stdout.txt");
  outcome.err = terminal.text();
  return outcome;
}

TEST(ProgressLine, ShowsEveryStepAndIsGoneAtTheEnd) {
  const SmallRun folder;
  for (const std::string ranks : {"1", "2"}) {
    Terminal terminal;
    const Outcome outcome = succeeded(
        run_on(terminal, folder, {"train", "run.toml", "--nproc", ranks, "--metrics.log_freq", "2"},
               false));
    EXPECT_THAT(outcome.err, Says("\r\x1B[Kstep 1 of 3   33 %  loss 5.",
                                  "\r\x1B[Kstep 2 of 3   67 %  loss 5.", " left"));
    for (const std::string& line : screen(outcome.err)) {
      EXPECT_THAT(line, Not(Says("step 3 of"))) << "cleared";
    }
    EXPECT_EQ(outcome.out.find('\x1B'), std::string::npos) << "stdout is for other programs";
  }
}

TEST(ProgressLine, DoesNotMixWithStepLinesOnTheSameTerminal) {
  const SmallRun folder;
  Terminal terminal;
  const Outcome outcome = succeeded(run_on(terminal, folder, {"train", "run.toml"}, true));
  int steps = 0;
  for (const std::string& line : screen(outcome.err)) {
    const bool is_step = line.starts_with("step: ");
    const bool is_log = line.find(" info ") != std::string::npos;
    EXPECT_TRUE(is_step || is_log || line.empty()) << line;
    steps += is_step ? 1 : 0;
  }
  EXPECT_EQ(steps, 3);
}

TEST(ProgressLine, AnErrorHasALineOfItsOwn) {
  const SmallRun folder;
  // The update makes weights that are not finite: the second step is refused.
  Terminal terminal;
  const Outcome outcome =
      run_on(terminal, folder,
             {"train", "run.toml", "--optimizer.name", "SGD", "--optimizer.lr", "1e38"}, false);
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  const auto lines = screen(outcome.err);
  EXPECT_TRUE(std::ranges::any_of(lines, [](const std::string& line) {
    return line.starts_with("tessera: ") && line.find("expected finite") != std::string::npos;
  })) << outcome.err;
}

TEST(ProgressLine, AFailingRankOfSeveralHasItsErrorOnALineOfItsOwn) {
  const SmallRun folder;
  Terminal terminal;
  const Outcome outcome = run_on(
      terminal, folder,
      {"train", "run.toml", "--nproc", "2", "--optimizer.name", "SGD", "--optimizer.lr", "1e38"},
      false);
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  const auto lines = screen(outcome.err);
  int errors = 0;
  for (const std::string& line : lines) {
    if (line.find("expected finite") == std::string::npos) continue;
    ++errors;
    EXPECT_TRUE(line.starts_with("rank ")) << line;
  }
  EXPECT_GE(errors, 1) << outcome.err;
}

TEST(ProgressLine, IsSilentWhereStderrIsNoTerminal) {
  const SmallRun folder;
  const Outcome outcome = succeeded(run_program(folder, {"train", "run.toml"}));
  EXPECT_EQ(outcome.err.find('\r'), std::string::npos);
  EXPECT_EQ(outcome.err.find("step 1 of"), std::string::npos);
}

TEST(ProfileFlag, PrintsATableAtTheEndAndWritesIt) {
  const SmallRun folder;
  const Outcome outcome = succeeded(run_program(
      folder, {"train", "run.toml", "--profile", "--nproc", "2", "--job.dump_folder", "run"}));
  EXPECT_THAT(outcome.err, Says("where a step goes (rank 0, mean of 1 step(s)"));
  for (const char* kind : {"products", "other kernels", "waiting for communication", "optimizer",
                           "own code", "a step"}) {
    EXPECT_THAT(outcome.err, Says(std::string("\n  ") + kind + " "));
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "run/profile.json"));
  EXPECT_EQ(outcome.out.find("products"), std::string::npos) << "stdout has step lines only";
}

}  // namespace
}  // namespace tessera::cli::progress_test
