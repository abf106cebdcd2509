#include "train/data/config_paths.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/text/printable.h"
#include "base/where_relative.h"
#include "io/hf_folder.h"
#include "tessera/error.h"
#include "train/data/data_files.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

struct NamedPath {
  std::string key;
  std::string path;
  std::string absent;  ///< "no such file"
  std::string expected;
};

constexpr const char* kNoFile = "no such file";

void add_data(const NamedSource& source, std::vector<NamedPath>& paths) {
  for (const std::string& path : source.path) {
    paths.push_back({source.key, path, "no such file or folder",
                     "a text file, a folder of *.txt, NAME.bin or X.safetensors"});
  }
}

/// The paths that `verb` reads, without those of keys that have no effect.
std::vector<NamedPath> paths_to_read(const Config& config, Verb verb) {
  std::vector<NamedPath> paths{{"model.path", config.model.path, concat("no such folder", kNoHub),
                                concat(kModelFolder, ", or the folder of a run")},
                               {"model.config", config.model.config, kNoFile, "a config.json"}};
  if (config.parallelism.pipeline_parallel_degree > 1) {
    paths.push_back({"pipeline.schedule_file", config.pipeline.schedule_file, kNoFile, "a CSV"});
  }
  if (config.compile.mode != CompileChoice::kOff) {
    paths.push_back({"compile.plan", config.compile.plan, kNoFile, "a plan in JSON"});
  }
  if (verb != Verb::kTrain) return paths;
  paths.push_back({"contract.lock", config.contract.lock, kNoFile,
                   "a file of tessera inspect --contract --lock"});
  for (const NamedSource& source : sources_of(config.data)) add_data(source, paths);
  add_data({"validation.path", config.validation.path}, paths);
  return paths;
}

/// Whether the path exists; for a pattern, whether it matches anything.
bool is_there(const std::string& path, std::string_view key) {
  if (is_pattern(path)) return !matches_of(path, key).empty();
  std::error_code ignored;
  return fs::status(path, ignored).type() != fs::file_type::not_found;
}

std::string what_is_absent(const NamedPath& named) {
  return is_pattern(named.path)
             ? concat("found no file that matches ", shown(named.path))
             : concat("cannot open ", shown(named.path), ": found ", named.absent);
}

/// Looks the path up in the config's folder and in its parent, to which the paths in configs/ are
/// relative.
std::optional<std::string> near_config(const fs::path& config_file, const NamedPath& named) {
  const fs::path folder = config_file.parent_path();
  for (const fs::path& from : {folder, folder / ".."}) {
    std::string path = (from / named.path).lexically_normal().string();
    if (is_there(path, named.key)) return path;
  }
  return std::nullopt;
}

}  // namespace

void require_relative_paths(const Config& config, const fs::path& config_file, Verb verb) {
  for (const NamedPath& named : paths_to_read(config, verb)) {
    const fs::path path = named.path;
    if (path.empty() || path.is_absolute() || is_there(named.path, named.key)) continue;
    const auto near = near_config(config_file, named);
    throw Error(
        ErrorKind::kIo,
        concat(named.key, ": ", what_is_absent(named), where_relative(path),
               " (where relative paths of a config begin), expected ", named.expected,
               near ? concat("; next to the config there is ", shown(*near), ": name that") : ""));
  }
}

}  // namespace tessera::train
