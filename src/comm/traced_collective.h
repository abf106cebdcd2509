// One collective of a traced step: from its submission to the end of the wait for it.
//
// What shows is what this rank knows: when it went out, and when somebody here had waited for it.
// Made only while there is a trace. Next: base/trace.h.
#pragma once

#include <memory>

#include "base/trace.h"
#include "comm/group.h"

namespace tessera::comm {

class TracedCollective {
 public:
  /// On the submitting thread; null where nobody looks.
  static std::unique_ptr<TracedCollective> of(const Batch& batch, const Group& group);

  /// On the issuing thread, as the batch goes out.
  void issued();
  /// It is complete; this thread has waited for it since `begin`.
  void waited_since(TraceClock::time_point begin);

 private:
  std::shared_ptr<Trace> trace_;
  TraceSpan span_;
  TraceClock::time_point submitted_;
};

}  // namespace tessera::comm
