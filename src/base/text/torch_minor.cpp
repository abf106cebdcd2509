#include "base/text/torch_minor.h"

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::base {

std::string torch_minor(std::uint64_t abi) {
  return concat((abi >> 56U) & 0xffU, ".", (abi >> 48U) & 0xffU);
}

void require_torch_minor(std::uint64_t loaded, std::uint64_t built,
                         const std::filesystem::path& library) {
  TESSERA_CHECK(
      torch_minor(loaded) == torch_minor(built), ErrorKind::kConfig, "libtorch: found ",
      torch_minor(loaded), " in ", shown(library), ", expected ", torch_minor(built),
      ", with which this tessera was built; let the program load such a one "
      "(LD_LIBRARY_PATH comes before the folder that it was linked with), or build tessera "
      "with another");
}

}  // namespace tessera::base
