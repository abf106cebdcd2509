#include "unit/models/reference.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <cstring>
#include <filesystem>

#include "nn/parameter.h"
#include "support/tensors.h"
#include "support/test.h"

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

/// After the two leaves got data of their own.
void tie_again(at::Tensor& head, const at::Tensor& owner) {
  head.set_data(head.to(owner.scalar_type()));
  nn::tie(head, owner);
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

at::Tensor Reference::stored(const std::string& name) const {
  return read_tensor(folder_.file(folder_.tensors().at(name).file), name);
}

at::Tensor Reference::stored(const ParameterSpec& row) const {
  if (row.stacked.empty()) return stored(row.name);
  std::vector<at::Tensor> parts;
  for (const std::string& name : row.stacked) {
    parts.push_back(stored(name));
    TESSERA_CHECK(parts.back().sizes() == at::IntArrayRef(row.stacked_shape), ErrorKind::kFormat,
                  name, ": found ", parts.back().sizes());
  }
  return at::stack(parts).view(row.shape);
}

std::vector<std::string> Reference::gradient_names() const {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : results_.header().tensors) {
    if (tensor.name.starts_with("grad/")) names.push_back(tensor.name.substr(5));
  }
  return names;
}

void Reference::load(const torch::nn::Module& model, Compute compute) const {
  nn::materialize(model);
  const bool bulk_is_wide = folder_.bulk_dtype() == DType::kFloat32;
  auto parameters = model.named_parameters();
  for (const ParameterSpec& row : describe(spec_).parameters) {
    if (!row.tied_to.empty()) continue;
    const at::Tensor values = stored(row);
    const bool wide =
        compute == Compute::kFloat32 || (values.scalar_type() == at::kFloat && !bulk_is_wide);
    parameters[row.name].set_data(values.to(wide ? at::kFloat : at::kBFloat16));
  }
  for (auto& item : model.named_buffers()) item.value().set_data(stored(item.key()));
}

std::shared_ptr<Decoder> Reference::model(Compute compute) const {
  auto decoder = std::make_shared<Decoder>(spec_);
  load(*decoder, compute);
  if (spec_.tie_word_embeddings) {
    tie_again(decoder->head().module()->lm_head()->weight, decoder->embedding().module()->weight);
  }
  return decoder;
}

std::shared_ptr<Gemma4Model> Reference::gemma4(Compute compute) const {
  auto model = std::make_shared<Gemma4Model>(spec_);
  load(*model, compute);
  tie_again(model->head().module()->lm_head()->weight, model->embedding().module()->weight);
  for (auto& item : model->named_parameters()) {
    if (item.key().starts_with("model.vision_tower.")) item.value().set_requires_grad(false);
  }
  return model;
}

std::shared_ptr<LanguageModel> Reference::gpt2(Compute compute) const {
  auto model = make_language_model(spec_);
  load(*model, compute);
  auto parameters = model->named_parameters();
  tie_again(parameters["lm_head.weight"], parameters["wte.weight"]);
  return model;
}

std::shared_ptr<LanguageModel> Reference::text_model(Compute compute) const {
  if (spec_.family == Family::kGpt2) return gpt2(compute);
  return model(compute);
}

std::map<std::string, at::Tensor> gradients(const torch::nn::Module& model, const ModelSpec& spec) {
  std::map<std::string, at::Tensor> result;
  for (auto& item : model.named_parameters()) {
    if (!item.value().requires_grad()) continue;
    result[item.key()] = item.value().grad().to(at::kFloat);
  }
  for (const ParameterSpec& row : describe(spec).parameters) {
    if (row.stacked.empty()) continue;
    std::vector<std::int64_t> shape = row.stacked_shape;
    shape.insert(shape.begin(), static_cast<std::int64_t>(row.stacked.size()));
    const at::Tensor parts = result.at(row.name).view(shape);
    result.erase(row.name);
    for (std::size_t i = 0; i < row.stacked.size(); ++i) {
      result[row.stacked[i]] = parts.select(0, static_cast<std::int64_t>(i));
    }
  }
  if (spec.tie_word_embeddings) {
    const std::string name = spec.family == Family::kGemma4
                                 ? "model.language_model.embed_tokens.weight"
                             : spec.family == Family::kGpt2 ? "wte.weight"
                                                            : "model.embed_tokens.weight";
    at::Tensor& owner = result.at(name);
    owner = owner + result.at("lm_head.weight");
    result.erase("lm_head.weight");
  }
  return result;
}

double largest(const at::Tensor& difference) { return difference.abs().max().item<double>(); }

void expect_gradients(const torch::nn::Module& model, const Reference& reference, double bound) {
  const auto found = gradients(model, reference.spec());
  EXPECT_EQ(found.size(), reference.gradient_names().size());
  for (const auto& [name, gradient] : found) {
    const at::Tensor expected = reference.result("grad/" + name);
    ASSERT_EQ(gradient.sizes(), expected.sizes()) << name;
    EXPECT_LT(test::relative_error(gradient, expected), bound) << name;
  }
}

void expect_directions(const torch::nn::Module& model, const Reference& reference, double bound) {
  for (const auto& [name, gradient] : gradients(model, reference.spec())) {
    const at::Tensor expected = reference.result("grad/" + name);
    const auto cosine = (gradient * expected).sum() / (gradient.norm() * expected.norm());
    EXPECT_LT(1 - cosine.item<double>(), test::direction_bound(name, bound)) << name;
  }
}

}  // namespace tessera::models
