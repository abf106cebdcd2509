// Recomputation: what handles may not do while a checkpointed forward runs again inside backward.
//
// [Note: recomputation] The composition is unit(checkpoint(block)). A handle that is called inside
// a checkpoint records its forward when it runs the first time (without grad); when it runs again,
// inside backward, it neither opens a new segment nor counts: it takes the entry that it made the
// first time, which then is gathered, marked and released as in any backward. Random numbers and
// autocast are those of the first time (recompute.cpp); a selective checkpoint hands out again
// what keep() was given. Used by tessera::checkpoint. What runs again by non-reentrant
// checkpoints of torch has no scope: repeated_calls.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "grad/keep.h"

namespace tessera::fsdp {

struct Entry;

/// What one checkpointed forward made, in order, beside what it kept.
struct Recorded : grad::KeptResults {
  std::vector<std::shared_ptr<Entry>> entries;
  std::size_t next = 0;      ///< of the entries, in the recomputation
  std::uint64_t serial = 0;  ///< of checkpoints of this thread, from 1
};

/// While alive, handles called on this thread add their entries to `recorded`.
class FirstForwardScope {
 public:
  explicit FirstForwardScope(Recorded& recorded);
  ~FirstForwardScope();
  FirstForwardScope(const FirstForwardScope&) = delete;
  FirstForwardScope& operator=(const FirstForwardScope&) = delete;

 private:
  grad::KeepScope keep_;
  Recorded* outer_;
};

/// While alive, handles called on this thread take entries of `recorded`.
class RecomputeScope {
 public:
  explicit RecomputeScope(Recorded& recorded);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  grad::KeepScope keep_;
  Recorded* outer_;
};

/// Checkpoints of this thread that drew from a default generator when they first ran.
std::uint64_t checkpoints_that_drew();
void note_draw();
Recorded* first_forward();  ///< null outside of any
Recorded* recomputing();    ///< null outside of any

}  // namespace tessera::fsdp
