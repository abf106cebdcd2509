// The pass that makes a final gradient out of a sum: one division, one rounding.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::fsdp {

/// result = sum / factor, formed in fp64 and rounded once, to result's dtype (fp64 sums: the
/// quotient is one of fp64 first). One pass, no temporary; `result` may be `sum` itself. ATen would
/// round the factor to a 16-bit sum's dtype, and goes from fp64 to 16 bits by way of fp32.
/// Shapes: both contiguous, of the same size, floating.
void divide_into(const at::Tensor& result, const at::Tensor& sum, double factor);

}  // namespace tessera::fsdp
