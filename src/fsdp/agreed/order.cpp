#include "fsdp/agreed/order.h"

#include <algorithm>

#include "base/hash.h"
#include "tessera/error.h"

namespace tessera::fsdp {

std::uint64_t Trace::hash() const {
  Hasher hash;
  for (const auto unit : units) hash.add(std::uint64_t{unit});
  hash.add(std::uint64_t{units.size()});
  for (const auto position : exits) hash.add(std::uint64_t{position});
  for (const auto checkpoint : checkpoints) hash.add(std::uint64_t{checkpoint});
  return std::max<std::uint64_t>(hash.digest(), 1);  // 0 can stand for "no trace"
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
