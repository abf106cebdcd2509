#include "fsdp/optim/fixed_product.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tessera::fsdp {
namespace {

// A panel has two vectors of 64 bytes, a strip eight rows: sixteen sums, all in registers where
// vectors have 64 bytes. Terms are added in blocks, so that a panel's part of b stays in the cache.
constexpr std::int64_t kVectors = 2;
constexpr std::int64_t kStrip = 8;
constexpr std::int64_t kTerms = 512;

template <class T>
struct Lanes {
  static constexpr std::int64_t kCount = 64 / static_cast<std::int64_t>(sizeof(T));
  static constexpr std::int64_t kPanel = kVectors * kCount;
  using Vector __attribute__((vector_size(64))) = T;
};

/// Adds the terms of one block to `rows` rows of a panel: sums [rows, kPanel].
template <class T, std::int64_t kRows>
__attribute__((always_inline)) inline void add_strip(const T* a, std::int64_t stride,
                                                     const T* panel, std::int64_t terms, T* sums) {
  using Vector = typename Lanes<T>::Vector;
  Vector sum[kRows][kVectors];
  std::memcpy(&sum, sums, sizeof(sum));
  for (std::int64_t k = 0; k < terms; ++k) {
    Vector of_panel[kVectors];
    std::memcpy(&of_panel, panel + k * Lanes<T>::kPanel, sizeof(of_panel));
#pragma GCC unroll 8
    for (std::int64_t row = 0; row < kRows; ++row) {
      const T factor = a[row * stride + k];
#pragma GCC unroll 2
      for (std::int64_t v = 0; v < kVectors; ++v) sum[row][v] += factor * of_panel[v];
    }
  }
  std::memcpy(sums, &sum, sizeof(sum));
}

template <class T>
__attribute__((always_inline)) inline void form(const Product<T>& of, std::int64_t begin,
                                                std::int64_t end) {
  constexpr auto kPanel = Lanes<T>::kPanel;
  std::vector<T> panel(static_cast<std::size_t>(std::min(kTerms, of.inner) * kPanel));
  std::vector<T> sums(static_cast<std::size_t>(of.rows * kPanel));
  for (auto index = begin; index < end; ++index) {
    const auto first = index * kPanel;
    const auto width = std::min(kPanel, of.columns - first);
    std::fill(sums.begin(), sums.end(), T{0});
    for (std::int64_t k = 0; k < of.inner; k += kTerms) {
      const auto terms = std::min(kTerms, of.inner - k);
      std::fill(panel.begin(), panel.end(), T{0});
      for (std::int64_t i = 0; i < terms; ++i) {
        std::copy_n(of.b + (k + i) * of.columns + first, width, panel.data() + i * kPanel);
      }
      std::int64_t row = 0;
      for (; row + kStrip <= of.rows; row += kStrip) {
        add_strip<T, kStrip>(of.a + row * of.inner + k, of.inner, panel.data(), terms,
                             sums.data() + row * kPanel);
      }
      for (; row < of.rows; ++row) {
        add_strip<T, 1>(of.a + row * of.inner + k, of.inner, panel.data(), terms,
                        sums.data() + row * kPanel);
      }
    }
    for (std::int64_t row = 0; row < of.rows; ++row) {
      const T* sum = sums.data() + row * kPanel;
      T* out = of.result + row * of.columns + first;
      const T* y = of.y == nullptr ? nullptr : of.y + row * of.columns + first;
      for (std::int64_t column = 0; column < width; ++column) {
        out[column] =
            y == nullptr ? of.alpha * sum[column] : of.alpha * sum[column] + of.beta * y[column];
      }
    }
  }
}

// form() for each set of vector instructions; the widest one of the processor is used.
template <class T>
__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,fma"))) void form_512(
    const Product<T>& of, std::int64_t begin, std::int64_t end) {
  form(of, begin, end);
}
template <class T>
__attribute__((target("avx2,fma"))) void form_256(const Product<T>& of, std::int64_t begin,
                                                  std::int64_t end) {
  form(of, begin, end);
}

template <class T>
void form_widest(const Product<T>& of, std::int64_t begin, std::int64_t end) {
  static const bool has_512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  static const bool has_256 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_512) return form_512(of, begin, end);
  if (has_256) return form_256(of, begin, end);
  form(of, begin, end);
}

}  // namespace

template <class T>
std::int64_t panels_of(std::int64_t columns) {
  return (columns + Lanes<T>::kPanel - 1) / Lanes<T>::kPanel;
}
template std::int64_t panels_of<float>(std::int64_t);
template std::int64_t panels_of<double>(std::int64_t);

void form_panels(const Product<float>& product, std::int64_t begin, std::int64_t end) {
  form_widest(product, begin, end);
}

void form_panels(const Product<double>& product, std::int64_t begin, std::int64_t end) {
  form_widest(product, begin, end);
}

}  // namespace tessera::fsdp
