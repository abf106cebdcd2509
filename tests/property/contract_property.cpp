// Contracts over random models and policies: either one clear refusal, or values that keep every
// promise.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "grad/contract_key.h"
#include "support/test.h"
#include "tessera/model_contract.h"

namespace tessera::contract_property {
namespace {

rc::Gen<DType> any_dtype() {
  return rc::gen::weightedElement<DType>({{4, DType::kFloat32},
                                          {4, DType::kBFloat16},
                                          {2, DType::kFloat16},
                                          {2, DType::kFloat64},
                                          {1, DType::kFloat8E4M3},
                                          {1, DType::kInt64}});
}

rc::Gen<DType> computable() {
  return rc::gen::element(DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64);
}

template <class T>
std::optional<T> maybe(const rc::Gen<T>& gen) {
  if (*rc::gen::inRange(0, 3) != 0) return std::nullopt;
  return *gen;
}

ParameterMeta draw_meta(std::size_t index) {
  ParameterMeta meta;
  meta.name = "layers." + std::to_string(index) +
              *rc::gen::element<std::string>(".norm.weight", ".mlp.weight", ".mlp.bias");
  meta.shape = *rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange<std::int64_t>(0, 9));
  if (meta.shape.size() > 4) meta.shape.resize(4);
  meta.dtype = *any_dtype();
  meta.checkpoint = maybe(any_dtype());
  meta.checkpoint_bulk = maybe(any_dtype());
  meta.trainable = *rc::gen::arbitrary<bool>();
  if (*rc::gen::inRange(0, 5) == 0) meta.strict_pin = "family";
  if (*rc::gen::inRange(0, 5) == 0) meta.pin16 = "family16";
  meta.frozen_as = *rc::gen::element(FrozenAs::kShard, FrozenAs::kReplicate);
  meta.drawn = !meta.checkpoint && *rc::gen::inRange(0, 3) == 0;
  meta.user_grad_dtype = maybe(computable());
  return meta;
}

std::vector<ParameterMeta> draw_model() {
  std::vector<ParameterMeta> model;
  const auto count = *rc::gen::inRange<std::size_t>(1, 6);
  for (std::size_t i = 0; i < count; ++i) model.push_back(draw_meta(i));
  return model;
}

PrecisionPolicy draw_policy() {
  PrecisionPolicy policy;
  policy.param_dtype = maybe(computable());
  policy.reduce_dtype = maybe(computable());
  policy.storage_dtype = maybe(computable());
  policy.accumulate_dtype = maybe(computable());
  policy.final_dtype = maybe(computable());
  policy.output_dtype = maybe(computable());
  policy.cast_forward_inputs = *rc::gen::arbitrary<bool>();
  policy.loss_scaling = *rc::gen::inRange(0, 3) != 0;
  policy.intrinsic = *rc::gen::element(Intrinsic::kMinority, Intrinsic::kAll, Intrinsic::kNone);
  policy.on_narrower_request = *rc::gen::weightedElement<NarrowerRequest>(
      {{3, NarrowerRequest::kKeep}, {3, NarrowerRequest::kNarrow}, {1, NarrowerRequest::kError}});
  policy.optimizer.master = *rc::gen::element(MasterRequest::kAuto, MasterRequest::kNone);
  if (*rc::gen::inRange(0, 4) == 0) policy.optimizer.no_decay = {"norm"};
  const auto count = *rc::gen::inRange(0, 3);
  for (int i = 0; i < count; ++i) {
    PrecisionRule rule;
    rule.match = {*rc::gen::element<std::string>("layers", "norm", "*", "mlp.weight", "layers.0")};
    rule.param_dtype = maybe(computable());
    rule.reduce_dtype = maybe(computable());
    rule.storage_dtype = maybe(computable());
    rule.accumulate_dtype = maybe(computable());
    rule.grad_dtype = maybe(computable());
    rule.pin = maybe(rc::gen::arbitrary<bool>());
    rule.widen = maybe(rc::gen::arbitrary<bool>());
    rule.frozen = maybe(rc::gen::element(FrozenRule::kNo, FrozenRule::kYes, FrozenRule::kShard,
                                         FrozenRule::kReplicate));
    policy.rules.push_back(rule);
  }
  return policy;
}

/// none when it was refused; the refusal must be about the contract and end in what to do.
std::optional<std::vector<GradContract>> resolved(const std::vector<ParameterMeta>& model,
                                                  const PrecisionPolicy& policy) {
  try {
    return resolve_contracts(model, policy, {{"dp_shard"}, {}, 2});
  } catch (const Error& error) {
    const std::string message = error.what();
    RC_ASSERT(error.kind() == ErrorKind::kContract);
    RC_ASSERT(message.find("found") != std::string::npos);
    RC_ASSERT(message.find("expected") != std::string::npos);
    RC_ASSERT(message.find("; ") != std::string::npos);
    return std::nullopt;
  }
}

void check_floating(const GradContract& contract, const ParameterMeta& meta,
                    const PrecisionPolicy& policy) {
  const DType compute = contract.compute.dtype;
  const DType found = meta.checkpoint.value_or(meta.dtype);
  const bool may_narrow = meta.drawn || policy.on_narrower_request == NarrowerRequest::kNarrow;
  RC_ASSERT(is_floating(compute) && !is_float8(compute));
  if (contract.replicated()) {
    RC_ASSERT(contract.storage == contract.compute);
    RC_ASSERT(contract.compute.rounding == Rounding::kNearestEven);
    RC_ASSERT(contract.loaded_through != compute);
    RC_ASSERT(may_narrow || represents(contract.loaded_through.value_or(found), found));
  } else {
    RC_ASSERT(!contract.loaded_through);
    RC_ASSERT(may_narrow || represents(contract.storage.dtype, found));
  }
  RC_ASSERT(represents(contract.accumulate, contract.reduce));
  RC_ASSERT(contract.reduce != DType::kFloat16 || policy.loss_scaling);
  if (!contract.trainable) {
    RC_ASSERT(contract.master == Master::kNone && !contract.decays);
    return;
  }
  RC_ASSERT(!is_float8(contract.storage.dtype));
  RC_ASSERT(compute != DType::kFloat16 || policy.loss_scaling);
  RC_ASSERT(contract.decays.has_value() == policy.optimizer.no_decay.has_value());
  const bool wide = represents(contract.storage.dtype, DType::kFloat32);
  RC_ASSERT((contract.master == Master::kStorage) == wide);
  if (contract.master == Master::kNone) {
    RC_ASSERT(contract.state == contract.storage.dtype);
    RC_ASSERT(policy.final_dtype || contract.final == contract.storage.dtype);
  } else {
    RC_ASSERT(represents(contract.state, DType::kFloat32));
    RC_ASSERT(policy.final_dtype || contract.final == contract.state);
  }
}

RC_GTEST_PROP(ContractProperty, ResolvedValuesKeepTheirPromises, ()) {
  const std::vector<ParameterMeta> model = draw_model();
  const PrecisionPolicy policy = draw_policy();
  const auto contracts = resolved(model, policy);
  RC_PRE(contracts.has_value());
  RC_ASSERT(contracts->size() == model.size());
  for (std::size_t i = 0; i < model.size(); ++i) {
    const GradContract& contract = (*contracts)[i];
    RC_ASSERT(contract.name == model[i].name && contract.shape == model[i].shape);
    for (const std::string& reason : contract.reasons) RC_ASSERT(!reason.empty());
    if (is_floating(contract.storage.dtype)) {
      check_floating(contract, model[i], policy);
    } else {
      RC_ASSERT(!contract.trainable && contract.compute == contract.storage);
    }
  }
}

RC_GTEST_PROP(ContractProperty, ResolutionIsAFunctionOfItsArguments, ()) {
  const std::vector<ParameterMeta> model = draw_model();
  const PrecisionPolicy policy = draw_policy();
  const auto first = resolved(model, policy);
  const auto second = resolved(model, policy);
  RC_ASSERT(first == second);
  if (!first) return;
  RC_ASSERT(hash(*first) == hash(*second));
  RC_ASSERT(to_string(*first) == to_string(*second));
}

/// Without rules every parameter is resolved by itself: its neighbours change nothing.
RC_GTEST_PROP(ContractProperty, WithoutRulesNeighboursDoNotMatter, ()) {
  const std::vector<ParameterMeta> model = draw_model();
  PrecisionPolicy policy = draw_policy();
  policy.rules.clear();
  policy.optimizer.no_decay.reset();
  const auto together = resolved(model, policy);
  RC_PRE(together.has_value());
  for (std::size_t i = 0; i < model.size(); ++i) {
    RC_ASSERT(resolve_contracts({model[i]}, policy, {{"dp_shard"}, {}, 2})[0] == (*together)[i]);
  }
}

RC_GTEST_PROP(ContractProperty, PinnedParametersComputeInFloat32AtLeast, ()) {
  std::vector<ParameterMeta> model = draw_model();
  for (ParameterMeta& meta : model) meta.strict_pin = "family";
  PrecisionPolicy policy = draw_policy();
  for (PrecisionRule& rule : policy.rules) rule.pin.reset();
  const auto contracts = resolved(model, policy);
  RC_PRE(contracts.has_value());
  for (const GradContract& contract : *contracts) {
    if (!is_floating(contract.compute.dtype)) continue;
    RC_ASSERT(represents(contract.compute.dtype, DType::kFloat32));
  }
}

/// Equal keys mean equal bytes and equal collectives: what a bucket may hold together.
RC_GTEST_PROP(ContractProperty, KeysAgreeWithContracts, ()) {
  const auto contracts = resolved(draw_model(), draw_policy());
  RC_PRE(contracts.has_value());
  for (const GradContract& a : *contracts) {
    for (const GradContract& b : *contracts) {
      const bool bytes = a.storage == b.storage && a.compute == b.compute;
      const bool sums = a.accumulate == b.accumulate && a.reduce == b.reduce && a.final == b.final;
      const bool kept = a.frozen_as == b.frozen_as;
      const bool whole = !a.trainable && a.frozen_as == FrozenAs::kReplicate;
      const bool alike = a.trainable == b.trainable && (a.trainable ? bytes && sums
                                                        : whole     ? kept && a.compute == b.compute
                                                                    : kept && bytes);
      RC_ASSERT((key_of(a) == key_of(b)) == alike);
    }
  }
}

std::vector<BufferMeta> draw_buffers() {
  std::vector<BufferMeta> buffers;
  const auto count = *rc::gen::inRange<std::size_t>(0, 4);
  for (std::size_t i = 0; i < count; ++i) {
    BufferMeta meta;
    meta.name = "layers." + std::to_string(i) + ".buffer";
    meta.shape = {3};
    meta.dtype = *any_dtype();
    meta.checkpoint = maybe(rc::gen::just(meta.dtype));
    meta.checkpoint_bulk = maybe(any_dtype());
    if (*rc::gen::inRange(0, 5) == 0) meta.strict_pin = "family";
    if (*rc::gen::inRange(0, 5) == 0) meta.pin16 = "family16";
    meta.stored = *rc::gen::arbitrary<bool>();
    meta.computed_table = *rc::gen::inRange(0, 4) == 0;
    buffers.push_back(meta);
  }
  return buffers;
}

/// Every parameter in one of up to three units.
std::vector<UnitMeta> draw_units(std::size_t parameters) {
  std::vector<UnitMeta> units(*rc::gen::inRange<std::size_t>(1, 4));
  for (std::size_t u = 0; u < units.size(); ++u) {
    units[u].name = u == 0 ? "" : "layers." + std::to_string(u);
    units[u].nested = u > 0;
    units[u].casts_inputs = *rc::gen::arbitrary<bool>();
    units[u].asked_output = maybe(computable());
  }
  for (std::size_t i = 0; i < parameters; ++i) {
    units[*rc::gen::inRange<std::size_t>(0, units.size())].parameters.push_back(i);
  }
  return units;
}

struct WholeModel {
  std::vector<ParameterMeta> parameters = draw_model();
  std::vector<BufferMeta> buffers = draw_buffers();
  std::vector<UnitMeta> units = draw_units(parameters.size());

  std::optional<ModelContract> resolve(const PrecisionPolicy& policy) const {
    try {
      return resolve_model_contract(parameters, buffers, units, policy, {{"dp_shard"}, {}, 2});
    } catch (const Error& error) {
      RC_ASSERT(error.kind() == ErrorKind::kContract);
      return std::nullopt;
    }
  }
};

void check_buffer(const BufferContract& contract, const BufferMeta& meta) {
  for (const std::string& reason : contract.reasons) RC_ASSERT(!reason.empty());
  RC_ASSERT(contract.storage == meta.dtype && contract.stored == meta.stored);
  if (!is_floating(contract.storage) || meta.computed_table) {
    RC_ASSERT(contract.compute == contract.storage);
  }
}

void check_unit(const UnitContract& contract, const UnitMeta& meta, const PrecisionPolicy& policy) {
  for (const std::string& reason : contract.reasons) RC_ASSERT(!reason.empty());
  if (contract.input) {
    RC_ASSERT(meta.casts_inputs && policy.cast_forward_inputs);
    RC_ASSERT(contract.input == policy.param_dtype);
  }
  const auto inherited = meta.nested ? std::nullopt : policy.output_dtype;
  RC_ASSERT(contract.output == (meta.asked_output ? meta.asked_output : inherited));
}

RC_GTEST_PROP(ModelContractProperty, BuffersAndUnitsKeepTheirPromises, ()) {
  const WholeModel model;
  const PrecisionPolicy policy = draw_policy();
  const auto contract = model.resolve(policy);
  RC_PRE(contract.has_value());
  RC_ASSERT(contract->buffers.size() == model.buffers.size());
  RC_ASSERT(contract->units.size() == model.units.size());
  for (std::size_t i = 0; i < model.buffers.size(); ++i) {
    check_buffer(contract->buffers[i], model.buffers[i]);
  }
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    check_unit(contract->units[i], model.units[i], policy);
  }
}

/// The number that ranks compare and the lines that name a difference tell the same models apart.
RC_GTEST_PROP(ModelContractProperty, HashesDifferExactlyWhereLinesDo, ()) {
  const WholeModel model;
  const PrecisionPolicy policy = draw_policy();
  PrecisionPolicy other = policy;
  switch (*rc::gen::inRange(0, 4)) {
    case 0:
      other.output_dtype = maybe(computable());
      break;
    case 1:
      other.cast_forward_inputs = !policy.cast_forward_inputs;
      break;
    case 2:
      other.optimizer.master = MasterRequest::kNone;
      break;
    default:
      other.intrinsic = Intrinsic::kAll;
      break;
  }
  const auto first = model.resolve(policy);
  const auto second = model.resolve(other);
  RC_PRE(first && second);
  RC_ASSERT((to_lines(*first) == to_lines(*second)) == (hash(*first) == hash(*second)));
}

}  // namespace
}  // namespace tessera::contract_property
