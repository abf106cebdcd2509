// Contracts over random models and policies: either one clear refusal, or values that keep every
// promise.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <string>
#include <vector>

#include "grad/contract_key.h"
#include "tessera/contract.h"
#include "tessera/error.h"

namespace tessera {
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
  meta.model_pin = *rc::gen::inRange(0, 5) == 0;
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
    rule.frozen = maybe(rc::gen::arbitrary<bool>());
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

void check_floating(const GradContract& contract, const ParameterMeta& meta) {
  const DType compute = contract.compute.dtype;
  const DType found = meta.checkpoint.value_or(meta.dtype);
  RC_ASSERT(is_floating(compute) && !is_float8(compute));
  RC_ASSERT(represents(contract.storage.dtype, found));
  RC_ASSERT(represents(contract.accumulate, contract.reduce));
  RC_ASSERT(contract.reduce != DType::kFloat16);
  if (contract.trainable) RC_ASSERT(!is_float8(contract.storage.dtype));
}

RC_GTEST_PROP(ContractProperty, ResolvedValuesKeepTheirPromises, ()) {
  const std::vector<ParameterMeta> model = draw_model();
  const auto contracts = resolved(model, draw_policy());
  RC_PRE(contracts.has_value());
  RC_ASSERT(contracts->size() == model.size());
  for (std::size_t i = 0; i < model.size(); ++i) {
    const GradContract& contract = (*contracts)[i];
    RC_ASSERT(contract.name == model[i].name && contract.shape == model[i].shape);
    for (const std::string& reason : contract.reasons) RC_ASSERT(!reason.empty());
    if (is_floating(contract.storage.dtype)) {
      check_floating(contract, model[i]);
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
  const auto together = resolved(model, policy);
  RC_PRE(together.has_value());
  for (std::size_t i = 0; i < model.size(); ++i) {
    RC_ASSERT(resolve_contracts({model[i]}, policy, {{"dp_shard"}, {}, 2})[0] == (*together)[i]);
  }
}

RC_GTEST_PROP(ContractProperty, PinnedParametersComputeInFloat32AtLeast, ()) {
  std::vector<ParameterMeta> model = draw_model();
  for (ParameterMeta& meta : model) meta.model_pin = true;
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
      const bool alike = a.trainable == b.trainable && bytes && (!a.trainable || sums);
      RC_ASSERT((key_of(a) == key_of(b)) == alike);
    }
  }
}

}  // namespace
}  // namespace tessera
