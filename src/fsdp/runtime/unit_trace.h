// Spans of units' forwards and backwards, while the rank's thread has a trace; and which unit the
// thread is in, always.
//
// A forward counts from when its parameters are there to its return, a backward from its
// pre-backward node to its marker; what has no marker lasts until the backward ends, as its
// gathered memory does. Next: base/trace.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/doing.h"
#include "base/trace.h"

namespace tessera::fsdp {

class UnitTrace {
 public:
  void forward_begins(const std::string& unit) { begin(first_, "forward ", unit); }
  void recomputation_begins(const std::string& unit) { begin(again_, "forward again ", unit); }
  /// The innermost one of those that are recomputed (`again`), or of the others.
  void forward_ends(bool again);
  /// `key`: the recorded forward whose backward this is. Each of its results says so, the first
  /// counts.
  void backward_begins(const void* key, const std::string& unit) {
    UnitHere::enter(unit);
    if (current_trace() != nullptr && !is_open(backwards_, key)) {
      open(backwards_, key, "backward ", unit);
    }
  }
  void backward_ends(const void* key) {
    if (!backwards_.empty()) close(backwards_, key);
  }
  /// Of all that is still open.
  void all_backwards_end();
  void forget();

 private:
  struct Open {
    const void* key;
    std::string name;
    TraceClock::time_point begin;
  };
  /// Calls on one stack: in a pair, a forward and a recomputation each have their own.
  struct Calls {
    std::vector<std::string_view> entered;  // the units' own names
    std::vector<Open> open;                 // while there is a trace
  };
  void begin(Calls& calls, const char* what, const std::string& unit) {
    calls.entered.push_back(unit);
    UnitHere::enter(unit);
    if (current_trace() != nullptr) open(calls.open, nullptr, what, unit);
  }
  static bool is_open(const std::vector<Open>& list, const void* key);
  void open(std::vector<Open>& list, const void* key, const char* what, const std::string& unit);
  /// The last one with this key.
  void close(std::vector<Open>& list, const void* key);

  Calls first_, again_;
  std::vector<Open> backwards_;  // that have begun and not passed their marker
};

}  // namespace tessera::fsdp
