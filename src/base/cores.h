// How many CPUs this process may use, and how many threads OMP_NUM_THREADS asks for.
//
// A machine's CPUs are no measure: an affinity mask takes some away, and a container's quota lets
// all of them run for a part of the time only. More threads than that wait for each other. Pure.
// Next: parallel.h for what libtorch does with them.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

namespace tessera::base {

/// CPUs of the affinity mask, or what a quota of the control groups grants where that is less. At
/// least 1.
int usable_cores();

/// The least CPU quota of this process's control group and those above it, in CPUs, rounded up;
/// none where nothing limits it. Reads /proc/self/cgroup, /proc/self/mountinfo and the groups'
/// files under `root`: cpu.max of version 2, cpu.cfs_quota_us and cpu.cfs_period_us of version 1.
/// What is missing or malformed limits nothing.
std::optional<int> cores_of_quota(const std::filesystem::path& root = "/");

/// Whether libgomp takes `text` as OMP_NUM_THREADS: a whole number from 1, or a list of them. It
/// ignores anything else, an empty text and 0 among them, and takes all cores.
bool gives_threads(std::string_view text);

}  // namespace tessera::base
