// Axis: the ranks among which a tensor changes its placement, and the dtype of sums on the way.
//
// Transitions (transitions.h) take one; so do layers that own some. The group behind it belongs to
// the rank's own thread, never to the queue of sharding collectives. One rank (no group) is an
// identity everywhere: no collective, no copy. Next: transitions.h.
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
  /// In which addends travel; none = the tensor's own. Sums are formed in fp32 at least and rounded
  /// once.
  std::optional<at::ScalarType> reduce = std::nullopt;

  /// While an exchange over it is waited for, a pass beside this one computes (comm/turns.h). Of
  /// experts' ranks from the start.
  bool gives_turn = false;

  bool alone() const { return size == 1; }
};

/// This rank's axis of a mesh. Collective among its ranks on first use (it may open a group).
Axis axis_of(const Mesh& mesh, std::string_view name,
             std::optional<at::ScalarType> reduce = std::nullopt);

/// Of a transition between placements, and of what it issues.
enum class Direction : std::uint8_t { kForward, kBackward };

/// How a dim is cut over an axis: rank r has the r-th part (layout::part_of).
struct Shard {
  std::int64_t dim = 0;
  std::optional<std::int64_t> total = std::nullopt;  ///< of the whole dim; none: parts are equal
};

}  // namespace tessera::parallel
