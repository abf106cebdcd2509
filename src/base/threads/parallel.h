// Divides a range over libtorch's own threads, and sets their number.
//
// at::parallel_for is a template that is serial unless the including file is compiled with OpenMP.
// This file uses the loop inside libtorch instead, so that no compiler needs an OpenMP of its own.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera::base {

/// Calls body(begin, end) for parts of [0, size) that begin at multiples of `grain`, on several
/// threads where there are more than max(`most_on_one`, `grain`) items. `body` must not throw.
void for_ranges(std::int64_t size, std::int64_t grain,
                c10::function_ref<void(std::int64_t, std::int64_t)> body,
                std::int64_t most_on_one = 0);

/// Sets the number of libtorch's threads for loops and products that this thread begins: `wanted`,
/// or fewer under OMP_THREAD_LIMIT. oneDNN (libtorch 2.13) cuts bf16 products for the number that
/// is set, and where the limit grants fewer threads, the parts of the missing ones silently hold
/// arbitrary values.
void set_threads(int wanted);
/// Does that for the present number; does nothing without a limit.
void heed_thread_limit();
/// Lowers that number to the CPUs that a quota of the control groups grants, which libgomp does not
/// see, unless OMP_NUM_THREADS sets one. For programs, before they compute.
void heed_cpu_quota();

}  // namespace tessera::base
