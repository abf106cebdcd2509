#include "fsdp/runtime/unit_trace.h"

#include <algorithm>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::fsdp {

bool UnitTrace::is_open(const std::vector<Open>& list, const void* key) {
  return std::any_of(list.begin(), list.end(), [&](const Open& one) { return one.key == key; });
}

void UnitTrace::open(std::vector<Open>& list, const void* key, const char* what,
                     const std::string& unit) {
  list.push_back({key, concat(what, unit_label(unit)), current_trace()->now()});
}

void UnitTrace::close(std::vector<Open>& list, const void* key) {
  const auto last =
      std::find_if(list.rbegin(), list.rend(), [&](const Open& one) { return one.key == key; });
  if (last == list.rend()) return;
  if (tessera::Trace* const trace = current_trace()) {
    trace->add({TraceRow::kCompute, std::move(last->name), last->begin, trace->now()});
  }
  list.erase(std::next(last).base());
}

void UnitTrace::all_backwards_end() {
  UnitHere::enter(std::string_view());
  while (!backwards_.empty()) close(backwards_, backwards_.back().key);
}

void UnitTrace::forget() {
  UnitHere::enter(std::string_view());
  stacks_ = {};
  backwards_.clear();
}

}  // namespace tessera::fsdp
