// The sizes of results, for operations without a meta form in libtorch's C++.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::dry {

/// Replaces arguments by results, both as meta tensors on one stack.
using SizeRule = void (*)(c10::Stack& stack);

/// Finds the rule of an operation ("aten::index_select"); null where there is none.
SizeRule size_rule(const c10::OperatorHandle& operation);

}  // namespace tessera::dry
