// The exchanges of context parallelism: what ranks that share the positions of the same rows send
// each other for attention. As in collectives.h they have no derivatives, which nn/attention has;
// gather_places has one.
//
//   forward              does                                          backward does
//   gather_reached S->R  the keys that own parts reach                 PartSums    P -> S
//   PartSums       P->S  each part's fp32 addend to the keys' owner    (of gather_reached)
//   gather_places  S->R  gather_reached and one addend a rank, as one with its derivative
//   to_heads       S->S  positions of all heads -> heads of all        to_positions
//   to_positions   S->S  the inverse                                   to_heads
//
// Each is one all-to-all, whose sizes follow from the cut and from what parts reach, both the same
// on all ranks: no counts are exchanged. On an axis of one rank nothing is sent. Short symbols: n
// own positions, T those of a row, A anything before them, C anything after. Next:
// ../layout/context_cut.h, ../nn/attention/context_attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "layout/context_cut.h"
#include "layout/range.h"
#include "parallel/axis.h"

namespace tessera::parallel {

struct ContextExchange {
  Axis axis;
  layout::ContextCut cut;
  std::vector<layout::Range> reach;  ///< of each part: the keys that any of its queries sees
  std::string where;
};

/// Returns places as a tensor, i64. The host does not wait for the device.
at::Tensor places_on(const std::vector<std::int64_t>& places, at::Device device);

/// A place of test_hooks::context_exchange (base/test_hooks.h).
struct ContextSite {
  enum class Kind : std::uint8_t {
    kGathered,  ///< what gather_reached gives
    kAddends,   ///< what PartSums::add takes
    kSums,      ///< what PartSums::finish gives
    kHeads,     ///< what to_heads gives
  };
  Kind kind;
  const Axis& axis;
  const layout::ContextCut& cut;
  int part = -1;  ///< of addends
};

/// own: [A, n, C] each, of one dtype -> [A, T, C], with values where the parts of this rank reach
/// and zeros elsewhere. Bytes a rank sends: those of its rows that each other rank reaches.
std::vector<at::Tensor> gather_reached(const std::vector<at::Tensor>& own,
                                       const ContextExchange& exchange,
                                       Direction direction = Direction::kForward);

/// Sums the addends of all parts, in the order of the parts: the result does not depend on which
/// rank has which part.
class PartSums {
 public:
  /// `like`: own results [A, n, C]; sums have `dtype`.
  PartSums(const ContextExchange& exchange, const std::vector<at::Tensor>& like,
           at::ScalarType dtype);
  /// Adds a part's addends [A, size of its reach, C], one a result, converted to `dtype`. A rank
  /// adds its parts in ascending order, each once.
  void add(int part, std::vector<at::Tensor> addends);
  /// Returns the sums [A, n, C]. Collective; must be called once, after all parts.
  std::vector<at::Tensor> finish(Direction direction = Direction::kBackward);

 private:
  /// Calls visit(part, place) for what `from` sends to `to`.
  template <class Visit>
  void blocks(int from, int to, const Visit& visit) const;
  std::int64_t elements(int from, int to) const;

  const ContextExchange exchange_;
  std::vector<at::Tensor> sums_;
  at::Tensor sent_;                           // to other ranks, in rank order
  std::vector<std::int64_t> filled_;          // of each rank's section of it
  std::vector<std::vector<at::Tensor>> own_;  // addends to own keys, in the order of blocks()
};

/// own [A, n, C] -> [A, T, C] as gather_reached gives it, with a derivative: the gradient is this
/// rank's addend in what the first of its parts reaches (its others reach nothing), and the sums
/// are rounded to its dtype. Autograd passes zeros for a result that is not used: all ranks have to
/// issue the same exchanges.
at::Tensor gather_places(const at::Tensor& own, const ContextExchange& exchange);

/// [A, G, n, C] each -> [A, G / ranks, T, C]: own heads of all positions.
std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& own, const Axis& axis,
                                 const layout::ContextCut& cut, const std::string& where,
                                 Direction direction = Direction::kForward);
/// The inverse.
std::vector<at::Tensor> to_positions(const std::vector<at::Tensor>& own, const Axis& axis,
                                     const layout::ContextCut& cut, const std::string& where,
                                     Direction direction = Direction::kForward);

}  // namespace tessera::parallel
