// Gemma 4 with images: a frozen vision tower, a projector, and a text model whose layers slide or
// see everything, with a mixture of experts beside each dense MLP.
#include "models/family.h"
#include "models/gemma4/gemma4_config.h"

namespace tessera::models {
namespace {

std::vector<std::int64_t> heads_of_layers(const ModelSpec& spec) {
  std::vector<std::int64_t> heads;
  for (const Gemma4Layer& layer : spec.gemma4->layers) heads.push_back(layer.num_key_value_heads);
  return heads;
}

std::optional<ImageTokens> tokens_of_images(const ModelSpec& spec) {
  if (!spec.gemma4->vision) return std::nullopt;
  return ImageTokens{spec.gemma4->image_token_id, spec.gemma4->vision->patches()};
}

}  // namespace

const FamilyTraits& gemma4_traits() {
  static const FamilyTraits traits{
      .family = Family::kGemma4,
      .model_type = "gemma4",
      .architecture = "Gemma4ForConditionalGeneration",
      // read_all knows the defaults.
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = std::nullopt,
      .default_max_position_embeddings = 131072,
      .has_mlp_bias = false,
      .pins = {.strict = {}, .under_float16 = {}, .routers = {"router.proj", "router.scale"}},
      .frozen = {"model.vision_tower"},
      .module_name = [](std::string_view name) { return std::string(name); },
      .key_value_heads = heads_of_layers,
      .image_tokens = tokens_of_images,
      .read_all = read_gemma4,
      .write_all = gemma4_json,
  };
  return traits;
}

}  // namespace tessera::models
