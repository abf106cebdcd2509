// TensorSource: a model's tensors from any place (a Hugging Face folder, a checkpoint of a run),
// and ranges of boxes of them.
//
// Names are Hugging Face's, and bytes are copied out in ranges, so that a reader of a model need
// not know its files and never holds it whole. Implementations: hf_folder.h, checkpoint_folder.h,
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
  /// The dtype in which the tensor was published: for a checkpoint that of the folder with which
  /// training began, where there was one.
  DType original = DType::kFloat32;
  /// Whether the file holds its values in another form: then the dtype does not tell what was
  /// published.
  bool unpacked = false;
  /// The dtype in the file, where the values that are read are rounded to `dtype`.
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

  /// A file with weights whose hash is on record but not yet compared: verify() does that.
  struct HashedFile {
    std::string name;
    std::int64_t bytes = 0;
  };
  /// Returns none where the format has no hashes.
  virtual std::vector<HashedFile> hashed_files() const { return {}; }
  /// Reads the file through once. Errors: kFormat naming the file; kIo.
  virtual void verify(const HashedFile& /*file*/) const {}

  const SourceTensor* find(std::string_view name) const;  ///< nullptr where there is none

  /// Returns the floating dtype of most floating elements, as they were published (the narrower of
  /// two equals); none where no tensor is floating. Unpacked tensors do not count.
  std::optional<DType> bulk_dtype() const;

 protected:
  TensorSource() = default;
  TensorSource(const TensorSource&) = default;
  TensorSource& operator=(const TensorSource&) = default;
};

/// Returns the floating dtype that has most elements, the narrower of two equals.
std::optional<DType> bulk_dtype(const std::map<DType, std::int64_t>& elements);

/// Elements of a flattened box of a tensor.
struct RangeOfBox {
  std::span<const std::int64_t> shape;  ///< of the tensor
  std::int64_t element_bytes = 1;
  const TensorBox& box;
  layout::Range elements;
};

/// Copies them to `out`, which has exactly their bytes; `read(first, last, out)` copies elements of
/// the flattened tensor. Rows that are close together are read in one go, with the bytes between
/// them. Errors: those of `read`; kInternal for a box that is not inside the tensor.
void read_box(const RangeOfBox& wanted, std::span<std::byte> out,
              const std::function<void(std::int64_t, std::int64_t, std::span<std::byte>)>& read);

/// Copies the elements [begin, end) of the flattened box; `out` has exactly their bytes. Errors:
/// as TensorSource::read(); kInternal for a box that is not inside the tensor.
void read_box(const TensorSource& source, std::string_view name, const TensorBox& box,
              std::int64_t begin, std::int64_t end, std::span<std::byte> out);

}  // namespace tessera
