// WideScope: what computes wider on purpose says so (a norm's mean, a softmax).
//
// DtypeWatch (dtype_watch.h) reports operations that leave the dtype of their unit, and takes those
// inside a WideScope for intended.
#pragma once

namespace tessera {

/// While alive, operations of this pass may give any dtype: their layer casts its result back.
class WideScope {
 public:
  WideScope();
  ~WideScope();
  WideScope(const WideScope&) = delete;
  WideScope& operator=(const WideScope&) = delete;

  /// Whether this pass is inside one.
  static bool is_open();
};

}  // namespace tessera
