// The gradients of one batch, computed twice: one verdict a parameter.
//
// Two runs whose sums are added in another order, or rounded to another dtype, give other bits. The
// difference is counted in ulps of the coarsest dtype that either run computes in: what a norm's
// difference is, over the norm, divided by the dtype's epsilon. Pure. Next: values.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "check/finding.h"
#include "check/values.h"
#include "tessera/dtype.h"

namespace tessera::check {

enum class Verdict : std::uint8_t {
  kEqual,     ///< bit for bit
  kRounding,  ///< as far apart as rounding takes them
  kWrong,
};
std::string_view to_string(Verdict verdict);

struct ParameterVerdict {
  std::string parameter = {};
  Verdict verdict = Verdict::kEqual;
  double error = 0.0;      ///< norm of the difference over the norm
  double ulps = 0.0;       ///< of the dtype in which they were computed
  std::string found = {};  ///< of a wrong one: "2 times the expected values"
};

struct GradientDiff {
  std::string a = {}, b = {};     ///< files, or configurations
  DType dtype = DType::kFloat32;  ///< the coarsest that either computes in
  double loss_a = 0.0, loss_b = 0.0;
  std::vector<ParameterVerdict> parameters = {};  ///< in the order of names
  /// Where either run parts from one rank in float32; `found` begins with "A: " or "B: ".
  std::vector<Finding> findings = {};
  bool is_right() const;
};

/// The distance of 1 and the next larger number.
double coarseness(DType dtype);

/// Errors: kFormat where one has a parameter that the other lacks, or another shape.
GradientDiff compare_gradients(const std::map<std::string, Values>& a,
                               const std::map<std::string, Values>& b, DType dtype);
/// The same of one parameter.
ParameterVerdict compare_gradient(const std::string& name, const Values& a, const Values& b,
                                  DType dtype);

/// Returns the totals, then what is wrong, then the parameters that differ most.
std::string to_string(const GradientDiff& diff);

}  // namespace tessera::check
