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

std::string first_difference(const std::vector<std::vector<std::string>>& names_by_rank) {
  std::size_t longest = 0;
  for (const auto& names : names_by_rank) longest = std::max(longest, names.size());
  for (std::size_t i = 0; i < longest; ++i) {
    for (std::size_t rank = 1; rank < names_by_rank.size(); ++rank) {
      const auto entry = [&](std::size_t r) {
        return i < names_by_rank[r].size() ? names_by_rank[r][i] : std::string("nothing more");
      };
      if (entry(rank) == entry(0)) continue;
      return concat("entry ", i + 1, ": rank 0 entered ", entry(0), ", rank ", rank, " entered ",
                    entry(rank));
    }
  }
  return "";
}

}  // namespace tessera::fsdp
