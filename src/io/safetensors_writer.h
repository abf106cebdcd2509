// Writes a safetensors file whose tensors are known before the first byte.
//
// Names, dtypes and shapes are given first, so that the header and all offsets are fixed; then
// tensors arrive in any order, whole or in ranges, and are never held. The file has its name only
// after finish() (AtomicFile). One writer writes one file: ranks that write together each have
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

#include "io/atomic_file.h"
#include "io/safetensors_header.h"

namespace tessera {

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

/// A file without its data: for who holds all of it and writes it in one go.
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

  /// Gives the file its name. Errors: kUsage where an element was written not once; kIo.
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
