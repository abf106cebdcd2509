// WideScope: marks operations that compute in a wider dtype on purpose (a norm's mean, a softmax).
//
// DtypeWatch (dtype_watch.h) reports operations that leave the dtype of their unit, except those in
// a WideScope. Next: dtype_watch.h.
#pragma once

namespace tessera {

/// Lets the operations of this pass give any dtype while it lives; their layer casts its result
/// back.
class WideScope {
 public:
  /// Opens the scope.
  WideScope();
  ~WideScope();
  WideScope(const WideScope&) = delete;
  WideScope& operator=(const WideScope&) = delete;

  /// Returns whether this pass is inside a WideScope.
  static bool is_open();
};

}  // namespace tessera
