#include "fsdp/optim/matrix_exchange.h"

#include <algorithm>
#include <numeric>

#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

using Piece = MatrixExchange::Piece;

bool same_elements(const Piece& a, const Piece& b) {
  return a.matrix == b.matrix && a.box == b.box && a.in_box == b.in_box;
}

/// Dearest first, each to the rank with the least so far; the first among equals.
std::vector<int> owners_of(const std::vector<double>& costs, int ranks) {
  std::vector<std::size_t> order(costs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return costs[a] != costs[b] ? costs[a] > costs[b] : a < b;
  });
  std::vector<double> work(static_cast<std::size_t>(ranks), 0.0);
  std::vector<int> owners(costs.size(), 0);
  for (const auto matrix : order) {
    const auto least = std::min_element(work.begin(), work.end());
    *least += costs[matrix];
    owners[matrix] = static_cast<int>(least - work.begin());
  }
  return owners;
}

/// Marks, among the pieces [begin, end) of one matrix, one of each set of copies: the owner's own
/// where it has one, else that of the next rank behind it. Returns the elements of all marked.
std::int64_t mark_sent(std::vector<Piece>& pieces, std::size_t begin, std::size_t end, int owner,
                       int ranks) {
  const auto distance = [&](const Piece& piece) { return (piece.holder - owner + ranks) % ranks; };
  std::int64_t marked = 0;
  for (auto i = begin; i < end; ++i) {
    bool nearest = true;
    for (auto other = begin; other < end && nearest; ++other) {
      nearest = other == i || !same_elements(pieces[i], pieces[other]) ||
                distance(pieces[i]) < distance(pieces[other]);
    }
    pieces[i].sent = nearest;
    if (nearest) marked += pieces[i].in_box.size();
  }
  return marked;
}

std::vector<Piece> pieces_of(const MatrixParameter& parameter, std::size_t first_matrix,
                             const std::vector<std::vector<HeldElements>>& held,
                             std::size_t index) {
  std::vector<Piece> pieces;
  for (std::size_t rank = 0; rank < held.size(); ++rank) {
    const auto& part = held[rank].at(index);
    if (part.elements.empty()) continue;
    for (const auto& piece : layout::pieces(parameter.layout, parameter.shape, parameter.matrices,
                                            part.coordinates, part.elements)) {
      pieces.push_back(
          {first_matrix + piece.tensor,
           static_cast<int>(rank),
           {piece.local.begin - part.elements.begin, piece.local.end - part.elements.begin},
           piece.box,
           piece.in_box});
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    if (a.matrix != b.matrix) return a.matrix < b.matrix;
    return a.holder != b.holder ? a.holder < b.holder : a.local.begin < b.local.begin;
  });
  return pieces;
}

/// Stretches by peer, those of one peer in the order of pieces.
template <class Takes, class PeerOf>
void lay_out(const MatrixExchange& exchange, const Takes& takes, const PeerOf& peer_of,
             std::vector<Crossing::Stretch>& stretches, std::vector<std::int64_t>& counts) {
  std::vector<std::vector<std::size_t>> by_peer(static_cast<std::size_t>(exchange.ranks));
  for (std::size_t i = 0; i < exchange.pieces.size(); ++i) {
    const auto& piece = exchange.pieces[i];
    if (takes(piece)) by_peer[static_cast<std::size_t>(peer_of(piece))].push_back(i);
  }
  std::int64_t at = 0;
  for (const auto& of_peer : by_peer) {
    const auto begin = at;
    for (const auto piece : of_peer) {
      stretches.push_back({piece, at});
      at += exchange.pieces[piece].in_box.size();
    }
    counts.push_back(at - begin);
  }
}

}  // namespace

double orthogonalization_cost(std::int64_t rows, std::int64_t columns) {
  const auto small = static_cast<double>(std::min(rows, columns));
  const auto large = static_cast<double>(std::max(rows, columns));
  return small * small * (2 * large + small);
}

MatrixExchange plan_exchange(const std::vector<MatrixParameter>& parameters,
                             const std::vector<std::vector<HeldElements>>& held) {
  MatrixExchange exchange;
  exchange.ranks = static_cast<int>(held.size());
  std::vector<double> costs;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [count, sides] = parameters[i].matrices;
    const auto first = exchange.matrices.size();
    const auto each = parameters[i].fused.shape_of_each(sides);
    const double cost = parameters[i].fused.count * orthogonalization_cost(each.at(0), each.at(1));
    for (std::int64_t k = 0; k < count; ++k) {
      exchange.matrices.push_back({i, 0});
      costs.push_back(cost);
    }
    const auto pieces = pieces_of(parameters[i], first, held, i);
    exchange.pieces.insert(exchange.pieces.end(), pieces.begin(), pieces.end());
  }
  const auto owners = owners_of(costs, exchange.ranks);
  std::size_t begin = 0;
  for (std::size_t matrix = 0; matrix < exchange.matrices.size(); ++matrix) {
    auto& of = exchange.matrices[matrix];
    of.owner = owners[matrix];
    auto end = begin;
    while (end < exchange.pieces.size() && exchange.pieces[end].matrix == matrix) ++end;
    const auto found = mark_sent(exchange.pieces, begin, end, of.owner, exchange.ranks);
    const auto& parameter = parameters[of.parameter];
    TESSERA_INVARIANT(found == product(parameter.matrices.shape), "a matrix of ", parameter.name,
                      ": found ", found, " of ", product(parameter.matrices.shape),
                      " elements on its ranks");
    begin = end;
  }
  return exchange;
}

Crossing to_owners(const MatrixExchange& exchange, int rank) {
  Crossing crossing;
  const auto owner = [&](const Piece& piece) { return exchange.matrices[piece.matrix].owner; };
  const auto holder = [](const Piece& piece) { return piece.holder; };
  lay_out(
      exchange, [&](const Piece& piece) { return piece.sent && piece.holder == rank; }, owner,
      crossing.out, crossing.sends);
  lay_out(
      exchange, [&](const Piece& piece) { return piece.sent && owner(piece) == rank; }, holder,
      crossing.in, crossing.receives);
  return crossing;
}

Crossing to_holders(const MatrixExchange& exchange, int rank) {
  Crossing crossing;
  const auto owner = [&](const Piece& piece) { return exchange.matrices[piece.matrix].owner; };
  const auto holder = [](const Piece& piece) { return piece.holder; };
  lay_out(
      exchange, [&](const Piece& piece) { return owner(piece) == rank; }, holder, crossing.out,
      crossing.sends);
  lay_out(
      exchange, [&](const Piece& piece) { return piece.holder == rank; }, owner, crossing.in,
      crossing.receives);
  return crossing;
}

}  // namespace tessera::fsdp
