// MemoryPool: where a process has its memory from, how much there is and how much of it is left.
//
// There are several at once: the host, and every control group around the process that has a limit;
// the first that is spent ends the process, most often by the kernel and without a word. Whoever
// shares a pool draws on the same bytes: processes on one host compare ids and add up. What is left
// is counted from above: swap counts, all that the kernel can take back counts, and what cannot be
// read counts as no limit. Pure.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

struct MemoryPool {
  std::string id;         ///< equal for processes that draw on the same bytes
  std::string name;       ///< for a message: the file that says so
  double size_bytes = 0;  ///< swap included
  double left_bytes = 0;  ///< at this moment, at most
  bool operator==(const MemoryPool&) const = default;
};

/// Those of this process: the host first, then its control groups from the inside out. `root`
/// stands for "/". A file that is missing or says something else is a pool less. Threads: any.
std::vector<MemoryPool> memory_pools(const std::filesystem::path& root = "/");

}  // namespace tessera
