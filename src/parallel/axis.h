// Axis: the ranks among which a tensor changes its placement, and the dtype of sums on the wire.
//
// Transitions (transitions.h) take one; so do layers with their own transitions. Its group belongs
// to the rank's thread, never to the queue of sharding collectives. On an axis of one rank (no
// group) everything is an identity: no collective, no copy. Next: transitions.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/mesh.h"

namespace tessera::comm {
class Group;
}

namespace tessera::parallel {

struct Axis {
  std::shared_ptr<comm::Group> group = {};
  std::string name = {};  ///< "tp", "ep"
  int size = 1;
  int rank = 0;
  /// The dtype in which addends are sent; none = that of the tensor. Sums are formed in fp32 at
  /// least and rounded once.
  std::optional<at::ScalarType> reduce = std::nullopt;

  /// Whether the other pass of a pair computes while an exchange over this axis is waited for
  /// (comm/turns.h). Set for axes of experts from the start.
  bool gives_turn = false;

  bool alone() const { return size == 1; }
};

/// Returns this rank's axis of a mesh. The first call is collective among its ranks: it may open a
/// group.
Axis axis_of(const Mesh& mesh, std::string_view name,
             std::optional<at::ScalarType> reduce = std::nullopt);

/// The direction of a transition between placements, and of the collectives that it issues.
enum class Direction : std::uint8_t { kForward, kBackward };

/// A dim that is cut over an axis: rank r has the r-th part (layout::part_of).
struct Shard {
  std::int64_t dim = 0;
  std::optional<std::int64_t> total = std::nullopt;  ///< of the whole dim; none: equal parts
};

}  // namespace tessera::parallel
