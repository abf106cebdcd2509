#include "golden/model_folder.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "io/safetensors.h"

namespace tessera::golden {
namespace fs = std::filesystem;

std::vector<StoredTensor> read_model(const fs::path& folder) {
  const SafetensorsFile file(folder / "model.safetensors");
  std::vector<StoredTensor> tensors;
  for (const TensorInfo& info : file.header().tensors) {
    const auto bytes = file.bytes(info.name);
    tensors.push_back({{info.name, info.dtype, info.shape}, {bytes.begin(), bytes.end()}});
  }
  return tensors;
}

void write_model(const fs::path& folder, const std::string& config,
                 const std::vector<StoredTensor>& tensors, int files) {
  fs::create_directories(folder);
  std::ofstream(folder / "config.json") << config;
  nlohmann::json weight_map;
  for (int file = 0; file < files; ++file) {
    const std::string name = files == 1 ? "model.safetensors"
                                        : concat("model-", file + 1, "-of-", files, ".safetensors");
    std::vector<const StoredTensor*> mine;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (static_cast<int>(i) % files == file) mine.push_back(&tensors[i]);
    }
    std::vector<TensorSpec> specs;
    for (const StoredTensor* tensor : mine) specs.push_back(tensor->spec);
    SafetensorsWriter writer(folder / name, specs);
    for (const StoredTensor* tensor : mine) {
      writer.write(tensor->spec.name, tensor->bytes);
      weight_map[tensor->spec.name] = name;
    }
    writer.finish();
  }
  if (files == 1) return;
  std::ofstream(folder / "model.safetensors.index.json")
      << nlohmann::json{{"metadata", nlohmann::json::object()}, {"weight_map", weight_map}};
}

fs::path data_folder(const std::string& name) { return fs::path(TESSERA_TEST_DATA) / name; }

fs::path temporary_path(const std::string& what) {
  static const TemporaryFolder folder;
  static int number = 0;
  return folder / concat(++number, "-", what);
}

fs::path model_folder(const std::string& name, Spelling spelling, Files files) {
  if (spelling == Spelling::kWritten && files == Files::kOne) return data_folder(name);
  static std::map<std::string, fs::path> made;
  const bool hub = spelling == Spelling::kHub;
  const int count = files == Files::kOne ? 1 : 3;
  fs::path& path = made[concat(name, hub, count)];
  if (path.empty()) {
    path = temporary_path(name);
    write_model(path, read_file(data_folder(name) / (hub ? "config.hub.json" : "config.json")),
                read_model(data_folder(name)), count);
  }
  return path;
}

fs::path changed_folder(const std::string& name,
                        const std::function<void(std::vector<StoredTensor>&)>& change) {
  auto tensors = read_model(data_folder(name));
  change(tensors);
  const auto path = temporary_path(name);
  write_model(path, read_file(data_folder(name) / "config.json"), tensors, 1);
  return path;
}

}  // namespace tessera::golden
