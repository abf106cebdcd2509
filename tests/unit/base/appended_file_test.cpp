// Files that a run appends to: what is there stays, and no link is followed.
#include "base/appended_file.h"

#include <sys/stat.h>

#include "base/log.h"
#include "support/temporary_folder.h"

namespace tessera::appended_file_test {
namespace {

namespace fs = std::filesystem;
using From = AppendedFile::From;

TEST(AppendedFile, ContinuesAtTheEndOrStartsAgain) {
  const TemporaryFolder folder;
  const auto path = folder / "lines";
  AppendedFile(path, From::kNothing).append("a\n");
  AppendedFile(path, From::kEnd).append("b\n");
  EXPECT_EQ(read_file(path), "a\nb\n");
  AppendedFile(path, From::kEmpty).append("c\n");
  EXPECT_EQ(read_file(path), "c\n");
  EXPECT_REFUSED(kIo, AppendedFile(path, From::kNothing),
                 "cannot be opened for writing (File exists)");
}

TEST(AppendedFile, ALinkOrAPipeIsRefusedByName) {
  const TemporaryFolder folder;
  folder.write("target", "kept");
  fs::create_symlink(folder / "target", folder / "link");
  fs::create_symlink(folder / "nothing", folder / "dangling");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const auto from : {From::kEmpty, From::kEnd, From::kNothing}) {
    for (const char* name : {"link", "dangling"}) {
      EXPECT_REFUSED(kIo, AppendedFile(folder / name, from),
                     std::string(name) + "': found a symbolic link, expected");
    }
    EXPECT_REFUSED(kIo, AppendedFile(folder / "pipe", from),
                   "pipe': found something that is no regular file");
  }
  EXPECT_EQ(read_file(folder / "target"), "kept");
  EXPECT_FALSE(fs::exists(folder / "nothing"));
}

TEST(ReadNoLink, GivesTheBytesOfAFileAndOfNothingElse) {
  const TemporaryFolder folder;
  const std::string bytes(100000, 'x');
  folder.write("file", bytes);
  fs::create_symlink(folder / "file", folder / "link");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(read_no_link(folder / "file"), bytes);
  EXPECT_EQ(read_no_link(folder / "none"), "");
  EXPECT_REFUSED(kIo, read_no_link(folder / "link"), "link': found a symbolic link, expected");
  EXPECT_REFUSED(kIo, read_no_link(folder / "pipe"),
                 "pipe': found something that is no regular file");
}

// Naive: the log of a rank is written to the target of any link in an old run folder.
TEST(AppendedFile, ALogThroughALinkIsRefused) {
  const TemporaryFolder folder;
  folder.write("target", "kept");
  fs::create_directories(folder / "logs");
  fs::create_symlink(folder / "target", folder / "logs/rank_0.log");
  const auto message =
      error_of(ErrorKind::kIo, [&] { log::init({.file = folder / "logs/rank_0.log"}); });
  EXPECT_THAT(message, Says("rank_0.log': found a symbolic link, expected a regular file"));
  EXPECT_EQ(message.find("rank_0.log"), message.rfind("rank_0.log")) << message;
  EXPECT_EQ(read_file(folder / "target"), "kept");
}

}  // namespace
}  // namespace tessera::appended_file_test
