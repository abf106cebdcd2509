// What paths and patterns mean.
#include "train/data/data_files.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <string>

#include "unit/io/temporary_folder.h"

namespace tessera::train::data_files_test {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

TEST(DataFiles, APatternIsItsMatchesInTheOrderOfTheirNames) {
  const TemporaryFolder folder;
  for (const std::string name : {"s_2.bin", "s_10.bin", "s_1.bin", "s_1.mask.bin", "s_1.labels.bin",
                                 "s_1.docs.bin", "s_1.json", "t.json", "Z.bin"}) {
    folder.write(name, "x");
  }
  const auto in = [&](const std::string& name) { return (folder / name).string(); };
  EXPECT_THAT(files_of({in("s_*.bin")}, "data.path"),
              ElementsAre(in("s_1.bin"), in("s_10.bin"), in("s_2.bin")));
  EXPECT_THAT(files_of({in("s_?.bin"), in("t.json")}, "data.path"),
              ElementsAre(in("s_1.bin"), in("s_2.bin"), in("t.json")));
  EXPECT_THAT(files_of({in("*")}, "data.path"),
              ElementsAre(in("Z.bin"), in("s_1.bin"), in("s_10.bin"), in("s_2.bin"), in("t.json")))
      << "what describes a NAME.bin is no data";
  EXPECT_THAT(files_of({in("s_[12].bin")}, "data.path"), ElementsAre(in("s_1.bin"), in("s_2.bin")));
}

TEST(DataFiles, ANameThatIsThereIsNoPattern) {
  const TemporaryFolder folder;
  const auto named = folder.write("a[1].txt", "x").string();
  folder.write("a1.txt", "x");
  EXPECT_THAT(files_of({named}, "data.path"), ElementsAre(named));
}

TEST(DataFiles, APatternWithoutAMatchIsRefused) {
  const TemporaryFolder folder;
  Config config;
  config.data.source = {{{"absent.txt"}, 1.0}, {{(folder / "*.bin").string()}, 1.0}};
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { with_files(config); }),
              ::testing::AllOf(HasSubstr("data.source[2].path: found no file that matches"),
                               HasSubstr("*.bin")));
  config.data.source.pop_back();
  config.validation.path = {(folder / "held?").string()};
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { with_files(config); }),
              HasSubstr("validation.path: found no file"));
}

// Instead of files that nobody misses: of a folder without permission too, which root would read.
TEST(DataFiles, AFolderThatCannotBeListedIsRefused) {
  const TemporaryFolder folder;
  std::filesystem::create_symlink("loop", folder / "loop");
  const auto pattern = (folder / "loop/*.bin").string();
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { files_of({pattern}, "data.path"); }),
              ::testing::AllOf(HasSubstr("data.path: cannot list"), HasSubstr("loop/*.bin"),
                               HasSubstr("symbolic links")));
  folder.write("file", "x");
  for (const std::string name : {"nowhere/*", "file/*"}) {
    const auto absent = (folder / name).string();
    EXPECT_THAT(error_of(ErrorKind::kIo, [&] { files_of({absent}, "data.path"); }),
                HasSubstr("found no file that matches"));
  }
}

}  // namespace
}  // namespace tessera::train::data_files_test
