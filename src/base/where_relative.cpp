#include "base/where_relative.h"

#include <system_error>

#include "base/text/printable.h"

namespace tessera {

std::string where_relative(const std::filesystem::path& path) {
  std::error_code gone;
  const auto folder = std::filesystem::current_path(gone);
  if (path.is_absolute() || gone) return "";
  return concat(" in the working folder ", shown(folder));
}

}  // namespace tessera
