// The parts of base/ that io/ stands on: mappings, JSON, messages and the log.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <thread>

#include "base/log.h"
#include "base/mapped_file.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "io/atomic_file.h"
#include "io/folder.h"
#include "support/temporary_folder.h"

namespace tessera::files_test {
namespace {

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(MappedFile, RangesAreTheFilesBytesBeforeAndAfterRelease) {
  const TemporaryFolder folder;
  std::string content(300'000, '\0');
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>('a' + i % 23);
  MappedFile file(folder.write("a", content));
  file.advise(Access::kSequential);
  EXPECT_EQ(text_of(file.bytes()), content);
  file.release(file.range(70'001, 100'000));
  file.release(file.range(300'000, 0));
  file.release(file.bytes());
  EXPECT_EQ(text_of(file.range(70'001, 100'000)), content.substr(70'001, 100'000));
  const MappedFile moved = std::move(file);
  EXPECT_EQ(moved.size_bytes(), 300'000);
}

TEST(MappedFile, RangesOutsideAreRefused) {
  const TemporaryFolder folder;
  const MappedFile file(folder.write("a", "0123456789"));
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  for (const auto& [offset, length] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {-1, 1}, {0, 11}, {11, 0}, {10, 1}, {1, kMax}, {kMax, kMax}, {0, -1}}) {
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&, o = offset, l = length] { file.range(o, l); }),
                Says("10 bytes"));
  }
  EXPECT_TRUE(file.range(10, 0).empty());
}

/// Reads byte `at` where the compiler cannot leave it out.
void read_byte(const MappedFile& file, std::int64_t at) {
  const volatile std::byte& byte = file.range(at, 1)[0];
  static_cast<void>(std::to_integer<int>(byte));
}

// Naive: SIGBUS, without the file's name.
TEST(MappedFileDeathTest, AFileThatIsCutShortEndsTheProcessWithItsName) {
  const TemporaryFolder folder;
  const auto cut = [&](const char* name) {
    report_cut_files();
    const MappedFile other(folder.write("other", std::string(9000, 'x')));
    MappedFile file(folder.write(name, std::string(50'000, 'x')));
    const MappedFile moved = std::move(file);
    {
      const MappedFile gone(folder / "other");
    }
    std::filesystem::resize_file(folder / name, 100);
    read_byte(other, 8999);
    read_byte(moved, 49'000);
  };
  EXPECT_EXIT(cut("a.bin"), ::testing::ExitedWithCode(1),
              "^tessera: io: '[^']*a.bin': became shorter while it was read \\(it was 50000 bytes "
              "when it was opened\\)");
}

TEST(MappedFileDeathTest, AnotherBusErrorStaysWhatItWas) {
  const TemporaryFolder folder;
  EXPECT_EXIT(
      {
        report_cut_files();
        const MappedFile file(folder.write("a", "0123456789"));
        ::raise(SIGBUS);
      },
      ::testing::KilledBySignal(SIGBUS), "^$");
}

TEST(MappedFileDeathTest, WhoIsToldReadsTheMessageBehindItsHead) {
  const TemporaryFolder folder;
  const auto told = folder.write("told", "");
  const auto cut = [&] {
    report_cut_files();
    report_cut_files({::open(told.c_str(), O_WRONLY | O_CLOEXEC), "head\n"});
    const MappedFile file(folder.write("a", std::string(50'000, 'x')));
    std::filesystem::resize_file(folder / "a", 0);
    read_byte(file, 0);
  };
  EXPECT_EXIT(cut(), ::testing::ExitedWithCode(1), "^$");
  EXPECT_THAT(read_text_file(told, 1000),
              AllOf(StartsWith("head\n'"), Says("(it was 50000 bytes")));
}

TEST(MappedFile, EmptyFileMapsNothing) {
  const TemporaryFolder folder;
  const MappedFile file(folder.write("a", ""));
  EXPECT_EQ(file.size_bytes(), 0);
  EXPECT_TRUE(file.range(0, 0).empty());
  file.advise(Access::kRandom);
  file.release(file.bytes());
}

TEST(InputFile, ReadPastTheEndNamesTheFile) {
  const TemporaryFolder folder;
  const InputFile file(folder.write("short", "0123456789"));
  std::vector<std::byte> out(4);
  file.read_range(6, out);
  EXPECT_EQ(text_of(out), "6789");
  EXPECT_REFUSED(kIo, file.read_range(7, out), "short",
                 "ends after 10 bytes, expected at least 11");
}

TEST(InputFile, ErrorsNamePathAndReason) {
  const TemporaryFolder folder;
  EXPECT_REFUSED(kIo, InputFile(folder / "none"), "none", "No such file", "errno 2");
  EXPECT_REFUSED(kIo, InputFile(folder.path()), "expected a regular file");
}

TEST(ReadTextFile, LargerThanTheCapIsRefused) {
  const TemporaryFolder folder;
  const auto path = folder.write("a", "12345");
  EXPECT_EQ(read_text_file(path, 5), "12345");
  EXPECT_REFUSED(kFormat, read_text_file(path, 4), "found 5 bytes, expected at most 4");
}

TEST(AtomicFile, OlderFileStaysUntilCommit) {
  const TemporaryFolder folder;
  const auto path = folder.write("a", "old");
  const std::string content = "new!";
  {
    AtomicFile abandoned(path);
    abandoned.write(0, std::as_bytes(std::span(content)));
  }
  EXPECT_EQ(read_text_file(path, 10), "old");
  AtomicFile file(path);
  file.write(0, std::as_bytes(std::span(content)));
  EXPECT_EQ(read_text_file(path, 10), "old");
  file.commit();
  EXPECT_EQ(read_text_file(path, 10), "new!");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

// Naive: opened with O_TRUNC, the file that the link leads to is emptied and overwritten.
TEST(AtomicFile, ALinkUnderTheTemporaryNameLeadsNowhere) {
  namespace fs = std::filesystem;
  const TemporaryFolder folder;
  const auto precious = folder.write("elsewhere/precious", "precious");
  const auto path = folder / "a";
  const auto temporary = folder / concat("a.", ::getpid(), ".tmp");
  const auto write = [&] { write_atomically(path, "new!"); };
  fs::create_symlink(precious, temporary);
  write();
  EXPECT_EQ(read_text_file(path, 10), "new!");
  fs::create_symlink(folder / "elsewhere/made", temporary);
  write();
  EXPECT_FALSE(fs::exists(folder / "elsewhere/made")) << "nothing is made through a link";
  fs::create_hard_link(precious, temporary);
  write();
  EXPECT_EQ(read_text_file(precious, 10), "precious");
  EXPECT_FALSE(fs::is_symlink(path));
}

TEST(AtomicFile, WhatACrashLeftUnderTheTemporaryNameIsNoHindrance) {
  const TemporaryFolder folder;
  const auto stale = folder.write(concat("a.", ::getpid(), ".tmp"), "longer than what comes");
  std::filesystem::permissions(stale, std::filesystem::perms::none);
  write_atomically(folder / "a", "new!");
  EXPECT_EQ(read_text_file(folder / "a", 10), "new!");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(ParseJson, DuplicateKeysAreRefusedAtEveryLevel) {
  EXPECT_EQ(parse_json(R"({"a":{"k":1},"b":[{"k":1},{"k":2}]})", "f").at("b").size(), 2U);
  for (const std::string text : {R"({"a":1,"a":1})", R"({"x":{"a":1,"b":2,"a":3}})",
                                 R"([{"y":[{"a":{},"a":{}}]}])", R"({"a":1,"\u0061":2})"}) {
    EXPECT_REFUSED(kFormat, parse_json(text, "f.json"), "f.json", "'a' twice");
  }
}

TEST(ParseJson, NestingIsCappedExactly) {
  const auto nested = [](std::size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_NO_THROW(parse_json(nested(64), "f"));
  EXPECT_REFUSED(kFormat, parse_json(nested(65), "f"), "deeper than 64");
  EXPECT_REFUSED(kFormat, parse_json(nested(100'000), "f"));
  EXPECT_REFUSED(kFormat, parse_json(std::string(1'000'000, '['), "f"));
}

TEST(ParseJson, ManyObjectsInOneTakeNoQuadraticTime) {
  std::string text = "{\"files\": {";
  for (int i = 0; i < 200'000; ++i) text += concat(i > 0 ? "," : "", '"', i, "\":{}");
  EXPECT_EQ(parse_json(text + "}}", "f").at("files").size(), 200'000U);
}

TEST(ParseJson, MalformedTextIsAFormatErrorWithAPosition) {
  EXPECT_REFUSED(kFormat, parse_json("{\"a\": nul}", "f.json"), "f.json", "at byte 10");
  for (const std::string text :
       {"", "{", "1 2", "{\"a\"}", "\"\xff\"", "1e999", "NaN", "{'a':1}"}) {
    EXPECT_REFUSED(kFormat, parse_json(text, "f")) << text;
  }
  EXPECT_LT(
      error_of(ErrorKind::kFormat, [] { parse_json("\"" + std::string(1'000'000, 'x'), "f"); })
          .size(),
      500U);
  EXPECT_REFUSED(kFormat, parse_json_object("[]", "f"), "found a JSON array, expected an object");
}

TEST(Printable, TextIsKeptAndEverythingElseEscaped) {
  EXPECT_EQ(printable("model.layers.0"), "'model.layers.0'");
  EXPECT_EQ(printable("\xC3\xA9\xE2\x82\xAC"), "'\xC3\xA9\xE2\x82\xAC'");
  EXPECT_EQ(printable(std::string_view("a\n\0\x1b\x7f", 5)), "'a\\x0a\\x00\\x1b\\x7f'");
  EXPECT_EQ(printable("\xff\xC3"), "'\\xff\\xc3'");
  EXPECT_EQ(printable("\xC2\x9B"), "'\\xc2\\x9b'");  // a terminal's control code in two bytes
  EXPECT_EQ(printable("abcdef", 3), "'abc...'");
  EXPECT_EQ(shape_text(std::vector<std::int64_t>{2, 3}), "[2, 3]");
  EXPECT_EQ(shape_text(std::vector<std::int64_t>(100, 1)), "[1, 1, 1, 1, 1, 1, 1, 1, ...]");
}

class Log : public ::testing::Test {
 protected:
  Log() { set_log_level(LogLevel::kInfo); }
  ~Log() override {
    log::init({});
    set_log_level(LogLevel::kNone);
  }
  TemporaryFolder folder_;
};

TEST_F(Log, RankZeroShowsAllAndTheFileHasAll) {
  ::testing::internal::CaptureStderr();
  log::init({.rank = 0, .world_size = 2, .file = folder_ / "logs/rank_0.log"});
  log::info("step ", 1, " loss ", 2.5);
  log::warn("careful");
  const std::string screen = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(screen, Says("info [rank 0] step 1 loss 2.5\n", "warning [rank 0] careful\n"));
  EXPECT_EQ(read_text_file(folder_ / "logs/rank_0.log", 4096), screen);
}

TEST_F(Log, OtherRanksShowErrorsOnly) {
  ::testing::internal::CaptureStderr();
  log::init({.rank = 1, .world_size = 2, .file = folder_ / "rank_1.log"});
  log::info("quiet {}");
  log::error("loud {}");  // braces are text, not a format
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(Says("[rank 1] loud {}\n"), Not(Says("quiet"))));
  EXPECT_THAT(read_text_file(folder_ / "rank_1.log", 4096), Says("quiet {}", "loud {}"));
}

TEST_F(Log, WhatIsForTheFileAloneStaysOffTheScreen) {
  ::testing::internal::CaptureStderr();
  log::write_to_file(log::Level::kError, "without a file");
  log::init({.rank = 0, .world_size = 2, .file = folder_ / "rank_0.log"});
  log::write_to_file(log::Level::kError, "with one");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_THAT(read_text_file(folder_ / "rank_0.log", 4096), Says("[rank 0] with one\n"));
}

TEST_F(Log, UnwritableFileIsAnIoErrorAndKeepsTheEarlierSinks) {
  log::init({.rank = 0, .world_size = 1, .file = folder_ / "a.log"});
  folder_.write("b", "a file, not a folder");
  EXPECT_REFUSED(kIo, log::init({.file = folder_ / "b/rank.log"}), "b/rank.log");
  ::testing::internal::CaptureStderr();
  log::info("still");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(Says("[rank")));
  EXPECT_THAT(read_text_file(folder_ / "a.log", 4096), Says("still"));
}

TEST_F(Log, LinesOfSeveralThreadsStayWhole) {
  ::testing::internal::CaptureStderr();
  log::init({.rank = 0, .world_size = 1, .file = folder_ / "a.log"});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 50; ++i) log::info("<", std::string(80, 'x'), ">");
    });
  }
  for (std::thread& thread : threads) thread.join();
  ::testing::internal::GetCapturedStderr();
  std::ifstream file(folder_ / "a.log");
  std::string line;
  int lines = 0;
  for (; std::getline(file, line); ++lines) {
    EXPECT_THAT(line, EndsWith("info <" + std::string(80, 'x') + ">"));
  }
  EXPECT_EQ(lines, 200);
}

namespace fs = std::filesystem;

TEST(MadePaths, GoWithTheFilesThatWereNoted) {
  const TemporaryFolder folder;
  MadePaths made;
  made.make(folder / "a/b/run", "key");
  made.expect_file(folder / "a/b/run/logs/rank_0.log");
  folder.write("a/b/run/logs/rank_0.log", "text");
  made.add_lock(folder.write("a/b/run/.lock", ""));
  made.remove();
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// The list of another host's rank 0 may name what is an old run here.
TEST(MadePaths, LeaveAllThatSomebodyElseMade) {
  const TemporaryFolder folder;
  folder.write("runs/old/config.toml", "text");
  folder.write("runs/old/logs/rank_1.log", "text");
  folder.write("runs/old/checkpoint/step-500/x", "text");
  MadePaths first;
  first.add_folder(folder / "runs");
  first.add_folder(folder / "runs/old");
  first.add_folder(folder / "runs/old/logs");
  first.add_folder(folder / "runs/old/checkpoint");
  MadePaths other;
  other.take_folders(first.folders());
  other.make(folder / "runs/old", "key");
  other.expect_file(folder / "runs/old/logs/rank_1.log");
  other.expect_file(folder / "runs/old/config.toml");
  other.remove();
  first.remove();
  EXPECT_TRUE(fs::exists(folder / "runs/old/config.toml"));
  EXPECT_TRUE(fs::exists(folder / "runs/old/logs/rank_1.log"));
  EXPECT_TRUE(fs::exists(folder / "runs/old/checkpoint/step-500/x"));
}

// Whichever leaves last.
TEST(MadePaths, OfSeveralRanksGoWithTheLastOne) {
  for (const bool first_goes_first : {true, false}) {
    const TemporaryFolder folder;
    MadePaths first;
    first.make(folder / "run", "key");
    first.expect_file(folder / "run/logs/rank_0.log");
    MadePaths second;
    second.take_folders(first.folders());
    second.expect_file(folder / "run/logs/rank_1.log");
    for (const auto* name : {"run/logs/rank_0.log", "run/logs/rank_1.log"}) folder.write(name, "");
    (first_goes_first ? first : second).remove();
    EXPECT_TRUE(fs::exists(folder / "run/logs"));
    (first_goes_first ? second : first).remove();
    EXPECT_FALSE(fs::exists(folder / "run"));
  }
}

// A link is not followed by name where the path goes back through it.
TEST(MadePaths, AreMadeWhereTheNormalPathSays) {
  const TemporaryFolder folder;
  fs::create_directories(folder / "far/away");
  fs::create_directory_symlink(folder / "far/away", folder / "link");
  MadePaths made;
  made.make(folder / "link/../run", "key");
  EXPECT_TRUE(fs::exists(folder / "run"));
  EXPECT_FALSE(fs::exists(folder / "far/run"));
  made.remove();
  EXPECT_FALSE(fs::exists(folder / "run"));
}

// Folders that appear complete or not at all, and files that no link may lead away from.

namespace fs = std::filesystem;

std::size_t entries(const fs::path& folder) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

TEST(AtomicFolder, HasItsNameOnlyAfterCommit) {
  const TemporaryFolder folder;
  AtomicFolder made(folder / "new/out/");
  std::ofstream(made.temporary() / "a.txt") << "a";
  EXPECT_FALSE(fs::exists(folder / "new/out"));
  made.commit();
  EXPECT_TRUE(fs::exists(folder / "new/out/a.txt"));
  EXPECT_EQ(entries(folder / "new"), 1U) << "nothing temporary stays";
}

TEST(AtomicFolder, WithoutCommitNothingStays) {
  const TemporaryFolder folder;
  {
    const AtomicFolder made(folder / "out");
    std::ofstream(made.temporary() / "a.txt") << "a";
  }
  EXPECT_EQ(entries(folder.path()), 0U);
}

TEST(AtomicFolder, ReplacesAnEmptyFolderAndALinkToOne) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "empty");
  fs::create_directory_symlink(folder / "empty", folder / "link");
  AtomicFolder made(folder / "link");
  std::ofstream(made.temporary() / "a.txt") << "a";
  made.commit();
  EXPECT_TRUE(fs::exists(folder / "empty/a.txt"));
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
}

TEST(AtomicFolder, ALinkUnderTheTemporaryNameIsReplacedAndWhatItLeadsToStays) {
  const TemporaryFolder folder;
  folder.write("elsewhere/mine.txt", "mine");
  fs::create_directory_symlink(folder / "elsewhere", folder / concat("out.", ::getpid(), ".tmp"));
  AtomicFolder made(folder / "out");
  std::ofstream(made.temporary() / "a.txt") << "a";
  made.commit();
  EXPECT_FALSE(fs::is_symlink(folder / "out"));
  EXPECT_EQ(entries(folder / "elsewhere"), 1U);
}

TEST(AtomicFolder, WhatIsThereIsNotTouched) {
  const TemporaryFolder folder;
  folder.write("full/mine.txt", "mine");
  folder.write("file", "mine");
  for (const char* name : {"full", "file"}) {
    EXPECT_REFUSED(kUsage, AtomicFolder{folder / name}, name);
  }
  EXPECT_TRUE(fs::exists(folder / "full/mine.txt"));
  // Taken between the beginning and the end.
  AtomicFolder late(folder / "late");
  folder.write("late/other.txt", "other");
  EXPECT_REFUSED(kIo, late.commit());
  EXPECT_TRUE(fs::exists(folder / "late/other.txt"));
}

TEST(FileInside, FollowsLinksWithinTheFolderOnly) {
  const TemporaryFolder folder;
  folder.write("secret.txt", "secret");
  folder.write("model/a.txt", "a");
  fs::create_symlink("a.txt", folder / "model/same.txt");
  fs::create_symlink("../secret.txt", folder / "model/other.txt");
  fs::create_symlink("missing", folder / "model/dangling.txt");
  fs::create_directory(folder / "model/folder");
  const fs::path model = folder / "model";
  EXPECT_EQ(file_inside(model, "a.txt"), model / "a.txt");
  EXPECT_EQ(optional_file_inside(model, "same.txt"), model / "same.txt");
  EXPECT_EQ(optional_file_inside(model, "none.txt"), std::nullopt);
  EXPECT_REFUSED(kFormat, optional_file_inside(model, "other.txt"), "other.txt");
  EXPECT_REFUSED(kIo, optional_file_inside(model, "dangling.txt"));
  EXPECT_REFUSED(kFormat, optional_file_inside(model, "folder"), "no plain file");
}

TEST(FileInside, TheBlobsOfAHubCacheCountAsInside) {
  const TemporaryFolder folder;
  folder.write("models--x/blobs/123", "content");
  fs::create_directories(folder / "models--x/snapshots/main");
  fs::create_symlink("../../blobs/123", folder / "models--x/snapshots/main/tokenizer.json");
  EXPECT_TRUE(optional_file_inside(folder / "models--x/snapshots/main", "tokenizer.json"));
}

using std::chrono::milliseconds;
using std::chrono::minutes;

std::string refusal(const std::filesystem::path& folder, ErrorKind kind) {
  return refusal_of(kind, [&] { const FolderLock lock(folder, milliseconds(0), "take another"); });
}

TEST(FolderLock, IsRefusedWhileItIsHeldAndNamesTheHolder) {
  const TemporaryFolder folder;
  {
    const FolderLock first(folder.path(), milliseconds(0), "");
    EXPECT_THAT(refusal(folder.path(), ErrorKind::kConfig),
                Says(folder.path().native(), "process " + std::to_string(::getpid()) + " on ",
                     "take another"));
  }
  EXPECT_EQ(refusal(folder.path(), ErrorKind::kConfig), "") << "free again";
}

TEST(FolderLock, MovesWithItsOwner) {
  const TemporaryFolder folder;
  FolderLock first(folder.path(), milliseconds(0), "");
  const FolderLock second(std::move(first));
  EXPECT_NE(refusal(folder.path(), ErrorKind::kConfig), "");
}

// A child that holds it is killed; nothing is left that has to be cleaned up.
TEST(FolderLock, GoesWithItsProcess) {
  const TemporaryFolder folder;
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock lock(folder.path(), milliseconds(0), "");
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    ::pause();
    ::_exit(1);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THAT(refusal(folder.path(), ErrorKind::kConfig), Says("process " + std::to_string(child)));
  // A process that waits takes it as soon as the holder is gone.
  std::thread killer([&] { ::kill(child, SIGKILL); });
  EXPECT_NO_THROW(FolderLock(folder.path(), minutes(1), ""));
  killer.join();
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

/// How many of this process's descriptors are of the file.
std::size_t descriptors_of(const std::filesystem::path& file) {
  const auto path = std::filesystem::canonical(file);
  std::size_t count = 0;
  std::error_code closed;  // by another thread, since it was listed
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    count += std::filesystem::read_symlink(entry, closed) == path ? 1 : 0;
  }
  return count;
}

// A run that is refused takes its lock file away while another waits at it.
TEST(FolderLock, IsTakenOnTheFileThatStandsThere) {
  const TemporaryFolder folder;
  std::optional<FolderLock> first(std::in_place, folder.path(), milliseconds(0), "");
  std::thread waiting([&] {
    const FolderLock second(folder.path(), minutes(1), "");
    EXPECT_NE(refusal(folder.path(), ErrorKind::kConfig), "") << "of the file that others open";
  });
  while (descriptors_of(lock_file(folder.path())) < 2) std::this_thread::yield();
  std::filesystem::remove(lock_file(folder.path()));
  first.reset();
  waiting.join();
}

TEST(FolderLock, AFolderThatIsNotThereAndALinkAreErrorsThatNameTheFile) {
  const TemporaryFolder folder;
  EXPECT_THAT(refusal(folder / "absent", ErrorKind::kIo), Says("absent/.lock"));
  folder.write("precious", "text");
  std::filesystem::create_symlink(folder / "precious", folder / ".lock");
  EXPECT_THAT(refusal(folder.path(), ErrorKind::kIo),
              Says(".lock': found a symbolic link, expected a regular file"));
  EXPECT_EQ(read_file(folder / "precious"), "text");
}

}  // namespace
}  // namespace tessera::files_test
