// Which tensors of a model's files hold which of its parameters: what a description says, as
// checkpoint/file_forms.h has it. Pure.
#pragma once

#include <vector>

#include "checkpoint/file_forms.h"
#include "models/description.h"

namespace tessera::train {

using checkpointing::FileForm;
using checkpointing::FileForms;

FileForm file_form(const models::ParameterSpec& parameter);
/// What the table does not have is one tensor (an adapter).
FileForms file_forms(const std::vector<models::ParameterSpec>& table);

}  // namespace tessera::train
