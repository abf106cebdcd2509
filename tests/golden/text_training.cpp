#include "golden/text_training.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "golden/layouts.h"
#include "io/safetensors.h"
#include "support/test.h"

namespace tessera::golden {
namespace {

/// Between two losses: the sum of the token losses is rounded to fp32, the mean is of that.
double resolution(double loss, std::int64_t tokens) {
  const auto labels = static_cast<double>(kTextRows * (tokens - 1));
  const auto sum = static_cast<float>(loss * labels);
  return static_cast<double>(std::nextafter(sum, std::numeric_limits<float>::infinity()) - sum) /
         labels;
}

}  // namespace

StoredTensor stored(const std::string& name, const at::Tensor& values) {
  const at::Tensor whole = values.contiguous();
  const auto* data = static_cast<const std::byte*>(whole.const_data_ptr());
  const DType dtype = whole.scalar_type() == at::kLong ? DType::kInt64 : DType::kFloat32;
  return {{name, dtype, whole.sizes().vec()}, {data, data + whole.nbytes()}};
}

std::vector<StoredTensor> moved_by_one_ulp(std::vector<StoredTensor> tensors, unsigned seed) {
  std::mt19937_64 random(seed);
  constexpr float kFar = std::numeric_limits<float>::infinity();
  for (StoredTensor& tensor : tensors) {
    if (tensor.spec.dtype != DType::kFloat32) continue;
    for (std::size_t at = 0; at < tensor.bytes.size(); at += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, tensor.bytes.data() + at, sizeof value);
      const auto way = random() % 3;
      if (way != 0) value = std::nextafter(value, way == 1 ? kFar : -kFar);
      std::memcpy(tensor.bytes.data() + at, &value, sizeof value);
    }
  }
  return tensors;
}

std::string text_batches(std::int64_t tokens, std::int64_t vocabulary) {
  const std::string text = read_file(data_folder("emma.txt"));
  const std::int64_t size = kTextSteps * kTextRows * tokens;
  EXPECT_GE(std::ssize(text), size);
  const std::vector<std::uint8_t> bytes(text.begin(), text.begin() + size);
  const at::Tensor ids = at::tensor(at::ArrayRef<std::uint8_t>(bytes), at::kLong)
                             .remainder(vocabulary)
                             .view({kTextSteps, kTextRows, tokens});
  std::vector<StoredTensor> tensors;
  for (const char* name : {"input_ids", "labels"}) {
    tensors.push_back(stored(name, ids[0]));
    tensors.push_back(stored(concat("steps/", name), ids));
  }
  std::vector<TensorSpec> specs;
  for (const StoredTensor& tensor : tensors) specs.push_back(tensor.spec);
  const auto path = temporary_path("emma.safetensors");
  SafetensorsWriter writer(path, specs);
  for (const StoredTensor& tensor : tensors) writer.write(tensor.spec.name, tensor.bytes);
  writer.finish();
  return path.string();
}

Spread::Spread(std::vector<double> losses, std::int64_t tokens)
    : tokens_(tokens), losses_(std::move(losses)), lowest_(losses_), highest_(losses_) {
  EXPECT_EQ(std::ssize(losses_), kTextSteps);
  EXPECT_LT(losses_.back(), losses_.front() - 1.0) << "it learns";
}

void Spread::add(const std::vector<double>& losses) {
  ASSERT_EQ(losses.size(), losses_.size());
  for (std::size_t i = 0; i < losses.size(); ++i) {
    lowest_[i] = std::min(lowest_[i], losses[i]);
    highest_[i] = std::max(highest_[i], losses[i]);
  }
}

double Spread::distance(const std::vector<double>& losses) const {
  EXPECT_EQ(losses.size(), losses_.size());
  double spread = 0;
  double furthest = 0;
  for (std::size_t i = 0; i < std::min(losses.size(), losses_.size()); ++i) {
    spread = std::max({spread, highest_[i] - lowest_[i], resolution(losses_[i], tokens_)});
    furthest = std::max(furthest, std::abs(losses[i] - losses_[i]) / spread);
  }
  return furthest;
}

}  // namespace tessera::golden
