// The experts' products of one layer, alone: forward, gradient of the input and of the weight, of
// nn::grouped_linear and of each way behind it, at the sizes of bench/fsdp2_compare --model moe.
// One thread. Prints one line of JSON: medians in us by dtype, rows and product.
//
//   grouped_products [ROUNDS]
//
// Rows: "even", the same number for every expert; "uneven", three splits that were seen before;
// "never seen", row counts that no product of this process had, except the ways that round them up.
// bench/grouped_products.py forms the same splits.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "nn/grouped_linear.h"

namespace {

namespace nn = tessera::nn;

constexpr std::int64_t kExperts = 16;
constexpr std::int64_t kMeanRows = 128;  // 2 rows of 256 tokens, 4 of 16 experts each
constexpr std::int64_t kRows = kExperts * kMeanRows;

/// Of a product's three parts.
constexpr std::array<const char*, 3> kParts = {"forward", "input gradient", "weight gradient"};
using Times = std::array<double, kParts.size()>;

enum Column : std::size_t { kGroupedLinear, kLibtorch, kLoop, kRounded, kColumns };
constexpr std::array<const char*, kColumns> kColumnNames = {"grouped_linear", "libtorch", "loop",
                                                            "rounded"};
nn::GroupedWay way_of(Column column) {
  if (column == kLibtorch) return nn::GroupedWay::kLibtorch;
  return column == kLoop ? nn::GroupedWay::kLoop : nn::GroupedWay::kRoundedRows;
}

const char* name_of(nn::GroupedWay way) {
  if (way == nn::GroupedWay::kLibtorch) return kColumnNames[kLibtorch];
  return way == nn::GroupedWay::kLoop ? kColumnNames[kLoop] : kColumnNames[kRounded];
}

nn::GroupOffsets even_rows() {
  nn::GroupOffsets offsets;
  for (std::int64_t e = 0; e <= kExperts; ++e) offsets.push_back(e * kMeanRows);
  return offsets;
}

/// Fifteen splits, none with a row count of another: pairs of experts with a and 256 - a rows, a
/// below 128. No multiple of 16: those are what rounding up makes of others.
constexpr int kSplits = 15;
nn::GroupOffsets uneven_rows(int number) {
  std::vector<std::int64_t> counts;
  for (std::int64_t a = 1; a < kMeanRows; ++a) {
    if (a % 16 != 0) counts.push_back(a);
  }
  nn::GroupOffsets offsets = {0};
  for (std::int64_t pair = 0; pair < kExperts / 2; ++pair) {
    constexpr std::int64_t kStride = 37;  // has no factor in common with 120 counts: a permutation
    const std::int64_t place = (number * kExperts / 2 + pair) * kStride;
    const auto fewer = counts[static_cast<std::size_t>(place) % counts.size()];
    offsets.push_back(offsets.back() + fewer);
    offsets.push_back(offsets.back() + 2 * kMeanRows - fewer);
  }
  return offsets;
}
constexpr int kUnevenSplits = 3;  // the last ones; the others are never seen
constexpr int kNeverSeen = (kSplits - kUnevenSplits) / static_cast<int>(kColumns);  // a column

/// y = x weight^T by groups, and what its gradients take.
struct Product {
  const char* name;
  at::Tensor x, weight, grad;

  static Product of(const char* name, std::int64_t in, std::int64_t out, at::ScalarType dtype) {
    return {name, at::randn({kRows, in}).to(dtype).requires_grad_(true),
            at::randn({kExperts, out, in}).mul_(0.05).to(dtype).requires_grad_(true),
            at::randn({kRows, out}).to(dtype)};
  }
};

template <class F>
double us(F&& act) {
  const auto begin = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

Times with_derivatives(const Product& product, const nn::GroupOffsets& offsets) {
  at::Tensor y;
  const auto gradient = [&](const at::Tensor& of) {
    torch::autograd::grad({y}, {of}, {product.grad}, /*retain_graph=*/true);
  };
  return {us([&] { y = nn::grouped_linear(product.x, {product.weight}, offsets); }),
          us([&] { gradient(product.x); }), us([&] { gradient(product.weight); })};
}

Times by_way(const Product& product, const nn::GroupOffsets& offsets, nn::GroupedWay way) {
  const at::NoGradGuard alone;
  const at::Tensor& weight = product.weight;
  return {us([&] { nn::grouped_rows(product.x, weight.transpose(1, 2), offsets, way); }),
          us([&] { nn::grouped_rows(product.grad, weight, offsets, way); }),
          us([&] { nn::grouped_outer(product.grad, product.x, offsets, way); })};
}

Times once(Column column, const Product& product, const nn::GroupOffsets& offsets) {
  return column == kGroupedLinear ? with_derivatives(product, offsets)
                                  : by_way(product, offsets, way_of(column));
}

/// us by "dtype, rows, product part", then by column.
using Found = std::map<std::string, std::array<std::vector<double>, kColumns>>;

/// The columns in turns, so that other load hits all of them.
class Bench {
 public:
  Bench(Found& found, const char* dtype, const std::vector<Product>& products)
      : found_(found), dtype_(dtype), products_(products) {}

  void warm_up() {
    std::vector<nn::GroupOffsets> seen = {even_rows()};
    for (int number = kSplits - kUnevenSplits; number < kSplits; ++number) {
      seen.push_back(uneven_rows(number));
    }
    for (const nn::GroupOffsets& offsets : seen) {
      for (std::size_t column = 0; column < kColumns; ++column) {
        for (const Product& product : products_) {
          once(static_cast<Column>(column), product, offsets);
        }
      }
    }
  }
  /// `offsets` of a column.
  template <class Offsets>
  void turn(const char* rows, Offsets&& offsets) {
    for (std::size_t column = 0; column < kColumns; ++column) {
      const nn::GroupOffsets here = offsets(static_cast<int>(column));
      for (const Product& product : products_) {
        const Times times = once(static_cast<Column>(column), product, here);
        for (std::size_t part = 0; part < kParts.size(); ++part) {
          found_[std::string(dtype_) + ", " + rows + ", " + product.name + " " + kParts[part]]
                [column]
                    .push_back(times[part]);
        }
      }
    }
  }

 private:
  Found& found_;
  const char* dtype_;
  const std::vector<Product>& products_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const Found& found, const std::map<std::string, nn::GroupedWay>& taken) {
  std::printf("{\"taken\": {");
  const char* separator = "";
  for (const auto& [dtype, way] : taken) {
    std::printf("%s\"%s\": \"%s\"", separator, dtype.c_str(), name_of(way));
    separator = ", ";
  }
  std::printf("}, \"us\": {");
  separator = "";
  for (const auto& [name, columns] : found) {
    std::printf("%s\"%s\": {", separator, name.c_str());
    for (std::size_t column = 0; column < kColumns; ++column) {
      std::printf("%s\"%s\": %.1f", column == 0 ? "" : ", ", kColumnNames[column],
                  median(columns[column]));
    }
    std::printf("}");
    separator = ", ";
  }
  std::printf("}}\n");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 20;
  at::set_num_threads(1);
  at::manual_seed(0);
  Found found;
  std::map<std::string, nn::GroupedWay> taken;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    const char* name = dtype == at::kFloat ? "float32" : "bfloat16";
    const std::vector<Product> products = {Product::of("gate_up", 384, 512, dtype),
                                           Product::of("down", 256, 384, dtype)};
    taken[name] = nn::grouped_way(products[0].x, products[0].weight);
    Bench bench(found, name, products);
    bench.warm_up();
    for (int round = 0; round < rounds; ++round) {
      bench.turn("even", [](int /*column*/) { return even_rows(); });
      const int split = kSplits - kUnevenSplits + round % kUnevenSplits;
      bench.turn("uneven", [&](int /*column*/) { return uneven_rows(split); });
    }
    // At the end: so many products drive others out of oneDNN's cache.
    for (int i = 0; i < kNeverSeen; ++i) {
      bench.turn("never seen", [&](int column) { return uneven_rows(column * kNeverSeen + i); });
    }
  }
  print(found, taken);
  return 0;
}
