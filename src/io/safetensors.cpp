#include "io/safetensors.h"

#include "base/printable.h"
#include "tessera/error.h"

namespace tessera {

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path),
      header_(parse_safetensors_header(file_.bytes(), file_.size_bytes(), path.native())) {
  if (!header_.tensors.empty()) {  // nobody reads the header's text again
    file_.release(file_.bytes().first(static_cast<std::size_t>(header_.tensors.front().begin)));
  }
}

const TensorInfo& SafetensorsFile::info(std::string_view name) const {
  const TensorInfo* const tensor = header_.find(name);
  TESSERA_CHECK(tensor != nullptr, ErrorKind::kFormat, path().native(), ": found no tensor ",
                printable(name), " among its ", header_.tensors.size());
  return *tensor;
}

std::span<const std::byte> SafetensorsFile::bytes(std::string_view name) const {
  const TensorInfo& tensor = info(name);
  return file_.range(tensor.begin, tensor.size_bytes());
}

std::span<const std::byte> SafetensorsFile::range(std::string_view name, std::int64_t begin_element,
                                                  std::int64_t end_element) const {
  return range(info(name), begin_element, end_element);
}

std::span<const std::byte> SafetensorsFile::range(const TensorInfo& tensor,
                                                  std::int64_t begin_element,
                                                  std::int64_t end_element) const {
  TESSERA_CHECK(0 <= begin_element && begin_element <= end_element && end_element <= tensor.numel(),
                ErrorKind::kUsage, path().native(), ": elements [", begin_element, ", ",
                end_element, ") do not lie inside ", printable(tensor.name), " with ",
                tensor.numel(), " elements");
  const std::int64_t size = size_of(tensor.dtype);
  return file_.range(tensor.begin + begin_element * size, (end_element - begin_element) * size);
}

}  // namespace tessera
