#include "models/language_model.h"

#include "grad/leaf.h"
#include "models/context/context_inputs.h"
#include "models/moe_layer.h"
#include "moe/routing.h"
#include "nn/embedding.h"
#include "nn/loss.h"
#include "tessera/contract.h"
#include "tessera/error.h"

namespace tessera::models {

bool LanguageModel::is_whole() const {
  return stages() == StagesOfRank{{true, {0, spec().num_hidden_layers}, true}};
}

std::shared_ptr<const nn::ContextRows> LanguageModel::context_rows(
    const ModelInputs& inputs) const {
  return models::context_rows(inputs, context());
}

void LanguageModel::check_values(const ModelInputs& inputs) const {
  const std::int64_t vocabulary = spec().vocab_size;
  nn::check_range(inputs.input_ids, vocabulary, std::nullopt, "embedding: found the token ");
  if (inputs.targets) {
    nn::check_range(*inputs.targets, vocabulary, nn::kIgnoredLabel, "loss: found the label ");
  }
  if (inputs.documents.are_packed()) {
    nn::check_documents(inputs.documents.starts, inputs.input_ids);
  }
  const std::int64_t experts = routed_experts(spec()).experts;
  for (const at::Tensor& indices : inputs.imposed_routing) moe::check_imposed(indices, experts);
  check_own_values(inputs);
}

namespace {

std::shared_ptr<LanguageModel> make_of_family(const ModelSpec& spec, const ModelAxes& axes) {
  switch (spec.family) {
#define TESSERA_FAMILY(enumerator, folder, build) \
  case Family::enumerator:                        \
    return build_##build(spec, axes);
#include "models/families.def"
  }
  TESSERA_INVARIANT(false, "a family that is not listed");
}

}  // namespace

void require_whole(const torch::nn::Module& model) {
  for (const auto& parameter : model.named_parameters()) {
    const auto leaf = grad::find_leaf(parameter.value());
    if (leaf == nullptr) continue;
    const GradContract* contract = leaf->contract;
    TESSERA_CHECK(
        contract != nullptr && contract->replicated() && contract->local_shape() == contract->shape,
        ErrorKind::kUsage, "decode: found the parameter ", parameter.key(), " sharded",
        contract == nullptr ? " by a handle that is gone" : "",
        ", expected a whole model: a plain one, or one whose parameters are all frozen and whole "
        "on every rank (frozen = \"replicate\")");
  }
}

std::shared_ptr<LanguageModel> make_language_model(const ModelSpec& spec, const ModelAxes& axes) {
  auto model = make_of_family(spec, axes);
  for (const auto& item : model->named_modules("", /*include_self=*/false)) {
    if (auto* experts = dynamic_cast<ExpertBank*>(item.value().get()))
      experts->set_name(item.key());
  }
  return model;
}

}  // namespace tessera::models
