#include "loader/library_file.h"

#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::loader {
namespace {

constexpr const char* kExpected = ", expected a whole copy of the library; install it again";

std::uint64_t end_of(std::uint64_t offset, std::uint64_t bytes) {
  constexpr auto kMost = std::numeric_limits<std::uint64_t>::max();
  return offset > kMost - bytes ? kMost : offset + bytes;
}

bool is_of_this_machine(const Elf64_Ehdr& header) {
  return std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 &&
         header.e_ident[EI_CLASS] == ELFCLASS64 && header.e_ident[EI_DATA] == ELFDATA2LSB &&
         header.e_phentsize == sizeof(Elf64_Phdr);
}

/// Returns the bytes that a whole file with this header has.
std::uint64_t whole_bytes(const InputFile& file, const Elf64_Ehdr& header) {
  const std::uint64_t segments_end = end_of(header.e_phoff, header.e_phnum * sizeof(Elf64_Phdr));
  std::uint64_t whole = std::max(
      segments_end,
      end_of(header.e_shoff, std::uint64_t{header.e_shnum} * std::uint64_t{header.e_shentsize}));
  if (segments_end > static_cast<std::uint64_t>(file.size_bytes())) return whole;
  std::vector<Elf64_Phdr> segments(header.e_phnum);
  file.read_range(static_cast<std::int64_t>(header.e_phoff),
                  std::as_writable_bytes(std::span(segments)));
  for (const Elf64_Phdr& segment : segments) {
    whole = std::max(whole, end_of(segment.p_offset, segment.p_filesz));
  }
  return whole;
}

InputFile opened(const std::filesystem::path& path) {
  try {
    return InputFile(path);
  } catch (const Error& error) {
    throw Error(ErrorKind::kIo, concat(error.what(), "; install it again"));
  }
}

}  // namespace

void check_library(const std::filesystem::path& path) {
  const InputFile file = opened(path);
  const auto size = static_cast<std::uint64_t>(file.size_bytes());
  Elf64_Ehdr header{};
  if (size >= sizeof(header)) file.read_range(0, std::as_writable_bytes(std::span(&header, 1)));
  TESSERA_CHECK(is_of_this_machine(header), ErrorKind::kIo, shown(path), ": found ", size,
                " bytes that are no library of this machine", kExpected);
  const std::uint64_t whole = whole_bytes(file, header);
  TESSERA_CHECK(whole <= size, ErrorKind::kIo, shown(path), ": found ", size, " of ", whole,
                " bytes", kExpected);
}

}  // namespace tessera::loader
