// Safetensors files: read in place, and written when their tensors are known before the first byte.
//
// The header is read and checked at open (safetensors_header.h); the data stays in the file until a
// range of it is accessed. Data is handed out as bytes: the format does not promise alignment, so
// callers copy out of a span instead of casting it.
//
// A writer is given names, dtypes and shapes first, so that the header and all offsets are fixed;
// then tensors arrive in any order, whole or in ranges, and are never held. The file has its name
// only after finish() (AtomicFile). One writer writes one file: ranks that write together each have
// their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mapped_file.h"
#include "io/atomic_file.h"
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

  /// Releases the pages of a view once it was copied out (MappedFile::release).
  void release(std::span<const std::byte> view) const { file_.release(view); }

 private:
  MappedFile file_;
  SafetensorsHeader header_;
};

struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
};

enum class TensorOrder {
  kAligned,  ///< by element size, largest first, then by name: every tensor is aligned to its
             ///< element
  kGiven,
};

/// A file without its data, for callers that hold all of it and write it in one go.
struct SafetensorsLayout {
  SafetensorsHeader header;  ///< offsets and names as a reader of the file will see them
  std::string beginning;     ///< the bytes before the data
  std::int64_t file_bytes = 0;
};
/// Errors: as the constructor of SafetensorsWriter.
SafetensorsLayout lay_out_safetensors(std::vector<TensorSpec> tensors,
                                      const std::map<std::string, std::string>& metadata = {},
                                      TensorOrder order = TensorOrder::kAligned);

class SafetensorsWriter {
 public:
  /// Writes the header. Errors: kUsage for a name twice, "__metadata__", text that is not UTF-8, a
  /// negative or overflowing shape; kIo.
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {},
                    TensorOrder order = TensorOrder::kAligned);

  /// Offsets and names as a reader of the finished file will see them.
  const SafetensorsHeader& header() const { return header_; }

  /// Errors: kUsage for an unknown name or a size that is not the tensor's; kIo.
  void write(std::string_view name, std::span<const std::byte> bytes);

  /// Elements [begin_element, begin_element + bytes / element size). Errors: as write(). Threads:
  /// one.
  void write_range(std::string_view name, std::int64_t begin_element,
                   std::span<const std::byte> bytes);

  /// Gives the file its name. Errors: kUsage where an element was not written exactly once; kIo.
  void finish();

 private:
  SafetensorsWriter(const std::filesystem::path& path, SafetensorsLayout layout);
  using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

  SafetensorsHeader header_;
  std::vector<Ranges>
      written_;  // bytes of each tensor; a range that continues the last one joins it
  AtomicFile file_;
};

}  // namespace tessera
