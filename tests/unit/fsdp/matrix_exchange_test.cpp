// Matrices are assembled whole and sent back, for any sharing: checked on plain vectors.
#include "fsdp/optim/matrix_exchange.h"

#include <numeric>
#include <random>

#include "support/test.h"

namespace tessera::test::matrix_exchange_test {
namespace {

using namespace tessera::fsdp;
using Numbers = std::vector<std::int64_t>;

struct Case {
  std::vector<MatrixParameter> parameters;
  std::vector<int> cut;  // dim over tp, -1: whole on each
  int shards = 1, tensor = 1, replicas = 1;
  int ranks() const { return shards * tensor * replicas; }
};

/// The numbers of the elements, in the whole of all parameters, that a rank of tp has of one.
Numbers local_numbers(const Case& c, std::size_t index, int coordinate, std::int64_t first) {
  const auto& shape = c.parameters[index].shape;
  const int cut = c.cut[index];
  Numbers numbers;
  Numbers at(shape.size(), 0);
  const auto numel = product(shape);
  for (std::int64_t i = 0; i < numel; ++i) {
    auto rest = i;
    for (auto d = shape.size(); d-- > 0;) {
      at[d] = rest % shape[d];
      rest /= shape[d];
    }
    if (cut >= 0 && c.tensor > 1) {
      const auto side = shape[static_cast<std::size_t>(cut)] / c.tensor;
      if (at[static_cast<std::size_t>(cut)] / side != coordinate) continue;
    }
    numbers.push_back(first + i);
  }
  return numbers;
}

Case random_case(std::mt19937& random) {
  Case c;
  c.shards = 1 + static_cast<int>(random() % 3);
  c.tensor = 1 + static_cast<int>(random() % 2);
  c.replicas = 1 + static_cast<int>(random() % 2);
  const auto count = 1 + random() % 5;
  for (std::size_t i = 0; i < count; ++i) {
    MatrixParameter parameter;
    parameter.name = concat("p", i);
    const auto side = [&] { return static_cast<std::int64_t>(2 * (1 + random() % 7)); };
    const bool stacked = random() % 2 == 0;
    const Numbers sides{side(), side()};
    parameter.matrices = {stacked ? 2 : 1, sides};
    parameter.shape = sides;
    if (stacked) parameter.shape.insert(parameter.shape.begin(), 2);
    c.cut.push_back(static_cast<int>(random() % (parameter.shape.size() + 1)) - 1);
    if (c.tensor > 1) {
      parameter.layout.axes = {c.cut.back() < 0
                                   ? AxisPlacement::partial("tp", c.tensor)
                                   : AxisPlacement::shard("tp", c.tensor, c.cut.back())};
    }
    c.parameters.push_back(std::move(parameter));
  }
  return c;
}

/// The elements of each parameter that rank (replica, shard, tp) holds, and their numbers; tp is
/// innermost.
struct Held {
  std::vector<HeldElements> elements;
  std::vector<Numbers> numbers;
};

Held held_by(const Case& c, int rank) {
  Held held;
  const int coordinate = rank % c.tensor;
  const int shard = rank / c.tensor % c.shards;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < c.parameters.size(); ++i) {
    const auto local = local_numbers(c, i, coordinate, first);
    first += product(c.parameters[i].shape);
    // Replicated over tp: the ranks of both axes share it.
    const bool both = c.cut[i] < 0;
    const auto range = layout::part_of(std::ssize(local), both ? c.shards * c.tensor : c.shards,
                                       both ? shard * c.tensor + coordinate : shard);
    HeldElements elements;
    if (c.tensor > 1) elements.coordinates = {coordinate};
    elements.elements = range;
    held.elements.push_back(elements);
    held.numbers.emplace_back(local.begin() + range.begin, local.begin() + range.end);
  }
  return held;
}

/// Returns the numbers that arrive at each rank, where each sends `out`.
std::vector<Numbers> sent(const std::vector<AllToAllPlan>& plans, const std::vector<Numbers>& out) {
  const auto ranks = plans.size();
  std::vector<Numbers> in(ranks);
  for (std::size_t to = 0; to < ranks; ++to) {
    for (std::size_t from = 0; from < ranks; ++from) {
      EXPECT_EQ(plans[from].sends[to], plans[to].receives[from]);
      const auto begin =
          std::accumulate(plans[from].sends.begin(),
                          plans[from].sends.begin() + static_cast<int>(to), std::int64_t{0});
      const auto first = out[from].begin() + begin;
      in[to].insert(in[to].end(), first, first + plans[from].sends[to]);
    }
  }
  return in;
}

/// sent_bytes() counts what the buffers of both plans have for other ranks.
void expect_bytes_of(const MatrixExchange& exchange, const std::vector<AllToAllPlan>& there,
                     const std::vector<AllToAllPlan>& back) {
  Numbers bytes;
  for (std::size_t rank = 0; rank < there.size(); ++rank) {
    bytes.push_back(0);
    for (std::size_t to = 0; to < there.size(); ++to) {
      if (to != rank) bytes.back() += 4 * (there[rank].sends[to] + back[rank].sends[to]);
    }
  }
  EXPECT_EQ(sent_bytes(exchange), bytes);
}

TEST(MatrixExchange, BringsEachMatrixWholeToOneRankAndItsResultToAllThatHoldIt) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const Case c = random_case(random);
    std::vector<Held> held;
    std::vector<std::vector<HeldElements>> elements;
    for (int rank = 0; rank < c.ranks(); ++rank) {
      held.push_back(held_by(c, rank));
      elements.push_back(held.back().elements);
    }
    const auto exchange = plan_exchange(c.parameters, elements);
    EXPECT_EQ(exchange, plan_exchange(c.parameters, elements));
    std::vector<AllToAllPlan> there, back;
    std::vector<Numbers> out;
    for (int rank = 0; rank < c.ranks(); ++rank) {
      there.push_back(to_owners(exchange, rank));
      back.push_back(to_holders(exchange, rank));
      auto& numbers = out.emplace_back();
      for (const auto& [index, place] : there.back().out) {
        const auto& piece = exchange.pieces[index];
        EXPECT_EQ(place, std::ssize(numbers));
        const auto& mine =
            held[static_cast<std::size_t>(rank)].numbers[exchange.matrices[piece.matrix].parameter];
        numbers.insert(numbers.end(), mine.begin() + piece.local.begin,
                       mine.begin() + piece.local.end);
      }
    }
    const auto arrived = sent(there, out);
    // The numbers of a matrix, in its order; results are their negatives.
    std::vector<Numbers> results(static_cast<std::size_t>(c.ranks()));
    for (std::size_t rank = 0; rank < results.size(); ++rank) {
      std::map<std::size_t, Numbers> matrices;
      for (const auto& [index, place] : there[rank].in) {
        const auto& piece = exchange.pieces[index];
        const auto& shape = c.parameters[exchange.matrices[piece.matrix].parameter].matrices.shape;
        auto& matrix = matrices[piece.matrix];
        matrix.resize(static_cast<std::size_t>(product(shape)), -1);
        for (std::int64_t i = 0; i < piece.in_box.size(); ++i) {
          const auto position = position_in_tensor(piece.box, shape, piece.in_box.begin + i);
          EXPECT_EQ(matrix[static_cast<std::size_t>(position)], -1) << "sent twice";
          matrix[static_cast<std::size_t>(position)] =
              arrived[rank][static_cast<std::size_t>(place + i)];
        }
      }
      for (const auto& [number, matrix] : matrices) {
        for (std::size_t i = 0; i < matrix.size(); ++i) {
          ASSERT_EQ(matrix[i], matrix.front() + static_cast<std::int64_t>(i))
              << "matrix " << number;
        }
      }
      for (const auto& [index, place] : back[rank].out) {
        const auto& piece = exchange.pieces[index];
        const auto& shape = c.parameters[exchange.matrices[piece.matrix].parameter].matrices.shape;
        const auto& matrix = matrices.at(piece.matrix);
        EXPECT_EQ(place, std::ssize(results[rank]));
        for (std::int64_t i = 0; i < piece.in_box.size(); ++i) {
          const auto position = position_in_tensor(piece.box, shape, piece.in_box.begin + i);
          results[rank].push_back(-matrix[static_cast<std::size_t>(position)]);
        }
      }
    }
    expect_bytes_of(exchange, there, back);
    const auto returned = sent(back, results);
    for (std::size_t rank = 0; rank < results.size(); ++rank) {
      auto left = held[rank].numbers;
      for (const auto& [index, place] : back[rank].in) {
        const auto& piece = exchange.pieces[index];
        auto& mine = left[exchange.matrices[piece.matrix].parameter];
        for (std::int64_t i = 0; i < piece.in_box.size(); ++i) {
          auto& number = mine[static_cast<std::size_t>(piece.local.begin + i)];
          ASSERT_EQ(returned[rank][static_cast<std::size_t>(place + i)], -number);
          number = 0;
        }
      }
      for (const auto& numbers : left) {
        EXPECT_TRUE(std::ranges::all_of(numbers, [](auto number) { return number == 0; }));
      }
    }
  }
}

TEST(MatrixExchange, AllTravelInFloat64WhereTheStateOfOneIs) {
  MatrixParameter narrow{.name = "narrow", .layout = {}, .shape = {2, 3}, .matrices = {1, {2, 3}}};
  MatrixParameter wide = narrow;
  narrow.state = DType::kBFloat16;
  wide.state = DType::kFloat64;
  const std::vector<std::vector<HeldElements>> held{{{{}, {0, 2}}, {{}, {0, 6}}},
                                                    {{{}, {2, 6}}, {}}};
  // Equal work: rank 0 has the first, rank 1 the second.
  const auto of = [&](const MatrixParameter& second) {
    return sent_bytes(plan_exchange({narrow, second}, held));
  };
  EXPECT_EQ(of(narrow), (Numbers{4 * (4 + 6), 4 * (4 + 6)}));
  EXPECT_EQ(of(wide), (Numbers{8 * (4 + 6), 8 * (4 + 6)}));
}

TEST(MatrixExchange, NoRankHasMoreThanOneMatrixAboveTheMean) {
  std::mt19937 random(11);
  for (int round = 0; round < 100; ++round) {
    Case c = random_case(random);
    std::vector<std::vector<HeldElements>> elements;
    for (int rank = 0; rank < c.ranks(); ++rank) elements.push_back(held_by(c, rank).elements);
    const auto exchange = plan_exchange(c.parameters, elements);
    std::vector<double> work(static_cast<std::size_t>(c.ranks()), 0.0);
    double all = 0, largest = 0;
    for (const auto& matrix : exchange.matrices) {
      const auto& shape = c.parameters[matrix.parameter].matrices.shape;
      const double cost = orthogonalization_cost(shape[0], shape[1]);
      work[static_cast<std::size_t>(matrix.owner)] += cost;
      all += cost;
      largest = std::max(largest, cost);
    }
    EXPECT_LE(*std::max_element(work.begin(), work.end()), all / c.ranks() + largest);
  }
}

}  // namespace
}  // namespace tessera::test::matrix_exchange_test
