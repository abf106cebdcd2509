// base/first_derivative.h under the name that the layers use.
#pragma once

#include "base/first_derivative.h"

namespace tessera::nn {

using base::refuse_double_backward;

}  // namespace tessera::nn
