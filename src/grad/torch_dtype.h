// Converts between DType and c10::ScalarType; nothing else does.
#pragma once

#include <c10/core/ScalarType.h>

#include "tessera/dtype.h"

namespace tessera {

c10::ScalarType to_scalar_type(DType dtype);
/// Errors: kContract for types without a DType (complex, quantized).
DType to_dtype(c10::ScalarType type);

}  // namespace tessera
