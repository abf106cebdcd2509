#include "train/data/data_files.h"

#include <glob.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <system_error>

#include "base/text/printable.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Whether it says something of a NAME.bin and is no data itself.
bool belongs_to_tokens(const std::string& path) {
  constexpr std::array<std::string_view, 4> kEndings{".mask.bin", ".labels.bin", ".docs.bin",
                                                     ".json"};
  return std::ranges::any_of(kEndings, [&](std::string_view ending) {
    return path.ends_with(ending) &&
           is_there(concat(path.substr(0, path.size() - ending.size()), ".bin"));
  });
}

/// The answer to glob() about a folder that cannot be listed; a part of the path that is no folder
/// at all has no matches.
int ends_the_search(const char* /*folder*/, int error) {
  return error == ENOENT || error == ENOTDIR ? 0 : 1;
}

}  // namespace

bool is_pattern(const std::string& path) {
  return path.find_first_of("*?[") != std::string::npos && !is_there(path);
}

std::vector<std::string> matches_of(const std::string& pattern, std::string_view key) {
  glob_t found{};
  const int failed = ::glob(pattern.c_str(), GLOB_NOSORT, ends_the_search, &found);
  const std::error_code why(errno, std::generic_category());
  const std::unique_ptr<glob_t, decltype(&::globfree)> freed(&found, ::globfree);
  TESSERA_CHECK(failed == 0 || failed == GLOB_NOMATCH, ErrorKind::kIo, key, ": cannot list ",
                "all folders of ", shown(pattern), " (", why.message(), ")");
  std::vector<std::string> files;
  if (failed == 0) files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  std::erase_if(files, belongs_to_tokens);
  std::ranges::sort(files);
  return files;
}

std::vector<std::string> files_of(const std::vector<std::string>& paths, std::string_view key) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (is_pattern(path)) {
      const auto matches = matches_of(path, key);
      TESSERA_CHECK(!matches.empty(), ErrorKind::kIo, key, ": found no file that matches ",
                    shown(path), ", expected at least one");
      files.insert(files.end(), matches.begin(), matches.end());
    } else {
      files.push_back(path);
    }
  }
  return files;
}

std::filesystem::path borders_of(const std::filesystem::path& path) {
  auto borders = path;
  return borders.replace_extension(".docs.bin");
}

std::optional<std::string> lacks_for_packing(const std::vector<std::string>& files) {
  for (const std::string& file : files) {
    if (!file.ends_with(".bin")) return file;
    auto mask = fs::path(file);
    mask.replace_extension(".mask.bin");
    for (const fs::path& companion : {mask, borders_of(file)}) {
      if (!is_there(companion.native())) return companion.native();
    }
  }
  return std::nullopt;
}

std::optional<std::string> lacks_borders(const std::vector<std::string>& files) {
  for (const std::string& file : files) {
    auto borders = borders_of(file).native();
    if (file.ends_with(".bin") && !is_there(borders)) return borders;
  }
  return std::nullopt;
}

bool packs_documents(const std::vector<std::string>& files, std::optional<Packing> packing) {
  return packing ? *packing == Packing::kDocuments : !lacks_for_packing(files);
}

Config with_files(Config config) {
  const auto sources = sources_of(config.data);
  config.data.path = files_of(config.data.path, "data.path");
  for (std::size_t i = 0; i < config.data.source.size(); ++i) {
    auto& path = config.data.source[i].path;
    path = files_of(path, sources[i].key);
  }
  config.validation.path = files_of(config.validation.path, "validation.path");
  return config;
}

Config with_context_parts(Config config) {
  ParallelismConfig& parallelism = config.parallelism;
  const bool is_open = !parallelism.context_parallel_parts && config.training.seq_len;
  if (!is_open || parallelism.context_parallel_degree == 1) return config;
  const auto packs = [&](const NamedSource& source) {
    std::vector<std::string> files;
    for (const std::string& path : source.path) {
      const auto found = is_pattern(path) ? matches_of(path, source.key) : std::vector{path};
      files.insert(files.end(), found.begin(), found.end());
    }
    return !files.empty() && packs_documents(files, config.data.packing);
  };
  if (std::ranges::any_of(sources_of(config.data), packs)) {
    parallelism.context_parallel_parts =
        parts_of_packed_rows(parallelism.context_parallel_degree, *config.training.seq_len);
  }
  return config;
}

}  // namespace tessera::train
