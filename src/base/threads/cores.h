// The number of CPUs that this process may use, and of threads that OMP_NUM_THREADS asks for.
//
// A machine may have more CPUs than a process may use: an affinity mask excludes some, and the CPU
// quota of a container grants only a share of their time. With more threads than that, threads wait
// for each other. Pure. Next: parallel.h for how libtorch uses the number.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

namespace tessera::base {

/// Returns the number of CPUs in the affinity mask, or what a quota of the control groups grants if
/// that is less; at least 1.
int usable_cores();

/// Returns the least CPU quota of this process's control group and those above it, in CPUs, rounded
/// up; none where there is no limit. Reads /proc/self/cgroup, /proc/self/mountinfo and the groups'
/// files under `root`: cpu.max of version 2, cpu.cfs_quota_us and cpu.cfs_period_us of version 1.
/// Files that are missing or malformed limit nothing.
std::optional<int> cores_of_quota(const std::filesystem::path& root = "/");

/// Whether libgomp accepts `text` as OMP_NUM_THREADS: a whole number from 1, or a list of them. It
/// ignores other texts, also an empty one and 0, and uses all cores.
bool gives_threads(std::string_view text);

}  // namespace tessera::base
