// UnitTrace writes spans of units' forwards and backwards while the rank's thread has a trace, and
// always tells UnitHere which unit the thread is in.
//
// A forward's span lasts from when its parameters are readable to its return, a backward's from its
// pre-backward node to its marker. A backward without a marker lasts until the whole backward ends,
// as its gathered memory does. Next: base/trace.h.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "base/doing.h"
#include "base/pass_local.h"
#include "base/trace.h"

namespace tessera::fsdp {

class UnitTrace {
 public:
  void forward_begins(const std::string& unit) { forward_begins("forward ", unit); }
  void recomputation_begins(const std::string& unit) { forward_begins("forward again ", unit); }
  void forward_ends() {
    auto& [entered, forwards] = stacks_[base::pass_here()];
    if (!entered.empty()) entered.pop_back();
    UnitHere::enter(entered.empty() ? std::string_view() : entered.back());
    if (!forwards.empty()) close(forwards, forwards.back().key);
  }
  /// `key`: the recorded forward whose backward this is. The node of each of its results calls
  /// this; only the first call counts.
  void backward_begins(const void* key, const std::string& unit) {
    UnitHere::enter(unit);
    if (current_trace() != nullptr && !is_open(backwards_, key)) {
      open(backwards_, key, "backward ", unit);
    }
  }
  void backward_ends(const void* key) {
    if (!backwards_.empty()) close(backwards_, key);
  }
  /// Ends all spans of backwards that are still open.
  void all_backwards_end();
  void forget();

 private:
  struct Open {
    const void* key;
    std::string name;
    TraceClock::time_point begin;
  };
  struct Stack {
    std::vector<std::string_view> entered;  // names of units
    std::vector<Open> forwards;
  };
  void forward_begins(const char* what, const std::string& unit) {
    auto& [entered, forwards] = stacks_[base::pass_here()];
    entered.push_back(unit);
    UnitHere::enter(unit);
    if (current_trace() != nullptr) open(forwards, nullptr, what, unit);
  }
  static bool is_open(const std::vector<Open>& list, const void* key);
  void open(std::vector<Open>& list, const void* key, const char* what, const std::string& unit);
  /// Closes the last span with this key.
  void close(std::vector<Open>& list, const void* key);

  std::array<Stack, base::kPasses> stacks_;
  std::vector<Open> backwards_;  // begun, and not past their marker
};

}  // namespace tessera::fsdp
