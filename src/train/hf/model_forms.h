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
/// What the table does not have is one tensor (an adapter).
FileForms file_forms(const std::vector<models::ParameterSpec>& table);

/// The matrices of the text's layers, adapters among them: each as files have it, each expert's by
/// itself, and each of those that a fused weight holds, but for the weights named in `as_one`. Not
/// embedding, head, router, norms, biases, and nothing of what sees images.
fsdp::MatrixForms hidden_matrices(const std::vector<models::ParameterSpec>& table,
                                  const std::vector<std::string>& as_one = {});

/// The fused weights among them that rules (OptimizerRule::split_fused) have stepped as one.
std::vector<std::string> fused_as_one(const std::vector<models::ParameterSpec>& table,
                                      const std::vector<OptimizerRule>& rules);
/// Those that were before there was a rule: all that files hold as one tensor.
std::vector<std::string> fused_in_files(const std::vector<models::ParameterSpec>& table);
/// All of them.
std::vector<std::string> fused_weights(const std::vector<models::ParameterSpec>& table);

}  // namespace tessera::train
