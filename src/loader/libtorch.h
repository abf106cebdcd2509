// Chooses the libtorch that a program runs with: one of the minor version that it was built for.
//
// libtorch keeps no ABI between minor versions, and every machine has it in another folder. So the
// executable `tessera` links no libtorch: it finds one, opens it, and then the program, a shared
// object next to it (main.cpp). A missing or different libtorch is refused before a symbol is
// missed. Pure.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/environment.h"
#include "base/text/fields.h"

namespace tessera::loader {

/// Describes the libtorch of the build: built_for.json, next to the executable.
struct BuiltFor {
  std::string torch = {};   ///< MAJOR.MINOR
  bool cuda = false;        ///< libtorch_cuda.so is opened, too
  std::string folder = {};  ///< where the build found it; empty in a package

  friend bool operator==(const BuiltFor&, const BuiltFor&) = default;
};

template <class V>
constexpr void fields(V& visit, Of<BuiltFor>) {
  visit("torch", &BuiltFor::torch, TextLimit{16, Letters::kPrintable});
  visit("cuda", &BuiltFor::cuda);
  visit("folder", &BuiltFor::folder, TextLimit{4096});
}

/// Errors: kIo; kFormat.
BuiltFor read_built_for(const std::filesystem::path& file);

/// The variable by which the wheel's command names the torch of its Python; not for users.
inline constexpr const char* kTorchOfWheel = "TESSERA_TORCH_OF_PYTHON";

struct Libtorch {
  std::filesystem::path folder = {};  ///< has lib/ and include/
  std::string version = {};           ///< MAJOR.MINOR.PATCH
  bool cuda = false;

  friend bool operator==(const Libtorch&, const Libtorch&) = default;
};

/// Describes the libtorch of this folder: pip's package torch, or an unpacked libtorch.
/// Errors: kIo, kFormat where it has the library, but its version cannot be read.
std::optional<Libtorch> libtorch_in(const std::filesystem::path& folder);

/// Returns where the package torch of the machine's python3 is; empty where it has none. Runs
/// python3, which imports nothing of torch, and ends it with all that it has started.
/// Errors: kConfig where it has not answered after `seconds`.
std::filesystem::path torch_of_python(const base::Environment& environment, double seconds = 10.0);

/// Returns the first of these that fits: TESSERA_TORCH alone where it is set (it may also name the
/// folder of libtorch's CMake files); that of the wheel's Python; the folder of the build; the
/// environments of VIRTUAL_ENV and CONDA_PREFIX; `torch` or `libtorch` in the installed copy or
/// next to it (the executable is in its lib/tessera); `python`, which is called last. A folder in
/// the copy or next to it counts only where no user but root and this one can have put it or one of
/// its libraries there.
/// Errors: kConfig, with each libtorch that was found and why it does not fit.
Libtorch find_libtorch(const BuiltFor& built, const std::filesystem::path& executable,
                       const base::Environment& environment,
                       const std::function<std::filesystem::path()>& python);

/// Returns the absolute paths of the libraries to open, in this order: a library that another one
/// needs is then loaded already under its name, and LD_LIBRARY_PATH is not searched.
std::vector<std::filesystem::path> libraries_of(const Libtorch& torch, const BuiltFor& built);

/// Checks that this process has loaded no library of another libtorch: libraries of `torch` would
/// use it, since it has the same name.
/// Errors: kConfig, with its path.
void require_none_loaded(const Libtorch& torch, const std::vector<std::filesystem::path>& loaded);

/// Checks that the opened library, whose aoti_torch_abi_version() is `abi`, has the minor version
/// of its folder's header. Errors: kConfig.
void require_version(const Libtorch& torch, std::uint64_t abi);

}  // namespace tessera::loader
