#include "unit/models/reference.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <filesystem>
#include <map>

#include "nn/parameter.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kInt64:
      return at::kLong;
    default:
      throw Error(ErrorKind::kFormat, concat("reference data: found ", to_string(dtype)));
  }
}

std::filesystem::path folder(const std::string& name) {
  return std::filesystem::path(TESSERA_TEST_DATA) / name;
}

}  // namespace

at::Tensor read_tensor(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo& info = file.info(name);
  const auto bytes = file.bytes(name);
  at::Tensor tensor = at::empty(info.shape, scalar_type(info.dtype));
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

Reference::Reference(const std::string& name)
    : folder_(HfFolder::open(folder(name))),
      results_(folder(name) / "reference.safetensors"),
      spec_(parse_spec(folder_.config_text()).spec) {}

std::shared_ptr<Decoder> Reference::model(Compute compute) const {
  auto decoder = std::make_shared<Decoder>(spec_);
  nn::materialize(*decoder);
  const bool bulk_is_wide = folder_.bulk_dtype() == DType::kFloat32;
  for (auto& item : decoder->named_parameters()) {
    const auto* info = folder_.find(item.key());
    if (info == nullptr) continue;  // a tied head
    const at::Tensor stored =
        read_tensor(folder_.file(folder_.tensors().at(item.key()).file), item.key());
    const bool wide =
        compute == Compute::kFloat32 || (info->dtype == DType::kFloat32 && !bulk_is_wide);
    item.value().set_data(stored.to(wide ? at::kFloat : at::kBFloat16));
  }
  if (spec_.tie_word_embeddings) {
    at::Tensor& head = decoder->head().module()->lm_head()->weight;
    const at::Tensor& owner = decoder->embedding().module()->weight;
    head.set_data(head.to(owner.scalar_type()));
    nn::tie(head, owner);
  }
  return decoder;
}

std::map<std::string, at::Tensor> gradients(Decoder& model) {
  std::map<std::string, at::Tensor> result;
  for (auto& item : model.named_parameters()) {
    result[item.key()] = item.value().grad().to(at::kFloat);
  }
  if (model.spec().tie_word_embeddings) {
    result["model.embed_tokens.weight"] =
        result["model.embed_tokens.weight"] + result["lm_head.weight"];
    result.erase("lm_head.weight");
  }
  return result;
}

}  // namespace tessera::models
