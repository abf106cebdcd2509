// Rows of multi-head latent attention.
#include "models/table_builder.h"

namespace tessera::models {

void add_mla(TableBuilder& table, const ModelSpec& spec, const std::string& attention) {
  const MlaSpec& mla = *spec.mla;
  const std::int64_t hidden = spec.hidden_size;
  const std::int64_t heads = spec.num_attention_heads;
  const std::string module = attention + ".";
  if (mla.q_lora_rank) {
    table.linear(module + "q_a_proj", *mla.q_lora_rank, hidden, spec.attention_bias);
    table.norm(module + "q_a_layernorm.weight", *mla.q_lora_rank);
    table.linear(module + "q_b_proj", heads * mla.qk_head_dim(), *mla.q_lora_rank, false);
  } else {
    table.linear(module + "q_proj", heads * mla.qk_head_dim(), hidden, false);
  }
  table.linear(module + "kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, hidden,
               spec.attention_bias);
  table.norm(module + "kv_a_layernorm.weight", mla.kv_lora_rank);
  table.linear(module + "kv_b_proj", heads * (mla.qk_nope_head_dim + mla.v_head_dim),
               mla.kv_lora_rank, false);
  table.linear(module + "o_proj", hidden, heads * mla.v_head_dim, spec.attention_bias);
}

}  // namespace tessera::models
