#include "train/hf/renamed_tensors.h"

#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::train {

RenamedTensors::RenamedTensors(std::shared_ptr<const TensorSource> folder, const Rename& rename)
    : folder_(std::move(folder)) {
  for (const auto& [name, tensor] : folder_->tensors()) {
    std::string renamed = rename(name);
    changes_ = changes_ || renamed != name;
    if (renamed.empty()) {
      left_out_.push_back(name);
      continue;
    }
    const auto [first, is_first] = in_folder_.emplace(renamed, name);
    TESSERA_CHECK(is_first, ErrorKind::kFormat, path().string(), ": found the tensors ",
                  printable(first->second), " and ", printable(name),
                  ", expected one of them: both are ", printable(renamed), " of the model");
    tensors_.emplace(std::move(renamed), tensor);
  }
}

void RenamedTensors::read(std::string_view name, std::int64_t begin, std::int64_t end,
                          std::span<std::byte> out) const {
  const auto found = in_folder_.find(name);
  TESSERA_CHECK(found != in_folder_.end(), ErrorKind::kFormat, path().string(),
                ": found no tensor of the model's name ", printable(name), ", expected one");
  folder_->read(found->second, begin, end, out);
}

}  // namespace tessera::train
