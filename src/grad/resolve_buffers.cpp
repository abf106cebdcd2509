// Buffers are neither sharded nor gathered, so nothing casts them on the way into a forward: a
// float32 buffer in a part that computes in bfloat16 makes its results float32, silently. In frozen
// parts, where no user expects to find them changed or not, they are cast once after loading; in
// trained ones they stay.
#include <algorithm>
#include <array>

#include "grad/resolve_steps.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

/// Rope's tables under the names that models give them: positions need their digits.
constexpr std::array<std::string_view, 5> kTables = {"*inv_freq", "rotary_emb", "freqs_cis",
                                                     "cos_cached", "sin_cached"};

bool is_table(const BufferMeta& meta) {
  return meta.computed_table || std::any_of(kTables.begin(), kTables.end(), [&](auto pattern) {
           return matches_name(pattern, meta.name);
         });
}

/// The module that has it, or one around that (the whole model is one), has parameters and all of
/// them are frozen.
bool in_frozen_subtree(const std::string& name, const std::vector<GradContract>& parameters) {
  for (std::string_view prefix = name; !prefix.empty();) {
    prefix.remove_suffix(1);
    prefix = prefix.substr(0, prefix.rfind('.') + 1);  // none: the whole model
    bool any = false;
    bool all_frozen = true;
    for (const GradContract& parameter : parameters) {
      if (!parameter.name.starts_with(prefix)) continue;
      any = true;
      all_frozen = all_frozen && !parameter.trainable;
    }
    if (any && all_frozen) return true;
  }
  return false;
}

Setting<DType> compute_of(const BufferMeta& meta, const Asked& asked,
                          const std::vector<GradContract>& parameters,
                          const PrecisionPolicy& policy, DType storage) {
  if (!is_floating(storage)) return {storage, "not floating: as storage"};
  if (is_table(meta)) return {storage, "a computed table: never cast"};
  if (const auto pin = pinned_by({meta.strict_pin, meta.pin16}, asked, policy)) {
    return {widen_to(storage, DType::kFloat32), concat("pinned by ", *pin)};
  }
  if (asked.param_dtype) return *asked.param_dtype;
  if (meta.pin16) {
    return {storage, concat("as storage: in the family's list for float16 (", *meta.pin16, ")")};
  }
  if (!policy.param_dtype) return {storage, "as storage"};
  if (!in_frozen_subtree(meta.name, parameters)) {
    return {storage, "as storage: of a trained part, where buffers stay as they are"};
  }
  const auto record = recorded(meta.checkpoint, meta.checkpoint_bulk, policy.intrinsic);
  if (record && !represents(*policy.param_dtype, record->value)) {
    return {widen_to(*policy.param_dtype, record->value), record->reason};
  }
  return {*policy.param_dtype, "[precision] param_dtype, of a frozen part"};
}

}  // namespace

BufferContract resolve_buffer(const BufferMeta& meta, const Asked& asked,
                              const std::vector<GradContract>& parameters,
                              const PrecisionPolicy& policy) {
  BufferContract contract;
  contract.name = meta.name;
  contract.shape = meta.shape;
  contract.stored = meta.stored;
  contract.storage = meta.checkpoint.value_or(meta.dtype);
  contract.reason(BufferField::kStorage) =
      meta.checkpoint ? "as in the checkpoint" : "as the tensor is";
  const auto compute = compute_of(meta, asked, parameters, policy, contract.storage);
  contract.compute = compute.value;
  contract.reason(BufferField::kCompute) = compute.reason;
  return contract;
}

}  // namespace tessera::grad
