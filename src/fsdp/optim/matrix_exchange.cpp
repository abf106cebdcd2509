#include "fsdp/optim/matrix_exchange.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

using Piece = MatrixExchange::Piece;

bool same_elements(const Piece& a, const Piece& b) {
  return a.matrix == b.matrix && a.box == b.box && a.in_box == b.in_box;
}

/// Assigns matrices, the largest cost first, to the rank with the least work so far; the first rank
/// among equals.
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

/// Marks one piece of each set of copies among the pieces [begin, end) of one matrix: the owner's
/// piece where it has one, else that of the next rank after it. Returns the elements of all marked
/// pieces.
std::int64_t mark_sent(std::vector<Piece>& pieces, std::size_t begin, std::size_t end, int owner,
                       int ranks) {
  using Dims = std::vector<std::int64_t>;
  using Key = std::tuple<const Dims&, const Dims&, std::int64_t, std::int64_t, int>;
  std::vector<std::size_t> order(end - begin);
  std::iota(order.begin(), order.end(), begin);
  std::ranges::sort(order, {}, [&](std::size_t i) {
    const Piece& piece = pieces[i];
    const int distance = (piece.holder - owner + ranks) % ranks;
    return Key(piece.box.offset, piece.box.size, piece.in_box.begin, piece.in_box.end, distance);
  });
  std::int64_t marked = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    Piece& piece = pieces[order[i]];
    piece.sent = i == 0 || !same_elements(piece, pieces[order[i - 1]]);
    if (piece.sent) marked += piece.in_box.size();
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

/// Lists the chunks of a buffer by peer, those of one peer in the order of pieces.
template <class Takes, class PeerOf>
void lay_out(const MatrixExchange& exchange, const Takes& takes, const PeerOf& peer_of,
             std::vector<AllToAllPlan::Chunk>& chunks, std::vector<std::int64_t>& counts) {
  std::vector<std::vector<std::size_t>> by_peer(static_cast<std::size_t>(exchange.ranks));
  for (std::size_t i = 0; i < exchange.pieces.size(); ++i) {
    const auto& piece = exchange.pieces[i];
    if (takes(piece)) by_peer[static_cast<std::size_t>(peer_of(piece))].push_back(i);
  }
  std::int64_t at = 0;
  for (const auto& of_peer : by_peer) {
    const auto begin = at;
    for (const auto piece : of_peer) {
      chunks.push_back({piece, at});
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

MatrixParameter matrix_parameter(const GradContract& contract, const MatrixForm& form) {
  return {contract.name, contract.layout, contract.shape, form, form.fused, contract.state};
}

MatrixExchange plan_exchange(const std::vector<MatrixParameter>& parameters,
                             const std::vector<std::vector<HeldElements>>& held) {
  MatrixExchange exchange;
  exchange.ranks = static_cast<int>(held.size());
  std::vector<double> costs;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [count, sides] = parameters[i].matrices;
    if (parameters[i].state == DType::kFloat64) exchange.dtype = DType::kFloat64;
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

AllToAllPlan to_owners(const MatrixExchange& exchange, int rank) {
  AllToAllPlan plan;
  const auto owner = [&](const Piece& piece) { return exchange.matrices[piece.matrix].owner; };
  const auto holder = [](const Piece& piece) { return piece.holder; };
  lay_out(
      exchange, [&](const Piece& piece) { return piece.sent && piece.holder == rank; }, owner,
      plan.out, plan.sends);
  lay_out(
      exchange, [&](const Piece& piece) { return piece.sent && owner(piece) == rank; }, holder,
      plan.in, plan.receives);
  return plan;
}

AllToAllPlan to_holders(const MatrixExchange& exchange, int rank) {
  AllToAllPlan plan;
  const auto owner = [&](const Piece& piece) { return exchange.matrices[piece.matrix].owner; };
  const auto holder = [](const Piece& piece) { return piece.holder; };
  lay_out(
      exchange, [&](const Piece& piece) { return owner(piece) == rank; }, holder, plan.out,
      plan.sends);
  lay_out(
      exchange, [&](const Piece& piece) { return piece.holder == rank; }, owner, plan.in,
      plan.receives);
  return plan;
}

std::vector<std::int64_t> sent_bytes(const MatrixExchange& exchange) {
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(exchange.ranks), 0);
  for (const Piece& piece : exchange.pieces) {
    const int owner = exchange.matrices[piece.matrix].owner;
    if (piece.holder == owner) continue;
    const std::int64_t one_way = piece.in_box.size() * size_of(exchange.dtype);
    if (piece.sent) bytes[static_cast<std::size_t>(piece.holder)] += one_way;
    bytes[static_cast<std::size_t>(owner)] += one_way;
  }
  return bytes;
}

}  // namespace tessera::fsdp
