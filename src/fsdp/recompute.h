// Recomputation: what handles may not do while a checkpointed forward runs again inside backward.
//
// [Note: recomputation] The composition is unit(checkpoint(block)). A handle that is called inside
// a checkpoint records its forward when it runs the first time (without grad); when it runs again,
// inside backward, it neither opens a new segment nor counts: it takes the entry that it made the
// first time, which then is gathered, marked and released as in any backward. Random state is that
// of the first time (recompute.cpp). Used by tessera::checkpoint; code that recomputes by other
// means must hold these scopes itself.
#pragma once

#include <memory>
#include <vector>

namespace tessera::fsdp {

struct Entry;

/// The entries that one checkpointed forward made, in order.
struct Recorded {
  std::vector<std::shared_ptr<Entry>> entries;
  std::size_t next = 0;
};

/// While alive, handles called on this thread add their entries to `recorded`.
class FirstForwardScope {
 public:
  explicit FirstForwardScope(Recorded& recorded);
  ~FirstForwardScope();
  FirstForwardScope(const FirstForwardScope&) = delete;
  FirstForwardScope& operator=(const FirstForwardScope&) = delete;

 private:
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
  Recorded* outer_;
};

Recorded* first_forward();  ///< null outside of any
Recorded* recomputing();    ///< null outside of any

}  // namespace tessera::fsdp
