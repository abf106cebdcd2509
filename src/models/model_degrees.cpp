#include "models/model_degrees.h"

#include <string_view>

#include "models/model_spec.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

void check_divides(std::string_view key, int degree, std::string_view what, std::int64_t size) {
  TESSERA_CHECK(size % degree == 0, ErrorKind::kConfig, "parallelism.", key, ": found ", degree,
                ", expected a divisor of ", what, " = ", size);
}

constexpr std::string_view kTp = "tensor_parallel_degree";
constexpr std::string_view kEp = "expert_parallel_degree";
constexpr std::string_view kEtp = "expert_tensor_parallel_degree";

void check_heads(std::int64_t kv, int tp) {
  TESSERA_CHECK(kv % tp == 0 || tp % kv == 0, ErrorKind::kConfig, "parallelism.", kTp, ": found ",
                tp, ", expected a divisor or a multiple of num_key_value_heads = ", kv);
}

void check_expert_degrees(const ModelSpec& spec, const ParallelDims& degrees) {
  TESSERA_CHECK(spec.moe || (degrees.ep == 1 && degrees.etp == 1), ErrorKind::kConfig,
                "parallelism.", degrees.ep > 1 ? kEp : kEtp, ": found ",
                degrees.ep > 1 ? degrees.ep : degrees.etp,
                " for a model without experts, expected 1");
  if (!spec.moe) return;
  check_divides(kEp, degrees.ep, "the number of experts", spec.moe->num_experts);
  check_divides(kEtp, degrees.etp, "moe_intermediate_size", spec.moe->moe_intermediate_size);
}

}  // namespace

void check_degrees(const ModelSpec& spec, const ParallelDims& degrees) {
  check_expert_degrees(spec, degrees);
  const int tp = degrees.tp;
  check_divides(kTp, tp, "num_attention_heads", spec.num_attention_heads);
  check_divides(kTp, tp, "vocab_size", spec.vocab_size);
  check_divides(kTp, tp, "intermediate_size", spec.intermediate_size);
  if (spec.moe && spec.moe->shared_intermediate_size > 0) {
    check_divides(kTp, tp, "the inner size of shared experts", spec.moe->shared_intermediate_size);
  }
  for (const std::int64_t heads : key_value_heads(spec)) check_heads(heads, tp);
}

}  // namespace tessera::models
