// tessera: opens a libtorch that fits, then the program next to this executable, and runs it.
#include <dlfcn.h>
#include <link.h>
#include <sys/auxv.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <iostream>
#include <system_error>
#include <vector>

#include "base/environment.h"
#include "base/text/printable.h"
#include "launch/rank_variables.h"
#include "loader/library_file.h"
#include "loader/libtorch.h"
#include "tessera/error.h"

namespace tessera::loader {
namespace {

using Main = int (*)(int, char**);

void* open_library(const std::filesystem::path& path, int how) {
  check_library(path);
  void* const library = ::dlopen(path.c_str(), how);
  TESSERA_CHECK(
      library != nullptr, ErrorKind::kIo, shown(path), ": found that it cannot be loaded (",
      ::dlerror(),
      "), expected a whole copy of the library and of those that it needs; install it again");
  return library;
}

std::vector<std::filesystem::path> loaded_files() {
  std::vector<std::filesystem::path> files;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* all) {
        static_cast<std::vector<std::filesystem::path>*>(all)->emplace_back(info->dlpi_name);
        return 0;
      },
      &files);
  return files;
}

/// Opens the libraries of a libtorch, which then is the only one of this process.
void open_libtorch(const Libtorch& torch, const BuiltFor& built) {
  require_none_loaded(torch, loaded_files());
  for (const auto& path : libraries_of(torch, built)) {
    void* const library = open_library(path, RTLD_LAZY | RTLD_GLOBAL);
    if (path.filename() != "libtorch_cpu.so") continue;
    void* const version = ::dlsym(library, "aoti_torch_abi_version");
    require_version(torch,
                    version == nullptr ? 0 : reinterpret_cast<std::uint64_t (*)()>(version)());
  }
}

/// Sets the variable that libgomp, which comes with libtorch, reads as it is loaded.
void shorten_spins(base::Environment variables) {
  comm::set_spin_variable(variables);
  const auto spins = variables.find("GOMP_SPINCOUNT");
  if (spins != variables.end()) base::set_environment_variable(spins->first, spins->second);
}

Main open_program() {
  TESSERA_CHECK(
      ::getauxval(AT_SECURE) == 0, ErrorKind::kUsage,
      "tessera: found that it runs with more rights than who started it, expected no set-uid "
      "program: it opens libraries that variables name");
  std::error_code gone;
  TESSERA_CHECK(!std::filesystem::current_path(gone).empty(), ErrorKind::kIo,
                "working directory: found none (", gone.message(),
                "), expected a folder that is there, without which libtorch's MKL does not start; "
                "change to another");
  const auto environment = base::environment();
  shorten_spins(environment);
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  const auto description = self.parent_path() / "built_for.json";
  std::error_code ignored;  // a broken link is read below, which reports it
  TESSERA_CHECK(
      std::filesystem::exists(std::filesystem::symlink_status(description, ignored)),
      ErrorKind::kIo, shown(description),
      ": found none, expected it and tessera_program.so next to the executable; link to that "
      "instead of copying it, start it without ld.so in front, or unpack or install it again");
  const BuiltFor built = read_built_for(description);
  const Libtorch torch =
      find_libtorch(built, self, environment, [&] { return torch_of_python(environment); });
  base::unset_environment_variable(kTorchOfWheel);
  // Ranks that this process starts use the same libtorch.
  base::set_environment_variable("TESSERA_TORCH", torch.folder.string());
  open_libtorch(torch, built);
  const auto path = self.parent_path() / "tessera_program.so";
  void* const entry = ::dlsym(open_library(path, RTLD_NOW | RTLD_LOCAL), "tessera_main");
  TESSERA_CHECK(entry != nullptr, ErrorKind::kIo, shown(path),
                ": found no tessera_main in it, expected the program that was installed with this "
                "executable");
  return reinterpret_cast<Main>(entry);
}

}  // namespace
}  // namespace tessera::loader

int main(int argc, char** argv) {
  tessera::loader::Main program = nullptr;
  try {
    program = tessera::loader::open_program();
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const tessera::Error*>(&error);
    std::cerr << "tessera: "
              << to_string(known == nullptr ? tessera::ErrorKind::kInternal : known->kind()) << ": "
              << tessera::one_line(error.what()) << '\n';
    return known == nullptr ? 1 : 2;
  }
  return program(argc, argv);
}
