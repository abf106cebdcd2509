// Dividing a range over libtorch's own threads.
//
// at::parallel_for is a template that is serial unless the including file is compiled with OpenMP;
// this borrows the loop inside libtorch instead, so that neither compiler needs an OpenMP of its
// own.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera::base {

/// body(begin, end) for parts of [0, size) that begin at multiples of `grain`, on several threads
/// where there are more than `grain` items. `body` must not throw.
void for_ranges(std::int64_t size, std::int64_t grain,
                c10::function_ref<void(std::int64_t, std::int64_t)> body);

}  // namespace tessera::base
