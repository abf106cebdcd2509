// Folders that appear complete or not at all, and files that no link may lead away from.
#include <gmock/gmock.h>

#include "io/atomic_file.h"
#include "io/folder.h"
#include "unit/io/temporary_folder.h"

namespace tessera::atomic_folder_test {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

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
    EXPECT_THAT(error_of(ErrorKind::kUsage, [&] { AtomicFolder{folder / name}; }), HasSubstr(name));
  }
  EXPECT_TRUE(fs::exists(folder / "full/mine.txt"));
  // Taken between the beginning and the end.
  AtomicFolder late(folder / "late");
  folder.write("late/other.txt", "other");
  error_of(ErrorKind::kIo, [&] { late.commit(); });
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
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { optional_file_inside(model, "other.txt"); }),
              HasSubstr("other.txt"));
  error_of(ErrorKind::kIo, [&] { optional_file_inside(model, "dangling.txt"); });
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { optional_file_inside(model, "folder"); }),
              HasSubstr("no plain file"));
}

TEST(FileInside, TheBlobsOfAHubCacheCountAsInside) {
  const TemporaryFolder folder;
  folder.write("models--x/blobs/123", "content");
  fs::create_directories(folder / "models--x/snapshots/main");
  fs::create_symlink("../../blobs/123", folder / "models--x/snapshots/main/tokenizer.json");
  EXPECT_TRUE(optional_file_inside(folder / "models--x/snapshots/main", "tokenizer.json"));
}

}  // namespace
}  // namespace tessera::atomic_folder_test
