#include "train/hf/model_forms.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/text/wildcard.h"
#include "grad/ruled_update.h"
#include "tessera/contract.h"
#include "tessera/error.h"

namespace tessera::train {

FileForm file_form(const models::ParameterSpec& parameter) {
  if (parameter.stacked.empty()) return {{parameter.name}, {1, parameter.shape}};
  FileForm form{parameter.stacked,
                {static_cast<std::int64_t>(parameter.stacked.size()), parameter.stacked_shape}};
  TESSERA_INVARIANT(
      form.file.count * TensorBox::whole(form.file.shape).numel() == parameter.numel(),
      parameter.name, " does not stack its tensors");
  return form;
}

FileForms file_forms(const std::vector<models::ParameterSpec>& table) {
  std::map<std::string, FileForm, std::less<>> stacked;
  for (const auto& parameter : table) {
    if (!parameter.stacked.empty()) stacked.emplace(parameter.name, file_form(parameter));
  }
  return FileForms(std::move(stacked));
}

namespace {

/// Whether a weight of two dims has one row or one column, as the gate of shared experts: there is
/// nothing in it to orthogonalize.
bool is_vector(const models::ParameterSpec& parameter) {
  return parameter.shape.size() == 2 && (parameter.shape[0] == 1 || parameter.shape[1] == 1);
}

bool is_hidden(const models::ParameterSpec& parameter) {
  return !is_vector(parameter) && parameter.decay == models::DecayClass::kMatrix &&
         parameter.layer && parameter.part != models::ModelPart::kRouter &&
         parameter.tied_to.empty();
}

bool is_fused(const models::ParameterSpec& parameter) {
  return is_hidden(parameter) && parameter.fused.count > 1;
}

/// The last two dims are one matrix, the dims before them a number of such matrices.
layout::FileShape as_matrices(const models::ParameterSpec& parameter) {
  layout::FileShape form{1, parameter.shape};
  if (form.shape.size() == 3) form = {form.shape[0], {form.shape[1], form.shape[2]}};
  return form;
}

fsdp::MatrixForm each_separately(layout::FileShape whole, const layout::FusedMatrices& fused) {
  if (fused.dim != 0 || fused.order != layout::FusedMatrices::Order::kSideBySide) {
    return {std::move(whole), fused};
  }
  // Matrices whose rows are side by side are consecutive in memory.
  return {{whole.count * fused.count, fused.shape_of_each(std::move(whole.shape))}, {}};
}

template <class Wanted>
std::vector<std::string> fused_that(const std::vector<models::ParameterSpec>& table,
                                    const Wanted& wanted) {
  std::vector<std::string> names;
  for (const auto& parameter : table) {
    if (is_fused(parameter) && wanted(parameter)) names.push_back(parameter.name);
  }
  return names;
}

}  // namespace

fsdp::MatrixForms hidden_matrices(const std::vector<models::ParameterSpec>& table,
                                  const std::vector<std::string>& as_one) {
  fsdp::MatrixForms forms;
  for (const auto& parameter : table) {
    if (!is_hidden(parameter)) continue;
    fsdp::MatrixForm form;
    if (!is_fused(parameter)) {
      form = {parameter.stacked.empty() ? as_matrices(parameter) : file_form(parameter).file, {}};
    } else if (std::ranges::count(as_one, parameter.name) > 0) {
      form = {as_matrices(parameter), {}};
    } else {
      form = each_separately(as_matrices(parameter), parameter.fused);
    }
    if (form.shape.size() == 2) forms.emplace(parameter.name, std::move(form));
  }
  return forms;
}

std::vector<std::string> fused_as_one(const std::vector<models::ParameterSpec>& table,
                                      const std::vector<OptimizerRule>& rules) {
  return fused_that(table, [&](const models::ParameterSpec& parameter) {
    GradContract contract;
    contract.name = parameter.name;
    return !grad::ruled_update(rules, contract).split_fused.value_or(true);
  });
}

void check_split_fused(const std::vector<models::ParameterSpec>& table,
                       const std::vector<OptimizerRule>& rules, fsdp::OptimizerName optimizer) {
  const auto fused = fused_weights(table);
  const auto matches = [&](const std::string& pattern) {
    return std::ranges::any_of(fused,
                               [&](const auto& name) { return matches_name(pattern, name); });
  };
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const OptimizerRule& rule = rules[i];
    if (!rule.split_fused) continue;
    const std::string source = concat("optimizer.rule[", i + 1, "].split_fused");
    TESSERA_CHECK(optimizer == fsdp::OptimizerName::kMuon, ErrorKind::kConfig, source, ": found ",
                  *rule.split_fused ? "true" : "false", " with ", fsdp::name_of(optimizer),
                  ", which steps every element by itself, expected Muon; leave split_fused out, or "
                  "set optimizer.name = \"Muon\"");
    // The patterns of a rule that asks for more may be those of the other numbers.
    const bool asks_more = rule.lr_scale || rule.weight_decay;
    const auto lost = std::ranges::find_if_not(rule.match, matches);
    const bool has_effect =
        asks_more ? std::ranges::any_of(rule.match, matches) : lost == rule.match.end();
    TESSERA_CHECK(has_effect, ErrorKind::kContract, source, ": found the pattern ",
                  in_quotes(*lost), " that matches no fused weight, expected one that does; ",
                  fused.empty()
                      ? "this model has none"
                      : concat("this model has ", fused.size(), ", as ", in_quotes(fused.front())),
                  "; leave split_fused out of the rule, or correct match");
  }
}

std::vector<std::string> fused_in_files(const std::vector<models::ParameterSpec>& table) {
  return fused_that(table, [](const auto& parameter) { return parameter.stacked.empty(); });
}

std::vector<std::string> fused_weights(const std::vector<models::ParameterSpec>& table) {
  return fused_that(table, [](const auto&) { return true; });
}

}  // namespace tessera::train
