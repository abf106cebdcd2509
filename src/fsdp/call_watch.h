// CallWatch sees the arguments and results of the units that a thread calls.
//
// `tessera check` compares the tensors at the borders of units with those of one rank. A
// recomputation of a unit is not reported. Without a watch nothing is done. Next: call.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace tessera::fsdp {

class CallWatch {
 public:
  virtual ~CallWatch() = default;
  /// `unit`: the name that messages show. Tensors are in the order of visit_tensors, some of them
  /// undefined.
  virtual void entered(const std::string& unit, const std::vector<at::Tensor*>& inputs) = 0;
  /// The results are those that the caller gets, so that a hook on one sees its gradient.
  virtual void left(const std::string& unit, const std::vector<at::Tensor*>& results) = 0;
};

/// While alive, `watch` sees the calls of this thread.
class CallWatchScope {
 public:
  explicit CallWatchScope(CallWatch& watch);
  ~CallWatchScope();
  CallWatchScope(const CallWatchScope&) = delete;
  CallWatchScope& operator=(const CallWatchScope&) = delete;

 private:
  CallWatch* outer_;
};

}  // namespace tessera::fsdp
