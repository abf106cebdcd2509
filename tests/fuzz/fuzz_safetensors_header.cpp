// Input: a whole safetensors file, or its beginning.
#include <algorithm>
#include <span>

#include "fuzz/hostile_input.h"
#include "io/safetensors_header.h"

namespace {

using tessera::SafetensorsHeader;
using tessera::TensorInfo;
using tessera::fuzz::require;

void check(const SafetensorsHeader& header, std::int64_t file_size) {
  std::int64_t at = header.tensors.empty() ? file_size : header.tensors.front().begin;
  for (const TensorInfo& tensor : header.tensors) {
    require(tensor.begin == at && tensor.end >= at, "tensors lie one after the other");
    require(tensor.numel() * size_of(tensor.dtype) == tensor.size_bytes(), "whole elements");
    std::int64_t numel = 1;
    for (const std::int64_t dim : tensor.shape) numel *= dim;
    require(numel == tensor.numel(), "the shape's elements");
    require(header.find(tensor.name) == &tensor, "found by its name");
    at = tensor.end;
  }
  require(at == file_size, "tensors end with the file");
  require(header.by_name.size() == header.tensors.size(), "unique names");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto parse = [&](std::int64_t file_size) {
    tessera::fuzz::value_or_error(tessera::ErrorKind::kFormat, [&] {
      check(tessera::parse_safetensors_header(bytes, file_size, "x"), file_size);
    });
  };
  parse(static_cast<std::int64_t>(size));
  // Data that is not there, so that large tensors are reached with small inputs; the size is drawn
  // from the input's own end.
  std::int64_t claimed = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(size, 7); ++i) {
    claimed = (claimed << 8) | data[size - 1 - i];
  }
  parse(static_cast<std::int64_t>(size) + claimed);
  return 0;
}
