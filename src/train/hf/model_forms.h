// Which tensors of a model's files hold which of its parameters: what a description says, as
// checkpoint/file_forms.h has it. Pure.
#pragma once

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

/// The matrices of the text's layers, adapters among them: each as files have it, and each expert's
/// by itself. Not embedding, head, router, norms, biases, and nothing of what sees images.
fsdp::MatrixForms hidden_matrices(const std::vector<models::ParameterSpec>& table);

}  // namespace tessera::train
