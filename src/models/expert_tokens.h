// Tokens on their way to experts: what else a forward asks of its routers (RoutingRequest), their
// answer (RouterLoad), which of a layer's tokens a tensor-parallel rank routes and sends to
// experts, and how the results become the stream again (ExpertTokens).
//
// There are four modes, by the degrees (ParallelDims). One rank, or shards of the sequence: the
// rank's tokens are local, nothing to do. A whole stream, experts whole: the rank's part of the
// tokens, whose results are put among zeros and summed. Experts cut over tp: all tokens, whose
// results are addends. Experts whole, router on all tokens: all are routed, the rank's part is
// sent. So one sum at the exit suffices, and everything between entry and exit that all ranks see
// is Replicate, everything that they add Partial. Source: torchtitan PR 2416; docs/parallelism.md.
// Short symbols: B rows, T positions, M tokens, H hidden, E experts, K experts a token. Next:
// moe_layer.h, language_model.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "models/model_axes.h"
#include "moe/routing.h"

namespace tessera::models {

enum class RouterStatistics : std::uint8_t {
  kNone,
  kCounts,            ///< how many tokens each expert gets
  kAndProbabilities,  ///< and the routers' probabilities, as the auxiliary loss needs them
};

struct RoutingRequest {
  std::optional<at::Tensor> imposed;  ///< [M, K] i64 in the place of the layer's own choice
  RouterStatistics statistics = RouterStatistics::kNone;
  std::optional<at::Tensor> fillers = {};  ///< [M, 1] bool: tokens that count in no statistics

  template <class F>
  void visit_tensors(F&& f) {
    if (imposed) f(*imposed);
    if (fillers) f(*fillers);
  }
};

/// Sums over the tokens of one forward on this rank; undefined where they were not asked for, or in
/// a layer without experts.
struct RouterLoad {
  at::Tensor counts;  ///< [E] i64: tokens that chose the expert
  /// [E] fp32, with a gradient: of the softmax over all experts, or of sigmoids their shares.
  at::Tensor probabilities;

  template <class F>
  void visit_tensors(F&& f) {
    f(counts);
    f(probabilities);
  }
};

class ExpertTokens {
 public:
  explicit ExpertTokens(const ModelAxes& axes);

  /// Every rank of the region sees the tokens of all: x is entered once, and the layer's exit sums.
  bool sums_at_exit() const { return mode_ != DispatchMode::kOwn; }
  /// The router sees all tokens, on every rank the same.
  bool routes_all() const {
    return mode_ == DispatchMode::kAllCut || mode_ == DispatchMode::kAllRouted;
  }

  /// x of the stream [B, t, H] -> what the region's ranks share: `all` as TensorRegion::enter gives
  /// it, where the layer's exit sums; else x.
  at::Tensor enter(const at::Tensor& x) const;
  /// Whether shared experts also compute with the result of enter().
  enum class SharedExperts : std::uint8_t { kNone, kPresent };
  /// Returns the tokens that the router sees [M, H]; `entered` is enter(x). With shared experts
  /// they are taken from `entered`, whose backward sums anyway.
  at::Tensor routed(const at::Tensor& x, const at::Tensor& entered,
                    SharedExperts shared = SharedExperts::kNone) const;
  /// Cuts values by token [B*T, N], imposed indices or fillers, down to those of the tokens that
  /// the router sees. Errors: kFormat for another number of tokens.
  std::optional<at::Tensor> values_of_routed(const std::optional<at::Tensor>& values,
                                             std::int64_t rows, std::int64_t positions) const;
  /// Returns those of the routed tokens, or of their routing, that this rank sends to experts.
  at::Tensor sent(const at::Tensor& tokens) const;
  moe::Routing sent(const moe::Routing& routing) const;
  /// Takes the experts' results for the sent tokens [m, H] -> an addend [B, T, H] (sums_at_exit),
  /// else [B, t, H] of the stream.
  at::Tensor returned(const at::Tensor& y, at::IntArrayRef shape) const;
  /// An addend of every rank -> the stream; the stream itself where nothing is summed.
  at::Tensor leave(const at::Tensor& addend) const;

  /// The load of this rank's tokens, so that the sum over all ranks counts every token once.
  RouterLoad counted(RouterLoad load) const;

 private:
  enum class DispatchMode : std::uint8_t {
    kOwn,        ///< own tokens
    kSliced,     ///< a part of a whole stream
    kAllCut,     ///< all tokens, experts cut over the axis
    kAllRouted,  ///< all routed, a part sent
  };

  nn::TensorRegion region_;
  DispatchMode mode_ = DispatchMode::kOwn;
};

}  // namespace tessera::models
