#include "train/hf/verify_export.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <set>

#include "base/text/printable.h"
#include "grad/torch_dtype.h"
#include "io/hf_folder.h"
#include "tessera/error.h"
#include "train/hf/weights.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

/// Adapters are one file without a model's config.
HfTensors written_tensors(const ExportPlan& plan, const fs::path& folder) {
  const bool model = plan.texts.contains("config.json");
  return HfTensors(model ? HfFolder::open(folder)
                         : HfFolder::of_file(folder / plan.shards.front().file));
}

/// Where two 1-D tensors of one dtype have other bits, per element.
at::Tensor differing(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& values) {
    return values.contiguous().view(at::kByte).view({values.numel(), -1});
  };
  return bytes(a).ne(bytes(b)).any(1);
}

struct Difference {
  std::int64_t count = 0;
  std::int64_t first = 0;  ///< element
  double found = 0.0;
  double expected = 0.0;
};

/// The difference of the written elements from those of the source, in the dtype that is written.
Difference difference(const ExportPlan& plan, const HfTensors& written, const TensorSpec& tensor,
                      std::optional<DType>& source) {
  Difference result;
  const std::int64_t numel = written.find(tensor.name)->numel();
  for (std::int64_t begin = 0; begin < numel; begin += kLoadChunk) {
    const std::int64_t end = std::min(begin + kLoadChunk, numel);
    const at::Tensor found = read_elements(written, tensor.name, begin, end);
    const at::Tensor values = plan.read(tensor.name, begin, end);
    source = to_dtype(values.scalar_type());
    const at::Tensor expected = values.to(found.scalar_type());
    const at::Tensor other = differing(found, expected).nonzero().flatten();
    if (other.numel() == 0) continue;
    if (result.count == 0) {
      const auto at = other[0].item<std::int64_t>();
      result.first = begin + at;
      result.found = found[at].item<double>();
      result.expected = expected[at].item<double>();
    }
    result.count += other.numel();
  }
  return result;
}

ComparedTensor compared(const ExportPlan& plan, const HfTensors& written,
                        const TensorSpec& tensor) {
  const SourceTensor* const found = written.find(tensor.name);
  if (found == nullptr) return {tensor.name, Comparison::kChanged, "missing in what was written"};
  if (found->shape != tensor.shape) {
    return {tensor.name, Comparison::kChanged,
            concat("found the shape ", shape_text(found->shape), ", expected ",
                   shape_text(tensor.shape))};
  }
  if (!is_floating(found->dtype) || is_float8(found->dtype)) {
    return {tensor.name, Comparison::kChanged,
            concat("found ", to_string(found->dtype), ", expected a floating dtype")};
  }
  if (plan.dtype && found->dtype != tensor.dtype) {
    return {tensor.name, Comparison::kChanged,
            concat("found ", to_string(found->dtype), ", expected the dtype ",
                   to_string(tensor.dtype), " that was asked for")};
  }
  std::optional<DType> source;
  const Difference other = difference(plan, written, tensor, source);
  if (other.count > 0) {
    return {tensor.name, Comparison::kChanged,
            concat(other.count, " of ", found->numel(), " elements, the first at ", other.first,
                   ": found ", other.found, ", expected ", other.expected)};
  }
  const auto rounded = plan.rounded_from.find(tensor.name);
  if (rounded != plan.rounded_from.end()) source = rounded->second;
  const std::string dtype(to_string(found->dtype));
  if (!source || *source == found->dtype) return {tensor.name, Comparison::kEqual, dtype};
  return {tensor.name, Comparison::kCast, concat(to_string(*source), " to ", dtype)};
}

}  // namespace

std::vector<ComparedTensor> compare_export(const ExportPlan& plan, const fs::path& folder) {
  const at::NoGradGuard no_grad;
  const HfTensors written = written_tensors(plan, folder);
  std::vector<ComparedTensor> result;
  std::set<std::string> expected;
  for (const HfShard& shard : plan.shards) {
    for (const TensorSpec& tensor : shard.tensors) {
      result.push_back(compared(plan, written, tensor));
      expected.insert(tensor.name);
    }
  }
  for (const auto& [name, tensor] : written.tensors()) {
    if (expected.contains(name)) continue;
    result.push_back({name, Comparison::kChanged, "not a tensor of the source"});
  }
  return result;
}

std::string_view to_string(Comparison comparison) {
  switch (comparison) {
    case Comparison::kEqual:
      return "equal";
    case Comparison::kCast:
      return "cast";
    case Comparison::kChanged:
      return "changed";
  }
  TESSERA_INVARIANT(false, "unknown comparison");
}

}  // namespace tessera::train
