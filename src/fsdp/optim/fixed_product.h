// Products of matrices whose bits depend on the matrices alone.
//
// A library splits a product over the available threads, which changes the order of its sums. Here
// each sum goes from the first term to the last, on any thread: ranks with other numbers of threads
// have the same bits, on processors with the same vector instructions. Pure.
#pragma once

#include <cstdint>

namespace tessera::fsdp {

/// Row-major and without gaps: a [rows, inner], b [inner, columns], y and result [rows, columns].
template <class T>
struct Product {
  std::int64_t rows = 0, inner = 0, columns = 0;
  const T* a = nullptr;
  const T* b = nullptr;
  T alpha = 1;
  const T* y = nullptr;  ///< null: no summand
  T beta = 0;
  T* result = nullptr;  ///< must not overlap the others
};

/// Returns the number of panels of a result: groups of columns, which may be formed in any order.
template <class T>
std::int64_t panels_of(std::int64_t columns);
/// Forms result = alpha a b + beta y in the panels [begin, end). Threads: any; each panel once.
void form_panels(const Product<float>& product, std::int64_t begin, std::int64_t end);
void form_panels(const Product<double>& product, std::int64_t begin, std::int64_t end);

}  // namespace tessera::fsdp
