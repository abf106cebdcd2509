// The parts of base/ that io/ stands on: mappings, JSON, messages and the log.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>
#include <vector>

#include "base/log.h"
#include "base/mapped_file.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "io/atomic_file.h"
#include "unit/io/temporary_folder.h"

namespace tessera::files_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TemporaryFolder;

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
                HasSubstr("10 bytes"));
  }
  EXPECT_TRUE(file.range(10, 0).empty());
}

/// Reads byte `at` where the compiler cannot leave it out.
void read_byte(const MappedFile& file, std::int64_t at) {
  const volatile std::byte& byte = file.range(at, 1)[0];
  static_cast<void>(std::to_integer<int>(byte));
}

// Naive: SIGBUS, without a word of the file.
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
              AllOf(::testing::StartsWith("head\n'"), HasSubstr("(it was 50000 bytes")));
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
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { file.read_range(7, out); }),
              AllOf(HasSubstr("short"), HasSubstr("ends after 10 bytes, expected at least 11")));
}

TEST(InputFile, ErrorsNamePathAndReason) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { InputFile(folder / "none"); }),
              AllOf(HasSubstr("none"), HasSubstr("No such file"), HasSubstr("errno 2")));
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { InputFile(folder.path()); }),
              HasSubstr("expected a regular file"));
}

TEST(ReadTextFile, LargerThanTheCapIsRefused) {
  const TemporaryFolder folder;
  const auto path = folder.write("a", "12345");
  EXPECT_EQ(read_text_file(path, 5), "12345");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { read_text_file(path, 4); }),
              HasSubstr("found 5 bytes, expected at most 4"));
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
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { parse_json(text, "f.json"); }),
                AllOf(HasSubstr("f.json"), HasSubstr("'a' twice")));
  }
}

TEST(ParseJson, NestingIsCappedExactly) {
  const auto nested = [](std::size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_NO_THROW(parse_json(nested(64), "f"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { parse_json(nested(65), "f"); }),
              HasSubstr("deeper than 64"));
  error_of(ErrorKind::kFormat, [&] { parse_json(nested(100'000), "f"); });
  error_of(ErrorKind::kFormat, [&] { parse_json(std::string(1'000'000, '['), "f"); });
}

TEST(ParseJson, ManyObjectsInOneTakeNoQuadraticTime) {
  std::string text = "{\"files\": {";
  for (int i = 0; i < 200'000; ++i) text += concat(i > 0 ? "," : "", '"', i, "\":{}");
  EXPECT_EQ(parse_json(text + "}}", "f").at("files").size(), 200'000U);
}

TEST(ParseJson, MalformedTextIsAFormatErrorWithAPosition) {
  EXPECT_THAT(error_of(ErrorKind::kFormat, [] { parse_json("{\"a\": nul}", "f.json"); }),
              AllOf(HasSubstr("f.json"), HasSubstr("at byte 10")));
  for (const std::string text :
       {"", "{", "1 2", "{\"a\"}", "\"\xff\"", "1e999", "NaN", "{'a':1}"}) {
    error_of(ErrorKind::kFormat, [&] { parse_json(text, "f"); });
  }
  EXPECT_LT(
      error_of(ErrorKind::kFormat, [] { parse_json("\"" + std::string(1'000'000, 'x'), "f"); })
          .size(),
      500U);
  EXPECT_THAT(error_of(ErrorKind::kFormat, [] { parse_json_object("[]", "f"); }),
              HasSubstr("found a JSON array, expected an object"));
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
  EXPECT_THAT(screen, AllOf(HasSubstr("info [rank 0] step 1 loss 2.5\n"),
                            HasSubstr("warning [rank 0] careful\n")));
  EXPECT_EQ(read_text_file(folder_ / "logs/rank_0.log", 4096), screen);
}

TEST_F(Log, OtherRanksShowErrorsOnly) {
  ::testing::internal::CaptureStderr();
  log::init({.rank = 1, .world_size = 2, .file = folder_ / "rank_1.log"});
  log::info("quiet {}");
  log::error("loud {}");  // braces are text, not a format
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("[rank 1] loud {}\n"), Not(HasSubstr("quiet"))));
  EXPECT_THAT(read_text_file(folder_ / "rank_1.log", 4096),
              AllOf(HasSubstr("quiet {}"), HasSubstr("loud {}")));
}

TEST_F(Log, WhatIsForTheFileAloneStaysOffTheScreen) {
  ::testing::internal::CaptureStderr();
  log::write_to_file(log::Level::kError, "without a file");
  log::init({.rank = 0, .world_size = 2, .file = folder_ / "rank_0.log"});
  log::write_to_file(log::Level::kError, "with one");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_THAT(read_text_file(folder_ / "rank_0.log", 4096), HasSubstr("[rank 0] with one\n"));
}

TEST_F(Log, UnwritableFileIsAnIoErrorAndKeepsTheEarlierSinks) {
  log::init({.rank = 0, .world_size = 1, .file = folder_ / "a.log"});
  folder_.write("b", "a file, not a folder");
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { log::init({.file = folder_ / "b/rank.log"}); }),
              HasSubstr("b/rank.log"));
  ::testing::internal::CaptureStderr();
  log::info("still");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("[rank")));
  EXPECT_THAT(read_text_file(folder_ / "a.log", 4096), HasSubstr("still"));
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
    EXPECT_THAT(line, ::testing::EndsWith("info <" + std::string(80, 'x') + ">"));
  }
  EXPECT_EQ(lines, 200);
}

}  // namespace
}  // namespace tessera::files_test
