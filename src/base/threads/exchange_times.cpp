#include "base/threads/exchange_times.h"

#include <chrono>
#include <utility>

namespace tessera::base {
namespace {

using Clock = std::chrono::steady_clock;

/// The times, the number of exchanges under way, and since when there are any.
struct Times {
  ExchangeTimes times;
  int under_way = 0;
  Clock::time_point since;
};
thread_local constinit Times t_times;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

}  // namespace

ExchangeTimes exchange_times() {
  auto times = t_times.times;
  if (t_times.under_way > 0) times.in_flight += ms_since(t_times.since);
  return times;
}

ExchangeUnderWay::ExchangeUnderWay(bool counts) : counts_(counts) {
  if (counts_ && t_times.under_way++ == 0) t_times.since = Clock::now();
}

ExchangeUnderWay::ExchangeUnderWay(ExchangeUnderWay&& other) noexcept
    : counts_(std::exchange(other.counts_, false)) {}

void ExchangeUnderWay::end(double waited_ms) {
  if (!std::exchange(counts_, false)) return;
  t_times.times.waited += waited_ms;
  if (--t_times.under_way == 0) t_times.times.in_flight += ms_since(t_times.since);
}

}  // namespace tessera::base
