#include "nn/context_region.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "tessera/error.h"

namespace tessera::nn {

std::shared_ptr<const ContextRows> context_rows(layout::ContextCut cut, int rank,
                                                at::Device device) {
  std::vector<std::int64_t> places = cut.places_of(rank);
  const at::Tensor on_host = at::from_blob(
      places.data(), {static_cast<std::int64_t>(places.size())}, at::TensorOptions(at::kLong));
  return std::make_shared<const ContextRows>(
      ContextRows{std::move(cut), on_host.to(at::TensorOptions(at::kLong).device(device),
                                             /*non_blocking=*/false, /*copy=*/true)});
}

at::Tensor own_places(const at::Tensor& x, std::int64_t dim, const ContextRows* rows) {
  if (rows == nullptr) return x;
  TESSERA_INVARIANT(x.size(dim) == rows->cut.positions, "own positions of ", x.sizes(), " in dim ",
                    dim, ", rows of ", rows->cut.positions);
  return x.index_select(dim, rows->places);
}

}  // namespace tessera::nn
