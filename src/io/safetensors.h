// A safetensors file that is read in place.
//
// The header is read and checked at open (safetensors_header.h); the data stays in the file until a
// range of it is touched. Bytes are handed out as bytes: the format does not promise alignment, so
// callers copy out of a span instead of casting it. Writing: safetensors_writer.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "base/mapped_file.h"
#include "io/safetensors_header.h"

namespace tessera {

class SafetensorsFile {
 public:
  /// Errors: kIo where it cannot be read, kFormat where it is malformed.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const SafetensorsHeader& header() const { return header_; }

  /// Errors: kFormat where the file has no such tensor.
  const TensorInfo& info(std::string_view name) const;

  /// Views the whole tensor. Errors: as info().
  std::span<const std::byte> bytes(std::string_view name) const;

  /// Views the elements [begin, end) in row-major order. Errors: as info(); kUsage outside the
  /// tensor.
  std::span<const std::byte> range(std::string_view name, std::int64_t begin_element,
                                   std::int64_t end_element) const;
  std::span<const std::byte> range(const TensorInfo& tensor, std::int64_t begin_element,
                                   std::int64_t end_element) const;

  /// Gives the pages of a view back once it was copied out (MappedFile::release).
  void release(std::span<const std::byte> view) const { file_.release(view); }

 private:
  MappedFile file_;
  SafetensorsHeader header_;
};

}  // namespace tessera
