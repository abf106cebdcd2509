// Recomputation: what the handles do while a checkpointed forward runs again inside a backward.
//
// [Note: recomputation] Compose unit(checkpoint(block)) or checkpoint(unit(block)). A handle that
// is called inside a checkpoint records its forward when the checkpoint runs it first (without
// grad). When the forward runs again, inside the backward, it neither opens a new segment nor
// counts as a forward. It takes the Entry of the first run, whose unit is then gathered, marked and
// released as in any backward. Random numbers and autocast are those of the first run
// (recompute.cpp). In the second run a selective checkpoint returns the results that keep() has
// stored. tessera::checkpoint uses these scopes; the non-reentrant checkpoints of torch have none:
// repeated_calls.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "grad/keep.h"

namespace tessera::fsdp {

struct Entry;

/// The entries that one checkpointed forward made, in order, and the results that it kept.
struct Recorded : grad::KeptResults {
  std::vector<std::shared_ptr<Entry>> entries;
  std::size_t next = 0;      ///< index of the next entry, in the recomputation
  std::uint64_t serial = 0;  ///< number of the checkpoint on this thread, from 1
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

/// The number of checkpoints of this thread that drew from a default generator when they first ran.
std::uint64_t checkpoints_that_drew();
void note_draw();
Recorded* first_forward();  ///< null outside of a FirstForwardScope
Recorded* recomputing();    ///< null outside of a RecomputeScope

}  // namespace tessera::fsdp
