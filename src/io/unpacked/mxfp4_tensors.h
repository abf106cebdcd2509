// Mxfp4Tensors: shows a folder whose experts are packed in MXFP4 as one that holds them in
// bfloat16.
//
// Published gpt-oss folders have `X_blocks` [E, R, G, 16] uint8 and `X_scales` [E, R, G] uint8 in
// place of `X` [E, 32 G, R]. Each of the G blocks of a row is 32 values of four bits (e2m1, the low
// nibble of a byte before the high one) times 2^(scale - 127): values that bfloat16 holds exactly.
// Here X is shown and the other two are not; it is unpacked as it is read, one expert at a time.
// Source: OCP Microscaling Formats (MX) 1.0; the layout as transformers reads it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/tensor_source.h"

namespace tessera {

/// Whether a config.json says that weights are in MXFP4. Errors: kFormat, naming `where`.
bool says_mxfp4(std::string_view config_text, std::string_view where);

class Mxfp4Tensors final : public TensorSource {
 public:
  /// Errors: kFormat naming the tensor for blocks without scales or the other way round, shapes
  /// that do not belong together, another dtype than uint8, an X that is there too.
  explicit Mxfp4Tensors(std::shared_ptr<const TensorSource> packed);

  const std::filesystem::path& path() const override { return packed_->path(); }
  /// Tensors that are unpacked have SourceTensor::unpacked.
  const Tensors& tensors() const override { return tensors_; }
  /// Errors: also kFormat for a scale whose values bfloat16 cannot hold, or that stands for NaN.
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override;
  std::vector<HashedFile> hashed_files() const override { return packed_->hashed_files(); }
  void verify(const HashedFile& file) const override { packed_->verify(file); }

 private:
  struct Shape {
    std::int64_t rows = 0;
    std::int64_t groups = 0;  ///< of 32 values in a row
    std::int64_t numel() const { return rows * groups * 32; }
  };
  void add(const std::string& name);
  void unpack(const std::string& name, const Shape& shape, std::int64_t expert) const;

  std::shared_ptr<const TensorSource> packed_;
  Tensors tensors_;
  std::map<std::string, Shape, std::less<>> shapes_;  ///< of an expert, by the name of X
  /// The expert that was read last, [32 G, R] in bfloat16.
  mutable std::string held_name_;
  mutable std::int64_t held_expert_ = -1;
  mutable std::vector<std::uint16_t> held_;
};

}  // namespace tessera
