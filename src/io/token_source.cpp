#include "io/token_source.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera {

void TokenSource::copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const {
  check_range(begin, out.size());
  std::fill(out.begin(), out.end(), std::uint8_t{1});
}

void TokenSource::check_range(std::int64_t begin, std::size_t count) const {
  const std::int64_t total = num_tokens();
  TESSERA_CHECK(begin >= 0 && begin <= total && static_cast<std::int64_t>(count) <= total - begin,
                ErrorKind::kUsage, name(), ": tokens from ", begin, ", ", count,
                " of them, do not lie inside its ", total);
}

}  // namespace tessera
