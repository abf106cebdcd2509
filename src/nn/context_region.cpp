#include "nn/context_region.h"

#include <utility>

#include "parallel/context_exchange.h"
#include "tessera/error.h"

namespace tessera::nn {

std::shared_ptr<const ContextRows> context_rows(layout::ContextCut cut, int rank,
                                                at::Device device) {
  const auto numbers = std::make_shared<const std::vector<std::int64_t>>(cut.places_of(rank));
  return std::make_shared<const ContextRows>(
      ContextRows{std::move(cut), parallel::places_on(*numbers, device), numbers});
}

at::Tensor own_places(const at::Tensor& x, std::int64_t dim, const ContextRows* rows) {
  if (rows == nullptr || rows->cut.ranks == 1) return x;
  TESSERA_INVARIANT(x.size(dim) == rows->cut.positions, "own positions of ", x.sizes(), " in dim ",
                    dim, ", rows of ", rows->cut.positions);
  return x.index_select(dim, rows->places);
}

}  // namespace tessera::nn
