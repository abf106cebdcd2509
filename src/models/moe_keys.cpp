#include "models/moe_keys.h"

#include <nlohmann/json.hpp>

#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

// Tables of the files' tensors are built from this number.
constexpr IntRange kExperts{1, 4096};

}  // namespace

void read_expert_counts(ConfigReader& keys, MoeSpec& moe) {
  const auto local = keys.integer("num_local_experts", kExperts);
  const auto published = keys.integer("num_experts", kExperts);
  if (local && published && *local != *published) {
    keys.refuse("num_experts", concat("the same as num_local_experts = ", *local));
  }
  if (!local && !published) {
    keys.refuse("num_experts", concat("an integer from 1 to ", kExperts.max));
  }
  moe.num_experts = published ? *published : *local;
  moe.experts_per_token = required(keys, "num_experts_per_tok", {1, moe.num_experts});
}

void read_aux_loss(ConfigReader& keys, MoeSpec& moe) {
  moe.router_aux_loss_coef =
      keys.number("router_aux_loss_coef", {0.0, 1e6}).value_or(moe.router_aux_loss_coef);
  moe.output_router_logits = keys.boolean("output_router_logits").value_or(false);
}

void write_aux_loss(const MoeSpec& moe, nlohmann::ordered_json& json) {
  json["output_router_logits"] = moe.output_router_logits;
  json["router_aux_loss_coef"] = moe.router_aux_loss_coef;
}

}  // namespace tessera::models
