// A library that is not there as a whole is refused before it is opened: generated files, each cut
// at places of its own.
#include "loader/library_file.h"

#include <elf.h>
#include <sys/stat.h>

#include <cstring>
#include <random>

#include "support/temporary_folder.h"
#include "support/test.h"

namespace tessera::loader {
namespace {
namespace fs = std::filesystem;

/// The bytes of a library as an ELF header sees them: the header, a table of segments, their
/// contents, a table of sections; drawn, the last two in either order.
struct Library {
  Elf64_Ehdr header{};
  std::vector<Elf64_Phdr> segments;
  std::size_t size = 0;

  explicit Library(std::mt19937& random) {
    std::memcpy(header.e_ident, ELFMAG, SELFMAG);
    header.e_ident[EI_CLASS] = ELFCLASS64;
    header.e_ident[EI_DATA] = ELFDATA2LSB;
    header.e_phoff = sizeof(header);
    header.e_phentsize = sizeof(Elf64_Phdr);
    segments.resize(1 + random() % 4);
    header.e_phnum = static_cast<Elf64_Half>(segments.size());
    header.e_shentsize = sizeof(Elf64_Shdr);
    header.e_shnum = static_cast<Elf64_Half>(random() % 5);
    size = sizeof(header) + segments.size() * sizeof(Elf64_Phdr);
    const bool sections_first = random() % 2 == 0;
    if (sections_first) add_sections();
    for (Elf64_Phdr& segment : segments) {
      segment.p_offset = size;
      segment.p_filesz = 1 + random() % 2000;
      segment.p_memsz = segment.p_filesz + random() % 2000;  // more than is in the file
      size += segment.p_filesz;
    }
    if (!sections_first) add_sections();
  }
  void add_sections() {
    header.e_shoff = header.e_shnum == 0 ? 0 : size;
    size += std::size_t{header.e_shnum} * sizeof(Elf64_Shdr);
  }
  std::string bytes() const {
    std::string all(reinterpret_cast<const char*>(&header), sizeof(header));
    all.append(reinterpret_cast<const char*>(segments.data()),
               segments.size() * sizeof(Elf64_Phdr));
    all.resize(size);
    return all;
  }
};

/// Property: a whole file is taken, also with more behind it; one that lacks bytes, if only the
/// last, is refused with both counts.
TEST(LibraryFile, IsTakenWholeAndRefusedCut) {
  std::mt19937 random(20261129);
  const TemporaryFolder folder;
  for (int number = 0; number < 100; ++number) {
    const Library library(random);
    const std::string bytes = library.bytes();
    EXPECT_NO_THROW(check_library(folder.write("lib.so", bytes)));
    EXPECT_NO_THROW(check_library(folder.write("lib.so", bytes + "more")));
    for (const std::size_t left :
         {bytes.size() - 1, bytes.size() / 2, 64 + random() % (bytes.size() - 64)}) {
      EXPECT_REFUSED(kIo, check_library(folder.write("lib.so", bytes.substr(0, left))), "lib.so",
                     concat("found ", left, " of "), " bytes, expected a whole copy",
                     "install it again");
    }
    EXPECT_REFUSED(kIo, check_library(folder.write("lib.so", bytes.substr(0, bytes.size() - 1))),
                   concat(" of ", bytes.size(), " bytes"));
  }
}

TEST(LibraryFile, TablesBeyondAnyFileAreRefused) {
  std::mt19937 random(1);
  const TemporaryFolder folder;
  for (const std::uint64_t far : {std::uint64_t{1} << 40U, ~std::uint64_t{0}, ~std::uint64_t{63}}) {
    Library library(random);
    const Elf64_Ehdr header = library.header;
    const auto refuse = [&] {
      EXPECT_REFUSED(kIo, check_library(folder.write("lib.so", library.bytes())), "found ", " of ");
    };
    library.header.e_phoff = far;
    refuse();
    library.header = header;
    library.header.e_shnum = 1;
    library.header.e_shoff = far;
    refuse();
    library.header = header;
    library.segments.back().p_offset = far;
    refuse();
  }
}

TEST(LibraryFile, WhatIsNoLibraryIsRefused) {
  const TemporaryFolder folder;
  std::string of_32_bits(100, '\0');
  std::memcpy(of_32_bits.data(), ELFMAG, SELFMAG);
  of_32_bits[EI_CLASS] = ELFCLASS32;
  for (const std::string& bytes : {std::string(),
                                   std::string("\x7f"
                                               "ELF"),
                                   std::string(63, 'x'), std::string(3000, 'x'), of_32_bits}) {
    EXPECT_REFUSED(kIo, check_library(folder.write("lib.so", bytes)),
                   concat("found ", bytes.size(), " bytes that are no library of this machine"),
                   "install it again");
  }
  ASSERT_EQ(::mkfifo((folder / "pipe.so").c_str(), 0600), 0);
  fs::create_directory(folder / "folder.so");
  for (const char* name : {"pipe.so", "folder.so"}) {
    EXPECT_REFUSED(kIo, check_library(folder / name), name, "expected a regular file",
                   "install it again");
  }
  EXPECT_REFUSED(kIo, check_library(folder / "none.so"), "none.so", "install it again");
}

TEST(LibraryFile, ThoseOfThisMachineAreWhole) { EXPECT_NO_THROW(check_library("/proc/self/exe")); }

}  // namespace
}  // namespace tessera::loader
