// The model of the truth table, and the files that it is loaded from.
#pragma once

#include <ATen/ATen.h>

#include "golden/model_folder.h"
#include "golden/truth_table.h"
#include "grad/torch_dtype.h"
#include "models/description.h"
#include "nn/parameter.h"
#include "support/plain.h"

namespace tessera::golden {

constexpr std::int64_t kRows = 2, kIn = 3, kOut = 2;
constexpr std::int64_t kBulkWidth = 16, kRowWidth = 2;
constexpr std::uint64_t kSeed = 7;
constexpr int kRanks = 2;

/// y = x first^T second^T, each product in the dtype of its weight.
class Pair : public torch::nn::Module {
 public:
  Pair(std::int64_t width, bool frozen_first) {
    first = register_parameter("first", nn::empty_parameter({width, kIn}), !frozen_first);
    second = register_parameter("second", nn::empty_parameter({kOut, width}));
  }
  at::Tensor forward(const at::Tensor& x) {
    computes_in = first.scalar_type();
    return product(product(x, first), second).to(at::kFloat);
  }
  static at::Tensor product(const at::Tensor& x, const at::Tensor& w) {
    return at::linear(x.to(w.scalar_type()), w);
  }
  at::Tensor first, second;
  at::ScalarType computes_in = at::kByte;
};

class Model : public torch::nn::Module {
 public:
  explicit Model(const TruthRow& row)
      : bulk(register_module("bulk", std::make_shared<Pair>(kBulkWidth, false))),
        pair(register_module("row", std::make_shared<Pair>(kRowWidth, row.frozen_first))),
        order(register_parameter("order", at::empty({kIn}, at::kLong), /*requires_grad=*/false)) {}
  at::Tensor forward(const at::Tensor& x) {
    return bulk->forward(x.index_select(1, order)) + pair->forward(x);
  }
  std::shared_ptr<Pair> bulk, pair;
  at::Tensor order;
};

inline const std::map<std::string, std::vector<std::int64_t>>& shapes() {
  static const std::map<std::string, std::vector<std::int64_t>> all = {
      {"bulk.first", {kBulkWidth, kIn}},
      {"bulk.second", {kOut, kBulkWidth}},
      {"order", {kIn}},
      {"row.first", {kRowWidth, kIn}},
      {"row.second", {kOut, kRowWidth}}};
  return all;
}

inline bool is_of_row(const std::string& name) { return name.starts_with("row."); }

enum class Values {
  kExact,  ///< few bits: no product or sum of the right dtypes rounds, one in a wrong dtype does
  kRandom
};

/// +-1, +-2 and, so that a narrower dtype than the right one shows, digits that only it loses.
inline at::Tensor exact_values(const TruthRow& row, const std::string& name) {
  const auto& shape = shapes().at(name);
  const auto draw =
      test::seeded(kSeed + name.size() * 3 + static_cast<std::uint64_t>(name[0]), shape);
  auto values = draw.sign() * (draw.abs().gt(0.6).to(at::kFloat) + 1.0);
  if (!is_of_row(name)) return values;
  if (row.checkpoint == DType::kFloat32) values = values + 0x1p-9;
  // Sums of its rows are more than 8 bits wide.
  if (name == "row.second" && row.compute == DType::kFloat32) values[1].mul_(0x1p-8);
  return values;
}

/// The file's tensors, as they are stored.
inline test::Tensors stored_tensors(const TruthRow& row, Values values) {
  test::Tensors stored;
  for (const auto& [name, shape] : shapes()) {
    if (name == "order") {
      stored[name] = at::tensor({2, 0, 1}, at::kLong);
      continue;
    }
    const auto dtype = is_of_row(name) ? *row.checkpoint : row.bulk;
    const auto wide = values == Values::kExact
                          ? exact_values(row, name)
                          : test::seeded(static_cast<std::uint64_t>(name.back() + shape[0]), shape);
    stored[name] = wide.to(to_scalar_type(dtype));
  }
  return stored;
}

inline std::filesystem::path write_folder(const test::Tensors& tensors) {
  std::vector<StoredTensor> stored;
  for (const auto& [name, tensor] : tensors) {
    const auto* bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
    stored.push_back({{name, to_dtype(tensor.scalar_type()), tensor.sizes().vec()},
                      {bytes, bytes + tensor.nbytes()}});
  }
  const auto path = temporary_path("truth");
  write_model(path, "{}", stored, 2);
  return path;
}

inline std::vector<models::ParameterSpec> specs() {
  std::vector<models::ParameterSpec> all;
  for (const auto& [name, shape] : shapes()) {
    models::ParameterSpec spec;
    spec.name = name;
    spec.shape = shape;
    spec.init = name == "order" ? models::InitKind::kOnes : models::InitKind::kNormal;
    spec.init_std = 1.0F;
    all.push_back(spec);
  }
  return all;
}

}  // namespace tessera::golden
