// Fp8Tensors: shows a folder whose matrices are in blocks of eight bits as one that holds them in
// bfloat16.
//
// Published DeepSeek V3 folders have `X` [R, C] float8_e4m3fn and next to it `X_scale_inv`
// [ceil(R/r), ceil(C/c)] float32, one factor for each block of r x c elements (128 x 128). Here X
// is bfloat16, each element times the factor of its block in float32, rounded once, to nearest with
// halves to even; `X_scale_inv` is not shown. It is unpacked as it is read, some rows at a time.
// Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3; the layout as published
// with it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "io/tensor_source.h"

namespace tessera {

/// The elements of one factor along both dims.
struct Fp8Block {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool operator==(const Fp8Block&) const = default;
};

/// Returns the block that quantization_config of a config.json names: none where it names another
/// method, or is missing. Errors: kFormat, naming `where`, for a weight_block_size that is no pair
/// of sizes.
std::optional<Fp8Block> fp8_block(std::string_view config_text, std::string_view where);

class Fp8Tensors final : public TensorSource {
 public:
  /// Errors: kFormat naming the tensor for a factor without its matrix, a matrix without factors,
  /// shapes that do not belong together, dtypes other than float8_e4m3fn and float32.
  Fp8Tensors(std::shared_ptr<const TensorSource> packed, Fp8Block block);

  const std::filesystem::path& path() const override { return packed_->path(); }
  /// Tensors that are unpacked have SourceTensor::unpacked.
  const Tensors& tensors() const override { return tensors_; }
  /// Errors: also kFormat for an element that stands for NaN, or a product that bfloat16 cannot
  /// hold.
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override;
  std::vector<HashedFile> hashed_files() const override { return packed_->hashed_files(); }
  void verify(const HashedFile& file) const override { packed_->verify(file); }

 private:
  struct Shape {
    std::int64_t columns = 0;
    std::int64_t blocks_in_row = 0;
    std::int64_t blocks = 0;
  };
  void add(const std::string& name, const std::string& scales_name);
  const std::vector<float>& factors_of(const std::string& name, const Shape& shape) const;

  std::shared_ptr<const TensorSource> packed_;
  Fp8Block block_;
  Tensors tensors_;
  std::map<std::string, Shape, std::less<>> shapes_;  ///< by the name of X
  mutable std::string held_name_;                     ///< of X whose factors were read last
  mutable std::vector<float> held_;
};

}  // namespace tessera
