#include <gmock/gmock.h>

#include "io/folder.h"
#include "unit/io/temporary_folder.h"

namespace tessera::made_paths_test {
namespace {

namespace fs = std::filesystem;
using testing::TemporaryFolder;

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

}  // namespace
}  // namespace tessera::made_paths_test
