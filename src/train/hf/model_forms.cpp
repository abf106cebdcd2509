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

}  // namespace tessera::train
