// Builds a parameter table row by row, one unit after the other.
//
// Private to parameter_table.cpp and the families' own tables. Next: parameter_table.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "models/parameter_table.h"

namespace tessera::models {

using Shape = std::vector<std::int64_t>;

class TableBuilder {
 public:
  explicit TableBuilder(double init_std) : init_std_(init_std) {}

  void begin_unit(std::string unit) { unit_ = std::move(unit); }

  void matrix(std::string name, Shape shape, DecayClass decay = DecayClass::kMatrix) {
    add({.name = std::move(name),
         .shape = std::move(shape),
         .init_std = init_std_,
         .decay = decay});
  }
  void norm(std::string name, std::int64_t size) {
    add({.name = std::move(name),
         .shape = {size},
         .init = InitKind::kOnes,
         .decay = DecayClass::kNorm});
  }
  void ones(std::string name, Shape shape) {
    add({.name = std::move(name), .shape = std::move(shape), .init = InitKind::kOnes});
  }
  void linear(const std::string& module, std::int64_t out, std::int64_t in, bool bias) {
    matrix(module + ".weight", {out, in});
    if (!bias) return;
    add({.name = module + ".bias",
         .shape = {out},
         .init = InitKind::kZeros,
         .decay = DecayClass::kBias});
  }
  ParameterSpec& last() { return rows_.back(); }
  std::vector<ParameterSpec> rows() && { return std::move(rows_); }

 private:
  void add(ParameterSpec row) {
    row.unit = unit_;
    rows_.push_back(std::move(row));
  }

  double init_std_;
  std::string unit_;
  std::vector<ParameterSpec> rows_;
};

/// Latent attention of a layer, called `attention`.
void add_mla(TableBuilder& table, const ModelSpec& spec, const std::string& attention);

/// Router, experts and shared experts of a layer whose MLP is called `mlp`.
void add_moe(TableBuilder& table, const ModelSpec& spec, const std::string& mlp);

/// Gemma 4's rows: vision tower, projector, embedding, layers, final norm and head.
void add_gemma4(TableBuilder& table, const ModelSpec& spec);
std::vector<BufferSpec> gemma4_buffers(const ModelSpec& spec);

}  // namespace tessera::models
