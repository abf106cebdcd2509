#include "train/dry/expert_loads.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "base/mapped_file.h"
#include "base/text/count_text.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"

namespace tessera::train {
namespace {

/// "list 2: ", from 0; the one list of all layers has no number.
std::string place_of(const ExpertLoads& loads, std::size_t list) {
  return loads.layers.size() == 1 ? std::string() : concat("list ", list, ": ");
}

void require_shares(std::span<const double> shares, std::string_view where) {
  for (std::size_t expert = 0; expert < shares.size(); ++expert) {
    TESSERA_CHECK(std::isfinite(shares[expert]) && shares[expert] >= 0, ErrorKind::kFormat, where,
                  "found ", shares[expert], " for expert ", expert,
                  ", expected a share, a finite number from 0 on");
  }
  TESSERA_CHECK(std::ranges::any_of(shares, [](double share) { return share > 0; }),
                ErrorKind::kFormat, where, "found 0 for every expert, expected a share above 0");
}

std::vector<double> numbers_of(const nlohmann::json& list, std::string_view where) {
  std::vector<double> numbers;
  for (const nlohmann::json& item : list) {
    TESSERA_CHECK(item.is_number(), ErrorKind::kFormat, where, "found ", json_line(item),
                  " for expert ", numbers.size(), ", expected a number");
    numbers.push_back(item.get<double>());
  }
  return numbers;
}

/// Parts of `choices` by shares, none above `tokens`.
std::vector<double> quotas_of(std::span<const double> shares, std::int64_t tokens,
                              std::int64_t choices) {
  const double largest = std::ranges::max(shares);  // sums of any finite shares stay finite
  std::vector<double> quotas(shares.size(), 0.0);
  std::vector<bool> is_full(shares.size(), false);
  double left = static_cast<double>(choices);
  const auto most = static_cast<double>(tokens);
  while (true) {
    double sum = 0;
    std::int64_t open = 0;
    for (std::size_t e = 0; e < shares.size(); ++e) {
      if (is_full[e]) continue;
      sum += shares[e] / largest;
      ++open;
    }
    if (open == 0) return quotas;
    double given = 0;
    for (std::size_t e = 0; e < shares.size(); ++e) {
      if (is_full[e]) continue;
      const double part = sum > 0 ? shares[e] / largest / sum : 1.0 / static_cast<double>(open);
      quotas[e] = left * part;
      if (quotas[e] <= most) continue;
      quotas[e] = most;
      is_full[e] = true;
      given += most;
    }
    if (given == 0) return quotas;
    left -= given;
  }
}

/// A step through 0 to count - 1 that comes to each once, and in any run of places to all parts
/// alike: near the golden section, without a common divisor.
std::int64_t golden_step(std::int64_t count) {
  constexpr double kGolden = 0.6180339887498949;
  auto step = std::max<std::int64_t>(1, std::llround(kGolden * static_cast<double>(count)));
  while (std::gcd(step, count) != 1) ++step;
  return step;
}

}  // namespace

void require_fit(const ExpertLoads& loads, const models::RoutedExperts& of,
                 std::string_view where) {
  if (loads.are_even()) return;
  const std::size_t layers = of.layers.size();
  TESSERA_CHECK(layers > 0, ErrorKind::kConfig, where,
                ": found loads of experts, expected none: no layer of the model has experts");
  TESSERA_CHECK(loads.layers.size() == 1 || loads.layers.size() == layers, ErrorKind::kFormat,
                where, ": found ", loads.layers.size(), " lists, expected one for all layers, or ",
                layers, ", one a layer with experts");
  for (std::size_t list = 0; list < loads.layers.size(); ++list) {
    const auto& shares = loads.layers[list];
    const std::string place = concat(where, ": ", place_of(loads, list));
    TESSERA_CHECK(std::ssize(shares) == of.experts, ErrorKind::kFormat, place, "found ",
                  count_text(std::ssize(shares), "number"), ", expected ", of.experts,
                  ", one an expert");
    require_shares(shares, place);
  }
}

ExpertLoads parse_expert_loads(std::string_view text, std::string_view where,
                               const models::RoutedExperts& of) {
  const nlohmann::json json = parse_json(text, where);
  TESSERA_CHECK(json.is_array() && !json.empty(), ErrorKind::kFormat, where, ": found ",
                json_line(json), ", expected a list of ", of.experts,
                " numbers, or a list of such lists");
  ExpertLoads loads;
  if (!json.front().is_array()) {
    loads.layers.push_back(numbers_of(json, concat(where, ": ")));
  } else {
    for (std::size_t list = 0; list < json.size(); ++list) {
      const std::string place = concat(where, ": list ", list, ": ");
      TESSERA_CHECK(json[list].is_array(), ErrorKind::kFormat, place, "found ",
                    json_line(json[list]), ", expected a list of numbers, as the first is one");
      loads.layers.push_back(numbers_of(json[list], place));
    }
  }
  require_fit(loads, of, where);
  return loads;
}

ExpertLoads read_expert_loads(const std::optional<std::string>& file,
                              const models::ModelSpec& spec) {
  constexpr std::int64_t kMostBytes = std::int64_t{16} << 20;
  if (!file) return {};
  return open_as("--expert-loads", [&] {
    return parse_expert_loads(read_text_file(*file, kMostBytes), shown(*file),
                              models::routed_experts(spec));
  });
}

std::vector<std::int64_t> tokens_of_experts(std::span<const double> shares, std::int64_t tokens,
                                            std::int64_t experts_per_token) {
  const auto quotas = quotas_of(shares, tokens, tokens * experts_per_token);
  std::vector<std::int64_t> counts;
  for (const double quota : quotas) {
    counts.push_back(std::min(tokens, static_cast<std::int64_t>(std::floor(quota))));
  }
  std::vector<std::size_t> order(shares.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {},
                    [&](std::size_t e) { return std::pair(std::floor(quotas[e]) - quotas[e], e); });
  std::int64_t left =
      tokens * experts_per_token - std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  while (left > 0) {
    for (const std::size_t e : order) {
      if (left == 0) break;
      if (counts[e] == tokens) continue;
      ++counts[e];
      --left;
    }
  }
  return counts;
}

void deal_experts(std::span<const double> shares, std::int64_t experts_per_token,
                  std::span<std::int64_t> chosen) {
  const std::int64_t tokens = std::ssize(chosen) / experts_per_token;
  if (tokens == 0) return;
  // Experts one after the other, each as long as it is chosen. A token takes places that lie
  // `tokens` apart, and no expert is longer than that.
  std::vector<std::int64_t> line;
  const auto counts = tokens_of_experts(shares, tokens, experts_per_token);
  for (std::size_t e = 0; e < counts.size(); ++e) {
    line.insert(line.end(), static_cast<std::size_t>(counts[e]), static_cast<std::int64_t>(e));
  }
  const std::int64_t step = golden_step(tokens);
  std::int64_t place = 0;
  auto next = chosen.begin();
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t k = 0; k < experts_per_token; ++k) {
      *next++ = line[static_cast<std::size_t>(place + k * tokens)];
    }
    place = (place + step) % tokens;
  }
}

int busiest_rank(const ExpertLoads& loads, const MeshShapes& mesh, int rank) {
  const auto ranks = mesh.ranks_of(rank, {axis::kExpert});
  if (loads.are_even() || ranks.size() == 1) return rank;
  std::vector<double> load(ranks.size(), 0.0);
  for (const auto& shares : loads.layers) {
    const double largest = std::ranges::max(shares);
    double sum = 0;
    for (const double share : shares) sum += share / largest;
    const std::size_t each = shares.size() / ranks.size();
    for (std::size_t e = 0; e < shares.size(); ++e) {
      load[std::min(e / each, ranks.size() - 1)] += shares[e] / largest / sum;
    }
  }
  const auto own = static_cast<std::size_t>(std::ranges::find(ranks, rank) - ranks.begin());
  const auto most = std::ranges::max_element(load);
  return *most > load[own] ? ranks[static_cast<std::size_t>(most - load.begin())] : rank;
}

}  // namespace tessera::train
