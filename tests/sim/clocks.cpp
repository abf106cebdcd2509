#include "sim/clocks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace tessera::sim {
namespace {

/// More are a leak of the test: every launch joins clocks of this length.
constexpr std::size_t kMostStreams = 4096;

std::atomic<std::uint64_t> epoch = 0;

bool is_old(const Clock& clock) { return clock.epoch != epoch; }

}  // namespace

std::uint64_t current_epoch() { return epoch; }

void join(Clock& clock, const Clock& other) {
  if (is_old(clock)) clock = Clock();
  if (is_old(other)) return;
  if (clock.over.size() < other.over.size()) clock.over.resize(other.over.size(), 0);
  for (std::size_t i = 0; i < other.over.size(); ++i) {
    clock.over[i] = std::max(clock.over[i], other.over[i]);
  }
}

std::uint64_t launches_over(const Clock& clock, Slot slot) {
  const auto index = static_cast<std::size_t>(slot);
  return !is_old(clock) && index < clock.over.size() ? clock.over[index] : 0;
}

bool covers(const Clock& clock, const Clock& other) {
  if (is_old(other)) return true;
  for (std::size_t i = 0; i < other.over.size(); ++i) {
    if (other.over[i] > launches_over(clock, static_cast<Slot>(i))) return false;
  }
  return true;
}

bool is_over(const Clock& clock, const Access& access) {
  return access.stream < 0 || access.launch <= launches_over(clock, access.stream);
}

Slot Clocks::slot_of(const c10::Stream& stream) {
  const auto [it, made] =
      slots_.try_emplace({stream.device_index(), stream.id()}, static_cast<Slot>(streams_.size()));
  if (!made) return it->second;
  TORCH_CHECK(streams_.size() < kMostStreams, "sim: found more than ", kMostStreams,
              " streams, expected that a test makes a few and uses them again");
  streams_.push_back({stream, {}});
  return it->second;
}

std::vector<Slot> Clocks::slots_of(c10::DeviceIndex device) const {
  std::vector<Slot> slots;
  for (const auto& [stream, slot] : slots_) {
    if (stream.first == device) slots.push_back(slot);
  }
  return slots;
}

std::uint64_t Clocks::launch(Slot slot) {
  Clock& clock = streams_.at(index(slot)).clock;
  join(clock, of_this_thread());
  if (clock.over.size() <= index(slot)) clock.over.resize(index(slot) + 1, 0);
  return ++clock.over[index(slot)];
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

void Clocks::restart() {
  streams_.clear();
  slots_.clear();
  ++epoch;
}

Clock& Clocks::of_this_thread() {
  thread_local Clock clock;
  return clock;
}

}  // namespace tessera::sim
