// Rows that are packed of drawn documents, and what a function makes of each document alone.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "nn/documents.h"

namespace tessera::nn::packed {

using Lengths = std::vector<std::int64_t>;

/// Documents that fill rows of so many positions: some of one position, some longer than a chunk.
inline std::vector<Lengths> drawn_rows(std::mt19937_64& random, std::int64_t rows,
                                       std::int64_t positions) {
  std::vector<Lengths> all(static_cast<std::size_t>(rows));
  for (Lengths& lengths : all) {
    for (std::int64_t left = positions; left > 0; left -= lengths.back()) {
      const std::int64_t most = std::vector<std::int64_t>{1, 20, 90, positions}[random() % 4];
      lengths.push_back(std::min(
          left, 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most))));
    }
  }
  return all;
}

/// [rows, T].
inline Documents documents_of(const std::vector<Lengths>& rows) {
  std::vector<at::Tensor> starts;
  for (const Lengths& lengths : rows) {
    std::vector<at::Tensor> row;
    std::int64_t begin = 0;
    for (const std::int64_t length : lengths) {
      row.push_back(at::full({length}, begin, at::kLong));
      begin += length;
    }
    starts.push_back(at::cat(row));
  }
  return {at::stack(starts)};
}

/// Calls `alone` with the inputs [B, T, ...] of each document, and joins what it returns.
template <class F>
at::Tensor one_by_one(const std::vector<at::Tensor>& inputs, const std::vector<Lengths>& rows,
                      F&& alone) {
  std::vector<at::Tensor> all;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    std::vector<at::Tensor> parts;
    std::int64_t begin = 0;
    for (const std::int64_t length : rows[row]) {
      std::vector<at::Tensor> of_document;
      for (const at::Tensor& input : inputs) {
        of_document.push_back(
            input.narrow(0, static_cast<std::int64_t>(row), 1).narrow(1, begin, length));
      }
      parts.push_back(alone(of_document));
      begin += length;
    }
    all.push_back(at::cat(parts, 1));
  }
  return at::cat(all, 0);
}

}  // namespace tessera::nn::packed
