#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <thread>

#include "io/folder.h"
#include "unit/io/temporary_folder.h"

namespace tessera::folder_lock_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

std::string error_of(const std::filesystem::path& folder, ErrorKind kind) {
  try {
    const FolderLock lock(folder, milliseconds(0), "take another");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    return error.what();
  }
  return "";
}

TEST(FolderLock, IsRefusedWhileItIsHeldAndNamesTheHolder) {
  const TemporaryFolder folder;
  {
    const FolderLock first(folder.path(), milliseconds(0), "");
    EXPECT_THAT(error_of(folder.path(), ErrorKind::kConfig),
                AllOf(HasSubstr(folder.path().native()),
                      HasSubstr("process " + std::to_string(::getpid()) + " on "),
                      HasSubstr("take another")));
  }
  EXPECT_EQ(error_of(folder.path(), ErrorKind::kConfig), "") << "free again";
}

TEST(FolderLock, MovesWithItsOwner) {
  const TemporaryFolder folder;
  FolderLock first(folder.path(), milliseconds(0), "");
  const FolderLock second(std::move(first));
  EXPECT_NE(error_of(folder.path(), ErrorKind::kConfig), "");
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
  EXPECT_THAT(error_of(folder.path(), ErrorKind::kConfig),
              HasSubstr("process " + std::to_string(child)));
  // Whoever waits takes it as soon as the holder is gone.
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
    EXPECT_NE(error_of(folder.path(), ErrorKind::kConfig), "") << "of the file that others open";
  });
  while (descriptors_of(lock_file(folder.path())) < 2) std::this_thread::yield();
  std::filesystem::remove(lock_file(folder.path()));
  first.reset();
  waiting.join();
}

TEST(FolderLock, AFolderThatIsNotThereAndALinkAreErrorsThatNameTheFile) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of(folder / "absent", ErrorKind::kIo), HasSubstr("absent/.lock"));
  folder.write("precious", "text");
  std::filesystem::create_symlink(folder / "precious", folder / ".lock");
  EXPECT_THAT(error_of(folder.path(), ErrorKind::kIo),
              HasSubstr(".lock': found a symbolic link, expected a regular file"));
  std::ifstream file(folder / "precious");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "text");
}

}  // namespace
}  // namespace tessera::folder_lock_test
