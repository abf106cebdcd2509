#include "fsdp/order.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera::fsdp {

std::uint64_t Trace::hash() const {
  // FNV-1a over the ids; 0 is never returned, so that it can stand for "no trace".
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  const auto add = [&](std::uint64_t value) {
    for (int byte = 0; byte < 4; ++byte) {
      hash ^= (value >> (8 * byte)) & 0xffU;
      hash *= 0x100000001b3ULL;
    }
  };
  for (const auto unit : units) add(unit);
  add(units.size());
  for (const auto position : exits) add(position);
  for (const auto checkpoint : checkpoints) add(checkpoint);
  return hash == 0 ? 1 : hash;
}

std::string first_difference(const std::vector<std::string>& names_of_first, int rank,
                             const std::vector<std::string>& names) {
  const auto entry = [](const std::vector<std::string>& list, std::size_t i) {
    return i < list.size() ? list[i] : std::string("nothing more");
  };
  for (std::size_t i = 0; i < std::max(names_of_first.size(), names.size()); ++i) {
    if (entry(names, i) == entry(names_of_first, i)) continue;
    return concat("entry ", i + 1, ": rank 0 entered ", entry(names_of_first, i), ", rank ", rank,
                  " entered ", entry(names, i));
  }
  return "";
}

}  // namespace tessera::fsdp
