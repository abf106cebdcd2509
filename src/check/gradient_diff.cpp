#include "check/gradient_diff.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <utility>

#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::check {
namespace {

/// The largest error that rounding explains, over the norm: kNoise for float32; for 16 bits the
/// errors of whole models compared with float32 (docs/config.md), with room for a deeper model.
double most_of_rounding(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return 0.25;
    case DType::kFloat16:
      return 0.05;
    case DType::kFloat64:
      return 1e-9;
    default:
      return kNoise;
  }
}

std::string number(double value) {
  std::ostringstream text;
  text << std::setprecision(3) << value;
  return text.str();
}

std::int64_t count_of(const GradientDiff& diff, Verdict verdict) {
  return std::ranges::count(diff.parameters, verdict, &ParameterVerdict::verdict);
}

}  // namespace

std::string_view to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::kEqual:
      return "equal";
    case Verdict::kRounding:
      return "rounding";
    case Verdict::kWrong:
      return "wrong";
  }
  return "";
}

double coarseness(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return 0x1p-7;
    case DType::kFloat16:
      return 0x1p-10;
    case DType::kFloat64:
      return 0x1p-52;
    default:
      return 0x1p-23;
  }
}

bool GradientDiff::is_right() const {
  return findings.empty() && count_of(*this, Verdict::kWrong) == 0;
}

ParameterVerdict compare_gradient(const std::string& name, const Values& a, const Values& b,
                                  DType dtype) {
  TESSERA_CHECK(a.sizes == b.sizes, ErrorKind::kFormat, "gradient of ", printable(name),
                ": found another shape in A than in B, expected two runs of one model");
  ParameterVerdict one{.parameter = name};
  const auto is_finite = [](const Values& of) {
    return std::ranges::all_of(of.numbers, [](double x) { return std::isfinite(x); });
  };
  if (!is_finite(a) || !is_finite(b)) {
    one.error = one.ulps = std::numeric_limits<double>::infinity();
    one.verdict = Verdict::kWrong;
    one.found = "values that are not finite";
    if (is_finite(a)) one.found = "finite values, and B has some that are not";
    return one;
  }
  if (a.numbers == b.numbers) return one;
  one.error = error_of(a, b);
  one.ulps = one.error / coarseness(dtype);
  one.verdict = one.error <= most_of_rounding(dtype) ? Verdict::kRounding : Verdict::kWrong;
  if (one.verdict == Verdict::kWrong) one.found = difference_text(a, b);
  return one;
}

GradientDiff compare_gradients(const std::map<std::string, Values>& a,
                               const std::map<std::string, Values>& b, DType dtype) {
  GradientDiff diff{.dtype = dtype};
  for (const auto& [name, values] : b) {
    TESSERA_CHECK(a.contains(name), ErrorKind::kFormat, "gradients: found no ", printable(name),
                  " in A, which B has, expected two runs of one model");
  }
  for (const auto& [name, values] : a) {
    const auto other = b.find(name);
    TESSERA_CHECK(other != b.end(), ErrorKind::kFormat, "gradients: found no ", printable(name),
                  " in B, which A has, expected two runs of one model");
    diff.parameters.push_back(compare_gradient(name, values, other->second, dtype));
  }
  return diff;
}

std::string to_string(const GradientDiff& diff) {
  std::ostringstream text;
  text << "A " << printable(diff.a) << "\nB " << printable(diff.b) << '\n'
       << (diff.is_right() ? "right" : "wrong") << ": "
       << count_text(std::ssize(diff.parameters), "parameter") << ", "
       << count_of(diff, Verdict::kEqual) << " equal, " << count_of(diff, Verdict::kRounding)
       << " apart by rounding, " << count_of(diff, Verdict::kWrong) << " wrong; loss "
       << diff.loss_a << " and " << diff.loss_b << '\n';
  for (const Finding& finding : diff.findings) text << to_string(finding) << '\n';
  auto apart = diff.parameters;
  std::erase_if(apart, [](const auto& one) { return one.verdict == Verdict::kEqual; });
  std::ranges::sort(apart, std::ranges::greater(), [](const ParameterVerdict& one) {
    return std::pair(one.error, one.parameter);
  });
  constexpr std::size_t kMost = 20;
  if (!apart.empty()) {
    text << "\nverdict    ulps of " << to_string(diff.dtype) << "  error     parameter\n";
  }
  for (std::size_t i = 0; i < apart.size(); ++i) {
    const ParameterVerdict& one = apart[i];
    if (i >= kMost && one.verdict != Verdict::kWrong) {
      text << "and " << apart.size() - i << " that are nearer to each other\n";
      break;
    }
    text << std::left << std::setw(11) << to_string(one.verdict) << std::setw(18)
         << number(one.ulps) << std::setw(10) << number(one.error) << printable(one.parameter)
         << (one.found.empty() ? "" : concat(": A has ", one.found)) << '\n';
  }
  return text.str();
}

}  // namespace tessera::check
