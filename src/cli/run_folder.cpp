#include "cli/run_folder.h"

#include <array>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "comm/group.h"
#include "tessera/error.h"
#include "train/config_resolve.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

std::string local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y%m%d-%H%M%S", &parts);
  return text.data();
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  TESSERA_CHECK(!error, ErrorKind::kIo, "job.dump_folder: cannot make ", folder.string(), " (",
                error.message(), ")");
}

// Two runs of the same second get different folders: create_directory says whether it was new.
fs::path make_fresh_folder(const std::string& name) {
  make_folder("outputs");
  const std::string base = concat("outputs/", local_time(), "-", name);
  for (int attempt = 1;; ++attempt) {
    const fs::path folder = attempt == 1 ? base : concat(base, "-", attempt);
    std::error_code error;
    if (fs::create_directory(folder, error)) return folder;
    TESSERA_CHECK(!error, ErrorKind::kIo, "job.dump_folder: cannot make ", folder.string(), " (",
                  error.message(), ")");
  }
}

}  // namespace

std::string run_name(const std::string& config_file) {
  const std::string stem = fs::path(config_file).stem().string();
  return stem.empty() ? "run" : stem;
}

train::Config prepare_run_folder(const train::Config& config, const std::string& name,
                                 World& world) {
  std::string chosen;
  if (world.rank() == 0) {
    if (config.job.dump_folder) make_folder(*config.job.dump_folder);
    const fs::path folder =
        config.job.dump_folder ? fs::path(*config.job.dump_folder) : make_fresh_folder(name);
    chosen = fs::absolute(folder).lexically_normal().string();
  }
  chosen = comm::all_gather_bytes(world.control(), chosen, "run folder").front();
  return train::resolved_for_run(config, chosen);
}

void write_run_config(const train::Config& run) {
  const fs::path file = fs::path(*run.job.dump_folder) / "config.toml";
  std::ofstream out(file, std::ios::trunc);
  out << train::to_toml(run);
  out.close();
  TESSERA_CHECK(!out.fail(), ErrorKind::kIo, file.string(), ": writing failed");
}

}  // namespace tessera::cli
