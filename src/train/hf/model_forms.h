// Which tensors of a model's files hold which of its parameters: what a description says, as
// checkpoint/file_forms.h has it. Pure.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/file_forms.h"
#include "fsdp/optim/optimizer_registry.h"
#include "models/description.h"

namespace tessera::train {

using checkpointing::FileForm;
using checkpointing::FileForms;

FileForm file_form(const models::ParameterSpec& parameter);
/// A parameter that the table does not have is one tensor (an adapter).
FileForms file_forms(const std::vector<models::ParameterSpec>& table);

/// The hidden matrices of the text's layers, adapters among them: each matrix as files have it,
/// each expert's, and each matrix of a fused weight, except for the weights named in `as_one`.
/// Without embedding, head, router, vectors (one row or one column), norms, biases and the vision
/// tower.
fsdp::MatrixForms hidden_matrices(const std::vector<models::ParameterSpec>& table,
                                  const std::vector<std::string>& as_one = {});

/// The fused weights that `rules` (OptimizerRule::split_fused) step as one matrix.
std::vector<std::string> fused_as_one(const std::vector<models::ParameterSpec>& table,
                                      const std::vector<OptimizerRule>& rules);
/// Refuses split_fused in a rule where it would have no effect. Errors: kConfig for an optimizer
/// that steps no matrix as a whole; kContract where the rule, or one of its patterns if it asks for
/// nothing else, matches no fused weight.
void check_split_fused(const std::vector<models::ParameterSpec>& table,
                       const std::vector<OptimizerRule>& rules, fsdp::OptimizerName optimizer);
/// The fused weights that were one matrix before the rule existed: those that files hold as one
/// tensor.
std::vector<std::string> fused_in_files(const std::vector<models::ParameterSpec>& table);
/// All fused weights.
std::vector<std::string> fused_weights(const std::vector<models::ParameterSpec>& table);

}  // namespace tessera::train
