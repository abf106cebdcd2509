#include "sim/clocks.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::sim {
namespace {

/// More are a leak of the test: every report joins clocks of this length.
constexpr std::size_t kMostStreams = 4096;

}  // namespace

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

std::uint64_t launches_over(const Clock& clock, Slot slot) {
  const auto index = static_cast<std::size_t>(slot);
  return index < clock.size() ? clock[index] : 0;
}

bool covers(const Clock& clock, const Clock& other) {
  for (std::size_t i = 0; i < other.size(); ++i) {
    if (other[i] > (i < clock.size() ? clock[i] : 0)) return false;
  }
  return true;
}

bool is_over(const Clock& clock, const Access& access) {
  return access.stream < 0 || access.launch <= launches_over(clock, access.stream);
}

Slot Clocks::slot_of(const c10::Stream& stream) {
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i].stream == stream) return static_cast<Slot>(i);
  }
  TORCH_CHECK(streams_.size() < kMostStreams, "sim: found more than ", kMostStreams,
              " streams, expected that a test makes a few and uses them again");
  streams_.push_back({stream, {}});
  return static_cast<Slot>(streams_.size() - 1);
}

std::vector<Slot> Clocks::slots_of(c10::DeviceIndex device) const {
  std::vector<Slot> slots;
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i].stream.device_index() == device) slots.push_back(static_cast<Slot>(i));
  }
  return slots;
}

std::uint64_t Clocks::launch(Slot slot) {
  Clock& clock = streams_.at(index(slot)).clock;
  join(clock, of_this_thread());
  if (clock.size() <= index(slot)) clock.resize(index(slot) + 1, 0);
  return ++clock[index(slot)];
}

Clock Clocks::record(Slot slot) {
  Clock& clock = streams_.at(index(slot)).clock;
  join(clock, of_this_thread());
  return clock;
}

void Clocks::block(Slot slot, const Clock& event) {
  Clock& clock = streams_.at(index(slot)).clock;
  join(clock, of_this_thread());
  join(clock, event);
}

Clock& Clocks::of_this_thread() {
  thread_local Clock clock;
  return clock;
}

}  // namespace tessera::sim
