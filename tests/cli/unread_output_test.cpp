// Output without a reader, or that cannot be written: runs continue, and verbs whose output is
// their result end.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <random>
#include <stdexcept>
#include <thread>

#include "base/environment.h"
#include "cli/same_bits.h"
#include "cli/saving_run.h"
#include "proof.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::unread_output_test {
namespace {

/// Where a stream of a command goes.
struct Sink {
  enum class Kind { kRead, kClosed, kFull };
  Kind kind = Kind::kRead;
  /// kRead: the reader closes its end when it has read so much; 0: before the command starts; < 0:
  /// it reads to the end.
  int bytes = -1;
};

std::string to_string(const Sink& sink) {
  if (sink.kind == Sink::Kind::kClosed) return "closed";
  if (sink.kind == Sink::Kind::kFull) return "full disk";
  return sink.bytes < 0 ? "read" : concat("gone after ", sink.bytes, " bytes");
}

/// The end of a pipe that is read until enough came.
class Reader {
 public:
  explicit Reader(const Sink& sink) : sink_(sink) {
    if (sink.kind == Sink::Kind::kRead && ::pipe2(ends_.data(), O_CLOEXEC) != 0) {
      throw std::runtime_error("no pipe");
    }
    if (sink.bytes == 0) close(0);
  }
  ~Reader() { finish(); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  /// For the command, as its descriptor `to`.
  void give(posix_spawn_file_actions_t& actions, int to) {
    switch (sink_.kind) {
      case Sink::Kind::kRead:
        ::posix_spawn_file_actions_adddup2(&actions, ends_[1], to);
        break;
      case Sink::Kind::kClosed:
        ::posix_spawn_file_actions_addclose(&actions, to);
        break;
      case Sink::Kind::kFull:
        ::posix_spawn_file_actions_addopen(&actions, to, "/dev/full", O_WRONLY, 0);
        break;
    }
  }
  /// Once the command has its end.
  void start() {
    close(1);
    if (ends_[0] >= 0) thread_ = std::thread([this] { read(); });
  }
  const std::string& finish() {
    if (thread_.joinable()) thread_.join();
    for (const std::size_t end : {0U, 1U}) close(end);
    return text_;
  }

 private:
  void read() {
    std::array<char, 1> byte{};  // no more than was asked for
    while (::read(ends_[0], byte.data(), 1) == 1) {
      text_ += byte[0];
      if (std::cmp_equal(text_.size(), sink_.bytes)) break;
    }
    close(0);
  }
  void close(std::size_t end) {
    if (ends_.at(end) >= 0) ::close(ends_.at(end));
    ends_.at(end) = -1;
  }

  const Sink sink_;
  std::array<int, 2> ends_{-1, -1};
  std::string text_;
  std::thread thread_;
};

Outcome run_into(const TemporaryFolder& folder, const Words& words, const Sink& out,
                 const Sink& err) {
  Reader out_reader(out);
  Reader err_reader(err);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addchdir_np(&actions, folder.path().c_str());
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  out_reader.give(actions, STDOUT_FILENO);
  err_reader.give(actions, STDERR_FILENO);
  auto arguments = joined({"timeout", "120", TESSERA_PROGRAM}, words);
  std::vector<char*> pointers;
  for (std::string& one : arguments) pointers.push_back(one.data());
  pointers.push_back(nullptr);
  // A shell starts commands with the default action of SIGPIPE.
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t defaults;
  ::sigemptyset(&defaults);
  ::sigaddset(&defaults, SIGPIPE);
  ::posix_spawnattr_setsigdefault(&attributes, &defaults);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  pid_t pid = -1;
  EXPECT_EQ(::posix_spawnp(&pid, pointers[0], &actions, &attributes, pointers.data(), environ), 0);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  out_reader.start();
  err_reader.start();
  int status = 0;
  ::waitpid(pid, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), out_reader.finish(),
          err_reader.finish()};
}

constexpr int kSteps = 8;

Sink draw_sink(std::mt19937& random) {
  switch (random() % 4) {
    case 0:
      return {Sink::Kind::kClosed};
    case 1:
      return {Sink::Kind::kFull};
    default:
      return {Sink::Kind::kRead, random() % 4 == 0 ? 0 : static_cast<int>(random() % 1200)};
  }
}

// Property: a run ends well with all its steps and its checkpoint, whichever of its streams cannot
// be written or has lost its reader, and from any byte on, and its log says so once.
TEST(UnreadOutput, EndsNoRun) {
  const int draws = test::full_proof() ? 200 : 12;
  for (int seed = 1; seed <= draws; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const int ranks = 1 + seed % 3;
    const auto which = random() % 3;
    const Sink out = which == 1 ? Sink{} : draw_sink(random);
    const Sink err = which == 0 ? Sink{} : draw_sink(random);
    SCOPED_TRACE(concat("seed ", seed, ", ", ranks, " ranks, stdout ", to_string(out), ", stderr ",
                        to_string(err)));
    const SmallRun folder;
    succeeded(
        run_into(folder,
                 {"train", "run.toml", "--nproc", std::to_string(ranks), "--job.dump_folder", "run",
                  "--training.steps", std::to_string(kSteps), "--training.global_batch_size", "6",
                  "--metrics.enable_tensorboard", "false"},
                 out, err));
    EXPECT_EQ(losses(folder / "run").size(), static_cast<std::size_t>(kSteps));
    const auto store = store_of(folder, "run");
    EXPECT_EQ(store.latest(), kSteps);
    CheckpointFolder::open(store.complete(kSteps)).verify_all();
    const auto said = lines_with(read_file(folder / "run/logs/rank_0.log"),
                                 "stdout: found that a step line cannot be written");
    const bool never_read = out.kind != Sink::Kind::kRead || out.bytes == 0;
    EXPECT_LE(said.size(), out.kind == Sink::Kind::kRead && out.bytes < 0 ? 0U : 1U);
    if (never_read) {
      EXPECT_EQ(said.size(), 1U);
    }
  }
}

/// Verbs whose output is their result, in a folder with a small run.
std::vector<Words> verbs_of_output() {
  const std::string model = TESSERA_TEST_DATA "/qwen3-mixed";
  return {{"--help"},
          {"--version"},
          {"train", "--help"},
          {"train", "run.toml", "--print-config"},
          {"inspect", model},
          {"inspect", model, "--json"},
          {"inspect", "--contract", "run.toml"},
          {"plan", "run.toml", "--world", "2"},
          {"schedule", "1F1B", "--ranks", "4", "--micro-batches", "8"},
          {"generate", "--model", model, "--prompt-tokens", "1,2", "--max-new-tokens", "20"}};
}

// Property: a reader that has gone, from any byte on, ends each of these verbs silently and
// without an error; a full disk and a closed descriptor are errors of each.
TEST(UnreadOutput, EndsAVerbWhoseOutputIsItsResult) {
  const SmallRun folder;
  std::mt19937 random(11);
  for (const Words& words : verbs_of_output()) {
    for (const int bytes : {0, 1 + static_cast<int>(random() % 2000)}) {
      const Outcome gone = run_into(folder, words, {Sink::Kind::kRead, bytes}, {});
      EXPECT_EQ(gone.code, 0) << words.front() << ", " << bytes << " bytes\n" << gone.err;
      EXPECT_THAT(gone.err, IsEmpty()) << words.front() << ", " << bytes << " bytes";
    }
    const Sink lost{random() % 2 == 0 ? Sink::Kind::kFull : Sink::Kind::kClosed};
    const Outcome failed = run_into(folder, words, lost, {});
    EXPECT_EQ(failed.code, 1) << words.front() << ", " << to_string(lost) << "\n" << failed.err;
    EXPECT_THAT(failed.err, Says("stdout: found that it cannot be written")) << words.front();
  }
}

// Tokens come one by one: all that were asked for would take longer than the command may.
TEST(UnreadOutput, EndsATextWithItsReader) {
  const SmallRun folder;
  std::string model = read_file(folder / "model.json");
  const std::string positions = "\"max_position_embeddings\": 64";
  model.replace(model.find(positions), positions.size(), "\"max_position_embeddings\": 400000");
  folder.write("model.json", model);
  const Outcome run =
      succeeded(run_program(folder, {"train", "run.toml", "--job.dump_folder", "run"}));
  for (const int bytes : {0, 100}) {
    const Outcome gone =
        succeeded(run_into(folder,
                           {"generate", "--model", "run/checkpoint/step-3", "--prompt-tokens",
                            "1,2", "--max-new-tokens", "399990"},
                           {Sink::Kind::kRead, bytes}, {}));
    EXPECT_THAT(gone.err, IsEmpty());
  }
}

// The results of convert are a folder, and the exit code of --verify: an unread line changes
// neither.
TEST(UnreadOutput, EndsNoVerbWhoseResultIsElsewhere) {
  const TemporaryFolder folder;
  const std::string model = TESSERA_TEST_DATA "/qwen3-mixed";
  const Words convert{"convert", model, "out", "--verify"};
  const Sink gone{Sink::Kind::kRead, 0};
  const Outcome made = succeeded(run_into(folder, convert, gone, {}));
  EXPECT_THAT(made.err, IsEmpty());
  const auto file = folder / "out/model.safetensors";
  ASSERT_TRUE(std::filesystem::exists(file));
  auto bytes = read_file(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 0x11);
  folder.write("out/model.safetensors", bytes);
  EXPECT_EQ(run_into(folder, convert, gone, {}).code, 3);
}

// Findings are reported without a reader, too, and their page is written.
TEST(UnreadOutput, LeavesFindingsTheirExitCode) {
  const SmallRun folder;
  for (const Words& form : {Words{}, Words{"--json"}}) {
    const Words words =
        joined({"check", "run.toml", "--device-memory", "1KB", "--html", "page.html"}, form);
    for (const int bytes : {0, 1, 700}) {
      const Outcome gone = run_into(folder, words, {Sink::Kind::kRead, bytes}, {});
      EXPECT_EQ(gone.code, 3) << bytes << " bytes\n" << gone.err;
      EXPECT_THAT(gone.err, IsEmpty()) << bytes << " bytes";
      EXPECT_THAT(read_file(folder / "page.html"), Says("does not fit"));
      std::filesystem::remove(folder / "page.html");
    }
    EXPECT_THAT(run_into(folder, words, {Sink::Kind::kFull}, {}),
                Exits(1, "stdout: found that it cannot be written"));
  }
}

}  // namespace
}  // namespace tessera::cli::unread_output_test
