#include "train/hf/model_forms.h"

#include <map>

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

fsdp::MatrixForms hidden_matrices(const std::vector<models::ParameterSpec>& table) {
  fsdp::MatrixForms forms;
  for (const auto& parameter : table) {
    const bool is_hidden = parameter.decay == models::DecayClass::kMatrix && parameter.layer &&
                           parameter.part != models::ModelPart::kRouter &&
                           parameter.tied_to.empty();
    auto form = file_form(parameter).file;
    if (form.count == 1 && form.shape.size() == 3) {  // experts in one tensor
      form = {form.shape[0], {form.shape[1], form.shape[2]}};
    }
    if (is_hidden && form.shape.size() == 2) forms.emplace(parameter.name, form);
  }
  return forms;
}

}  // namespace tessera::train
