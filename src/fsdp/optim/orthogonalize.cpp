#include "fsdp/optim/orthogonalize.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/threads/parallel.h"
#include "fsdp/optim/fixed_product.h"

namespace tessera::fsdp {
namespace {

constexpr std::int64_t kRows = 64;

/// Whether fixed_product.h forms the products; on devices and in bfloat16 libtorch does.
bool is_here(const at::Tensor& x) {
  return x.is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble);
}

template <class T>
void form(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, const at::Tensor& y,
          double beta, double alpha) {
  const Product<T> product{a.size(0),
                           a.size(1),
                           b.size(1),
                           a.const_data_ptr<T>(),
                           b.const_data_ptr<T>(),
                           static_cast<T>(alpha),
                           y.defined() ? y.const_data_ptr<T>() : nullptr,
                           static_cast<T>(beta),
                           result.mutable_data_ptr<T>()};
  base::for_ranges(panels_of<T>(b.size(1)), 1,
                   [&](std::int64_t begin, std::int64_t end) { form_panels(product, begin, end); });
}

/// Returns beta y + alpha a b; without y where that is undefined. All are contiguous.
at::Tensor added(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b, double beta,
                 double alpha) {
  if (!is_here(a)) return y.defined() ? at::addmm(y, a, b, beta, alpha) : at::mm(a, b).mul_(alpha);
  auto result = at::empty({a.size(0), b.size(1)}, a.options());
  a.scalar_type() == at::kDouble ? form<double>(result, a, b, y, beta, alpha)
                                 : form<float>(result, a, b, y, beta, alpha);
  return result;
}

/// Returns the sum of squares, as eight sums that are added in a fixed order.
template <class T>
double squares_of_row(const T* values, std::int64_t count) {
  std::array<double, 8> sums{};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (std::size_t lane = 0; lane < 8; ++lane) {
      const auto value = static_cast<double>(values[i + static_cast<std::int64_t>(lane)]);
      sums[lane] += value * value;
    }
  }
  for (; i < count; ++i) {
    sums[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  double sum = 0.0;
  for (const double each : sums) sum += each;
  return sum;
}

template <class T>
double norm_of_rows(const at::Tensor& matrix) {
  const auto rows = matrix.size(0);
  const auto columns = matrix.size(1);
  const T* values = matrix.const_data_ptr<T>();
  std::vector<double> of_rows(static_cast<std::size_t>(rows), 0.0);
  base::for_ranges(rows, kRows, [&](std::int64_t begin, std::int64_t end) {
    for (auto at_row = begin; at_row < end; ++at_row) {
      of_rows[static_cast<std::size_t>(at_row)] =
          squares_of_row(values + at_row * columns, columns);
    }
  });
  double sum = 0.0;
  for (const double each : of_rows) sum += each;
  return std::sqrt(sum);
}

at::Tensor divided_by_norm(const at::Tensor& matrix, double eps) {
  if (!is_here(matrix)) return matrix / at::linalg_vector_norm(matrix).clamp_min(eps);
  const double norm = matrix.scalar_type() == at::kDouble ? norm_of_rows<double>(matrix)
                                                          : norm_of_rows<float>(matrix);
  return matrix / std::max(norm, eps);
}

}  // namespace

at::Tensor orthogonalized(const at::Tensor& matrix, const NewtonSchulz& how) {
  const auto dtype = matrix.scalar_type() == at::kDouble ? at::kDouble : how.dtype;
  const bool is_tall = matrix.size(0) > matrix.size(1);
  auto x = divided_by_norm(matrix, how.eps).to(dtype);
  if (is_tall) x = x.t().contiguous();
  const auto [a, b, c] = how.coefficients;
  for (int step = 0; step < how.steps; ++step) {
    const auto gram = added({}, x, x.t().contiguous(), 0.0, 1.0);
    x = added(x, added(gram, gram, gram, b, c), x, a, 1.0);
  }
  if (is_tall) x = x.t().contiguous();
  return x.to(matrix.scalar_type());
}

}  // namespace tessera::fsdp
