#include "tessera/context.h"

#include <ATen/ops/arange.h>

#include <exception>
#include <utility>

#include "comm/group.h"
#include "parallel/axis.h"
#include "parallel/context_exchange.h"
#include "tessera/error.h"
#include "tessera/mesh.h"

namespace tessera {

struct ContextParallel::Rows {
  parallel::ContextExchange exchange;
  std::vector<std::int64_t> places;
};

namespace {

layout::ContextCut cut_of(std::int64_t positions, int ranks, const ContextOptions& options) {
  TESSERA_CHECK(positions > 0, ErrorKind::kConfig, "context parallelism: found rows of ", positions,
                " positions, expected at least one");
  TESSERA_CHECK(options.parts >= 0, ErrorKind::kConfig, "ContextOptions::parts: found ",
                options.parts, ", expected 0 or a multiple of ", 2 * ranks);
  if (!options.work.empty()) {
    TESSERA_CHECK(options.parts == 0 || std::cmp_equal(options.parts, options.work.size()),
                  ErrorKind::kConfig, "ContextOptions::work: found ", options.work.size(),
                  " values, expected one for each of ", options.parts, " parts");
    return layout::by_work(positions, ranks, options.work);
  }
  return layout::head_tail(positions, ranks, options.parts > 0 ? options.parts : 2 * ranks);
}

/// Errors: kUsage.
std::int64_t checked_dim(const at::Tensor& x, std::int64_t dim, std::int64_t expected,
                         const char* what) {
  const std::int64_t from_begin = dim < 0 ? dim + x.dim() : dim;
  TESSERA_CHECK(from_begin >= 0 && from_begin < x.dim() && x.size(from_begin) == expected,
                ErrorKind::kUsage, "ContextParallel::", what, ": found ", x.sizes(), " in dim ",
                dim, ", expected ", expected, " positions there");
  return from_begin;
}

/// Returns the cut that all ranks of the axis have. Errors: those of any rank, on all of them;
/// kUsage where a rank has another cut. Collective.
layout::ContextCut agreed_cut(const parallel::Axis& axis, int world_rank, std::int64_t positions,
                              const ContextOptions& options) {
  if (axis.alone()) return cut_of(positions, axis.size, options);
  layout::ContextCut cut;
  std::exception_ptr refusal;
  try {
    cut = cut_of(positions, axis.size, options);
  } catch (const Error&) {
    refusal = std::current_exception();
  }
  refusal = comm::shared_refusal(*axis.group, world_rank, refusal, "ContextParallel");
  if (refusal) std::rethrow_exception(refusal);
  const auto found =
      comm::first_that_differs(*axis.group, layout::to_string(cut), "ContextParallel");
  TESSERA_CHECK(!found, ErrorKind::kUsage, "ContextParallel: rank ", found->rank, " of axis ",
                axis.name, " cuts ", found->of_rank, ", expected as rank 0 ", found->of_first,
                "; give all of them the same positions and ContextOptions");
  return cut;
}

}  // namespace

ContextParallel::ContextParallel(const Mesh& mesh, std::int64_t positions,
                                 const ContextOptions& options) {
  auto axis = parallel::axis_of(mesh, options.axis);
  const int rank = axis.rank;
  const int in_world = mesh.ranks_of({options.axis})[static_cast<std::size_t>(rank)];
  auto cut = agreed_cut(axis, in_world, positions, options);
  auto places = cut.places_of(rank);
  // A rank gives one addend to the gradient of every position.
  std::vector<layout::Range> reach(static_cast<std::size_t>(cut.parts()));
  for (int each = 0; each < cut.ranks; ++each) {
    reach[static_cast<std::size_t>(cut.parts_of(each).front())] = {0, positions};
  }
  rows_ = std::make_shared<const Rows>(
      Rows{{std::move(axis), std::move(cut), std::move(reach), "ContextParallel::gather"},
           std::move(places)});
}

std::int64_t ContextParallel::positions() const { return rows_->exchange.cut.positions; }
std::int64_t ContextParallel::own_positions() const {
  return rows_->exchange.cut.positions_of_rank();
}
const std::vector<std::int64_t>& ContextParallel::places() const { return rows_->places; }

at::Tensor ContextParallel::cut(const at::Tensor& whole, std::int64_t dim) const {
  const std::int64_t at = checked_dim(whole, dim, positions(), "cut");
  return whole.index_select(at, parallel::places_on(places(), whole.device()));
}

at::Tensor ContextParallel::gather(const at::Tensor& own, std::int64_t dim) const {
  const std::int64_t at = checked_dim(own, dim, own_positions(), "gather");
  if (rows_->exchange.axis.alone()) return own;
  const auto before = own.sizes().slice(0, static_cast<std::size_t>(at));
  const auto after = own.sizes().slice(static_cast<std::size_t>(at) + 1);
  const at::Tensor flat =
      own.reshape({c10::multiply_integers(before), own_positions(), c10::multiply_integers(after)});
  std::vector<std::int64_t> sizes = own.sizes().vec();
  sizes[static_cast<std::size_t>(at)] = positions();
  return parallel::gather_places(flat, rows_->exchange).view(sizes);
}

at::Tensor ContextParallel::causal_mask(at::Device device) const {
  const at::Tensor keys = at::arange(positions(), at::TensorOptions(at::kLong).device(device));
  return keys.unsqueeze(0).le(parallel::places_on(places(), device).unsqueeze(1));
}

}  // namespace tessera
