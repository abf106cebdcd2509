// The accesses to bytes of device memory: for each range the last write and the reads since.
//
// One access a stream is enough, because a stream's own launches are ordered. Freed memory keeps
// its accesses: the first access of the next owner then checks the allocator. Accesses that the
// thread which frees it has waited for are dropped: the next owner gets the memory after them. A
// tensor is a number of dense runs; from kMostRuns on it counts as the range from its first to its
// last byte, which reports say.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "sim/clocks.h"

namespace tessera::sim {

struct Conflict {
  Access before;
  bool before_writes = false;
  bool of_range = false;  ///< perhaps of bytes between the tensor's own
};

/// Threads: the holder of the simulator's mutex.
class Shadow {
 public:
  static constexpr std::int64_t kMostRuns = 4096;

  /// Notes the access, or says what it is not ordered behind; `known` is the clock of its launch.
  std::optional<Conflict> note_access(const at::Tensor& tensor, bool writes, const Access& now,
                                      const Clock& known);
  std::optional<Conflict> note_access(std::uintptr_t begin, std::uintptr_t end, bool writes,
                                      const Access& now, const Clock& known);
  /// Drops the accesses to these bytes that have ended by `known`.
  void end(std::uintptr_t begin, std::uintptr_t end, const Clock& known);
  void forget() { segments_.clear(); }
  /// Who wrote the byte last, if anybody did.
  std::optional<Access> last_write(std::uintptr_t address) const;

 private:
  struct Segment {
    std::uintptr_t end = 0;
    Access write;
    std::vector<Access> reads;  ///< since the write, one a stream
  };
  using Segments = std::map<std::uintptr_t, Segment>;

  /// A segment begins at `address`, if one lies there.
  void split(std::uintptr_t address);
  void add_read(std::uintptr_t begin, std::uintptr_t end, const Access& now);

  Segments segments_;  // by where they begin; they do not overlap
};

}  // namespace tessera::sim
