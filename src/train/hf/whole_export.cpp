#include "train/hf/whole_export.h"

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "io/checkpoint_folder.h"
#include "models/family.h"
#include "tessera/error.h"
#include "train/hf/weights.h"

namespace tessera::train {
namespace {

[[noreturn]] void refuse_whole(const std::string& found) {
  throw Error(ErrorKind::kUsage,
              concat("--whole: found ", found,
                     ", expected a model whose training began with the folder of a model of more "
                     "than text, which is still there; leave it out"));
}

std::shared_ptr<const HfTensors> folder_of_whole(const ModelSource& source) {
  const models::FamilyTraits& family = models::traits(source.spec.family);
  if (!family.whole) refuse_whole(concat(family.architecture, ", which is all of its model"));
  if (source.origin.empty()) refuse_whole("no folder that training began with");
  auto tensors = std::make_shared<HfTensors>(HfFolder::open(source.origin));
  const auto config = parse_json_object(tensors->folder().config_text(), "config.json");
  if (!models::is_whole_of(family, config)) {
    refuse_whole(concat(shown(source.origin), ", which has the text model alone"));
  }
  return tensors;
}

/// The dtype that it names, its parts too, is that of the tensors.
std::string text_of_config(const std::string& published, const std::optional<DType>& dtype) {
  auto config = nlohmann::ordered_json::parse(published);
  const auto name_dtype = [&](nlohmann::ordered_json& part) {
    for (const char* key : {"dtype", "torch_dtype"}) {
      if (part.contains(key)) part[key] = to_string(*dtype);
    }
  };
  if (dtype) {
    name_dtype(config);
    for (auto& [key, part] : config.items()) {
      if (key.ends_with("_config") && part.is_object()) name_dtype(part);
    }
  }
  return config.dump(2) + "\n";
}

}  // namespace

ExportPlan with_the_rest(ExportPlan plan, const ModelSource& source, const ExportOptions& options) {
  const auto whole = folder_of_whole(source);
  const auto& name_of_module = models::traits(source.spec.family).module_name;
  std::map<std::string, TensorSpec> text;
  for (const HfShard& shard : plan.shards) {
    for (const TensorSpec& tensor : shard.tensors) text.emplace(tensor.name, tensor);
  }
  std::vector<TensorSpec> tensors;
  std::map<std::string, std::string> module_of;  // by the folder's name; none for the rest
  for (const auto& [name, stored] : whole->tensors()) {
    std::string module = name_of_module(name);
    if (module.empty()) {
      tensors.push_back({name, options.dtype.value_or(stored.dtype), stored.shape});
      plan.size_bytes += size_bytes(tensors.back());
      continue;
    }
    const auto own = text.extract(module);
    TESSERA_CHECK(!own.empty(), ErrorKind::kFormat, shown(whole->path()), ": found the tensor ",
                  printable(name), ", expected those of the model and of what it leaves out");
    tensors.push_back({name, own.mapped().dtype, own.mapped().shape});
    module_of.emplace(name, std::move(module));
  }
  TESSERA_CHECK(text.empty(), ErrorKind::kFormat, shown(whole->path()), ": found no tensor for ",
                text.begin()->first, ", expected those of the model");
  plan.shards = plan_shards(tensors, options.max_shard_bytes);
  plan.texts = {{"config.json", text_of_config(whole->folder().config_text(), options.dtype)}};
  if (plan.shards.size() > 1) plan.texts["model.safetensors.index.json"] = index_json(plan.shards);
  plan.read = [read = std::move(plan.read), whole, module_of = std::move(module_of)](
                  const std::string& name, std::int64_t begin, std::int64_t end) {
    const auto module = module_of.find(name);
    return module == module_of.end() ? read_elements(*whole, name, begin, end)
                                     : read(module->second, begin, end);
  };
  return plan;
}

}  // namespace tessera::train
