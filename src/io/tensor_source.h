// A model's tensors wherever they lie: a Hugging Face folder, a checkpoint of a run; and ranges of
// boxes of them.
//
// Names are Hugging Face's, bytes are copied out in ranges, so that whoever reads a model needs not
// know its files and never holds it whole. Implementations: hf_folder.h, checkpoint_folder.h,
// unpacked/mxfp4_tensors.h, unpacked/fp8_tensors.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layout/range.h"
#include "layout/tensor_box.h"
#include "tessera/dtype.h"

namespace tessera {

struct SourceTensor {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  /// What the tensor was published as: of a checkpoint the dtype in the folder that training began
  /// with, where there was one.
  DType original = DType::kFloat32;
  /// Its values lie in another form in the file: the dtype says nothing of what is published.
  bool unpacked = false;
  /// The dtype in the file, where what is read of it is rounded to `dtype`.
  std::optional<DType> rounded_from = {};

  std::int64_t numel() const;
  bool operator==(const SourceTensor&) const = default;
};

class TensorSource {
 public:
  using Tensors = std::map<std::string, SourceTensor, std::less<>>;

  virtual ~TensorSource() = default;

  /// The folder that messages name.
  virtual const std::filesystem::path& path() const = 0;
  virtual const Tensors& tensors() const = 0;

  /// Copies the elements [begin, end) of the flattened tensor, in its dtype; `out` has exactly
  /// their bytes. Errors: kFormat for an unknown name, kUsage outside the tensor, kIo. Threads: one
  /// at a time.
  virtual void read(std::string_view name, std::int64_t begin, std::int64_t end,
                    std::span<std::byte> out) const = 0;

  /// A file with weights whose hash is on record, not yet compared: verify() does.
  struct HashedFile {
    std::string name;
    std::int64_t bytes = 0;
  };
  /// None where the format has no hashes.
  virtual std::vector<HashedFile> hashed_files() const { return {}; }
  /// Reads the file through once. Errors: kFormat naming the file; kIo.
  virtual void verify(const HashedFile& /*file*/) const {}

  const SourceTensor* find(std::string_view name) const;  ///< nullptr where there is none

  /// The floating dtype of most floating elements, as they were published (the narrower of two
  /// equals); none where no tensor is floating. Unpacked ones do not count.
  std::optional<DType> bulk_dtype() const;

 protected:
  TensorSource() = default;
  TensorSource(const TensorSource&) = default;
  TensorSource& operator=(const TensorSource&) = default;
};

/// The floating dtype that has most elements, the narrower of two equals.
std::optional<DType> bulk_dtype(const std::map<DType, std::int64_t>& elements);

/// Elements of a flattened box of a tensor.
struct RangeOfBox {
  std::span<const std::int64_t> shape;  ///< of the tensor
  std::int64_t element_bytes = 1;
  const TensorBox& box;
  layout::Range elements;
};

/// Copies them to `out`, which has exactly their bytes; `read(first, last, out)` copies elements of
/// the flattened tensor. Rows that lie close together are read in one go, with what stands between
/// them. Errors: those of `read`; kInternal for a box that is not inside the tensor.
void read_box(const RangeOfBox& wanted, std::span<std::byte> out,
              const std::function<void(std::int64_t, std::int64_t, std::span<std::byte>)>& read);

/// Copies the elements [begin, end) of the flattened box; `out` has exactly their bytes. Errors:
/// as TensorSource::read(); kInternal for a box that is not inside the tensor.
void read_box(const TensorSource& source, std::string_view name, const TensorBox& box,
              std::int64_t begin, std::int64_t end, std::span<std::byte> out);

}  // namespace tessera
