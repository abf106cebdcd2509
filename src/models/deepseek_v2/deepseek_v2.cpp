// DeepSeek V2, the lite one and the full one: latent attention, a first dense layer, shared
// experts, softmax routing without a sum to divide by, from all experts or from the best groups of
// them.
#include <nlohmann/json.hpp>

#include "models/deepseek_v2/deepseek_keys.h"
#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr const char* kGreedy = "greedy";
constexpr const char* kGroupLimited = "group_limited_greedy";

void read_deepseek_v2(ConfigReader& keys, ModelSpec& spec) {
  settle_latent_attention(keys, spec);
  const std::string method = keys.word("topk_method").value_or(kGreedy);
  if (method != kGreedy && method != kGroupLimited) {
    keys.refuse("topk_method", concat("\"", kGreedy, "\" or \"", kGroupLimited, "\""));
  }
  if (method == kGroupLimited) {
    check_routed_experts(keys, spec);
  } else {  // then the two mean nothing
    spec.moe->n_group = 1;
    spec.moe->topk_group = 1;
  }
}

}  // namespace

const FamilyTraits& deepseek_v2_traits() {
  static const FamilyTraits traits{
      .model_type = "deepseek_v2",
      .architecture = "DeepseekV2ForCausalLM",
      .spec = {.family = Family::kDeepseekV2,
               .head_dim = 64,
               .max_position_embeddings = 2048,
               .moe = MoeSpec{.moe_intermediate_size = 1407,
                              .shared_intermediate_size = std::int64_t{2} * 1407,
                              .router_dtype = RouterDtype::kFloat32,
                              .n_group = 0,
                              .topk_group = 0},
               .mla = kAbsentMla},
      .rows = decoder_rows(joined({
          latent_attention_rows(),
          routed_expert_rows(),
          {
              always("moe_layer_freq", 1, kExpertsInEveryLayer),
              always("norm_topk_prob", false,
                     "transformers never divides by the sum, the published code would"),
              always("scoring_func", "softmax", "the scores of deepseek_v2"),
              written({"topk_method"},
                      [](const ModelSpec& spec) {
                        return spec.moe->n_group > 1 ? kGroupLimited : kGreedy;
                      }),
          },
      })),
      .read = read_deepseek_v2,
      .router_module = "gate",
      .moe_names = {.peft_takes_mlp_for_experts = true},
  };
  return traits;
}

}  // namespace tessera::models
