// Dividing a range over libtorch's own threads, and how many those are.
//
// at::parallel_for is a template that is serial unless the including file is compiled with OpenMP;
// this borrows the loop inside libtorch instead, so that neither compiler needs an OpenMP of its
// own.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera::base {

/// body(begin, end) for parts of [0, size) that begin at multiples of `grain`, on several threads
/// where there are more than `most_on_one` items, or than `grain` where that is more. `body` must not
/// throw.
void for_ranges(std::int64_t size, std::int64_t grain,
                c10::function_ref<void(std::int64_t, std::int64_t)> body,
                std::int64_t most_on_one = 0);

/// How many threads libtorch has for loops and products that this thread begins: `wanted`, or fewer
/// under OMP_THREAD_LIMIT. oneDNN (libtorch 2.13) cuts bf16 products for the number that is set, and
/// where the limit grants fewer threads the parts of the others silently hold anything.
void set_threads(int wanted);
/// The same for as many as there are; without a limit nothing is accessed.
void heed_thread_limit();
/// Lowers that number to the CPUs that a quota of the control groups grants, which libgomp does not
/// see, unless OMP_NUM_THREADS gives one. For programs, before they compute.
void heed_cpu_quota();

}  // namespace tessera::base
