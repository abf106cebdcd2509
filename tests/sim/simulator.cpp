#include "sim/simulator.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "sim/late_copies.h"
#include "sim/shadow.h"
#include "sim/sim.h"

namespace tessera::sim {
namespace {

struct Open {
  Access operation;
  LaterLaunches later;
};

struct State {
  std::mutex mutex;
  Clocks clocks;
  Shadow shadow;
  LateCopies late;
  std::set<std::string> names;  // stay where they are: accesses point to them
  std::vector<std::string> races;
  std::map<std::tuple<int, Slot, const std::string*>, std::int64_t> launches;
  std::map<std::pair<int, std::string>, std::int64_t> waits;
  std::vector<Until> held;
  int room = HeldStream::kAnyLaunches;  // for launches that cannot begin
  std::vector<Open> open;
  std::string broken;  // why no thread will end them
  std::condition_variable released;
  Done done = Done::kAtOnce;
};

State& state() {
  static auto* const state = new State;  // tensors may outlive static objects
  return *state;
}

thread_local int current_rank = -1;

/// For what others are to end.
constexpr std::chrono::minutes kPatience{1};

/// Done::kOnlyWhenWaited: who asks so often and does nothing else waits by asking.
constexpr int kMostAsks = 32;
thread_local int asked_in_a_row = 0;

std::string shown(const Access& access, bool writes) {
  const c10::Stream& stream = state().clocks.stream_of(access.stream);
  std::string text = *access.operation + (writes ? " writes" : " reads") +
                     " on sim:" + std::to_string(stream.device_index()) + " stream " +
                     std::to_string(stream.id());
  if (access.rank >= 0) text += " of rank " + std::to_string(access.rank);
  return text;
}

/// Kept, and thrown where that does not end the process.
void report(std::string text) {
  state().races.push_back(text);
  if (std::uncaught_exceptions() == 0) throw Race(std::move(text));
}

void check(const std::optional<Conflict>& conflict, const Access& now, bool writes) {
  if (!conflict) return;
  report("race: " + shown(now, writes) + " what " +
         shown(conflict->before, conflict->before_writes) +
         ": nothing orders the two; record an event behind the one and let the other's stream wait "
         "for it" +
         (conflict->of_range ? " (taken as the whole range between the first and the last element)"
                             : ""));
}

void note_access(const at::Tensor& tensor, bool written, const Access& now) {
  State& s = state();
  check(s.shadow.note_access(tensor, written, now, s.clocks.of(now.stream)), now, written);
}

/// Whether no stream is held and nothing is open that this waits for.
bool can_end(const Clock& clock) {
  for (const Until& held : state().held) {
    if (launches_over(clock, held.stream) > held.launch) return false;
  }
  return std::ranges::none_of(state().open,
                              [&](const Open& each) { return is_over(clock, each.operation); });
}

bool can_begin(const Clock& clock) {
  return std::ranges::none_of(state().open, [&](const Open& each) {
    return each.later == LaterLaunches::kWait && is_over(clock, each.operation);
  });
}

/// This thread does so until `ready`.
template <class Ready>
void stand_still(std::unique_lock<std::mutex>& lock, Ready ready) {
  State& s = state();
  if (!s.released.wait_for(lock, kPatience, [&] { return ready() || !s.broken.empty(); })) {
    s.broken = "sim: stood still for a minute, behind what others do not end:";
    for (const Open& each : s.open) {
      s.broken += " " + *each.operation.operation + " on sim:" +
                  std::to_string(s.clocks.stream_of(each.operation.stream).device_index()) + ";";
    }
    s.released.notify_all();
  }
  if (!ready() && std::uncaught_exceptions() == 0) throw std::runtime_error(s.broken);
}

/// This thread knows from now on; copies that have arrived are let go without the mutex.
void learn(const Clock& clock, std::unique_lock<std::mutex> lock) {
  State& s = state();
  join(Clocks::of_this_thread(), clock);
  LateCopies::Landed landed = s.late.land(Clocks::of_this_thread());
  for (const std::string& text : landed.changed) s.races.push_back(text);
  lock.unlock();
  if (!landed.changed.empty() && std::uncaught_exceptions() == 0) throw Race(landed.changed[0]);
}

void wait(const Clock& clock, const std::string& name, std::unique_lock<std::mutex> lock) {
  State& s = state();
  ++s.waits[{current_rank, name}];
  stand_still(lock, [&] { return can_end(clock); });
  learn(clock, std::move(lock));
}

bool answer(const Clock& clock, std::unique_lock<std::mutex> lock) {
  if (covers(Clocks::of_this_thread(), clock)) return true;
  if (!can_end(clock)) return false;
  if (state().done == Done::kOnlyWhenWaited && ++asked_in_a_row <= kMostAsks) return false;
  learn(clock, std::move(lock));
  return true;
}

Counts take(std::optional<Slot> on) {
  State& s = state();
  Counts counts;
  std::erase_if(s.launches, [&](const auto& entry) {
    const auto& [rank, slot, name] = entry.first;
    if (rank != current_rank) return false;
    if (!on || *on == slot) counts.launches[*name] += entry.second;
    return true;
  });
  std::erase_if(s.waits, [&](const auto& entry) {
    if (entry.first.first != current_rank) return false;
    counts.waits[entry.first.second] += entry.second;
    return true;
  });
  return counts;
}

}  // namespace

Access launch(const c10::Stream& stream, const std::string& operation,
              const std::vector<TensorAccess>& accessed, CarriedOut when) {
  asked_in_a_row = 0;
  State& s = state();
  std::unique_lock lock(s.mutex);
  const Slot slot = s.clocks.slot_of(stream);
  if (when == CarriedOut::kAtOnce) stand_still(lock, [&] { return can_begin(s.clocks.of(slot)); });
  if (!can_end(s.clocks.of(slot))) {
    s.released.wait(lock, [&] { return s.room > 0; });
    if (s.room != HeldStream::kAnyLaunches) --s.room;
  }
  const std::string* name = &*s.names.insert(operation).first;
  const Access now{slot, s.clocks.launch(slot), name, current_rank};
  ++s.launches[{current_rank, slot, name}];
  for (const TensorAccess& each : accessed) note_access(each.tensor, each.written, now);
  return now;
}

void stand_still_behind(const c10::Stream& stream) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const Slot slot = s.clocks.slot_of(stream);
  stand_still(lock, [&] { return can_begin(s.clocks.of(slot)); });
}

void note_result(const Access& of, const at::Tensor& result) {
  const std::lock_guard lock(state().mutex);
  note_access(result, true, of);
}

void arrive_late(const Access& copy, const at::Tensor& target, const at::Tensor& value) {
  const std::lock_guard lock(state().mutex);
  state().late.to_host(copy, target, value);
}

void check_late(const Access& copy, const at::Tensor& source) {
  const std::lock_guard lock(state().mutex);
  state().late.from_pinned(copy, source);
}

void leave_open(const Access& operation, LaterLaunches later) {
  const std::lock_guard lock(state().mutex);
  state().open.push_back({operation, later});
}

void end_open(const Access& operation) {
  const std::lock_guard lock(state().mutex);
  std::erase_if(state().open, [&](const Open& each) {
    return each.operation.stream == operation.stream && each.operation.launch == operation.launch;
  });
  state().released.notify_all();
}

void break_open(const std::string& why) {
  const std::lock_guard lock(state().mutex);
  if (state().broken.empty()) state().broken = why;
  state().released.notify_all();
}

std::string why_broken() {
  const std::lock_guard lock(state().mutex);
  return state().broken;
}

Mark record(const c10::Stream& stream) {
  asked_in_a_row = 0;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return {s.clocks.record(s.clocks.slot_of(stream)), std::chrono::steady_clock::now()};
}

void block(const c10::Stream& stream, const Mark& mark) {
  asked_in_a_row = 0;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.clocks.block(s.clocks.slot_of(stream), mark.clock);
}

bool ask(const Mark& mark) { return answer(mark.clock, std::unique_lock(state().mutex)); }

bool ask(const c10::Stream& stream) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const Clock clock = s.clocks.of(s.clocks.slot_of(stream));
  return answer(clock, std::move(lock));
}

void wait_on_host(const Mark& mark, const std::string& name) {
  wait(mark.clock, name, std::unique_lock(state().mutex));
}

void wait_on_host(const c10::Stream& stream, const std::string& name) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const Clock clock = s.clocks.of(s.clocks.slot_of(stream));
  wait(clock, name, std::move(lock));
}

void wait_on_host(c10::DeviceIndex device, const std::string& name) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  Clock clock;
  for (const Slot slot : s.clocks.slots_of(device)) join(clock, s.clocks.of(slot));
  wait(clock, name, std::move(lock));
}

Until until_now(const c10::Stream& stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const Slot slot = s.clocks.slot_of(stream);
  return {slot, launches_over(s.clocks.of(slot), slot)};
}

bool waited_for(const Until& until) {
  return until.epoch != current_epoch() ||
         until.launch <= launches_over(Clocks::of_this_thread(), until.stream);
}

void free_bytes(const void* begin, std::size_t size) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  s.shadow.end(first, first + size, Clocks::of_this_thread());
}

void restart() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.clocks.restart();
  s.shadow.forget();
  s.launches.clear();
  s.waits.clear();
  s.open.clear();
  s.broken.clear();
  s.released.notify_all();
}

const char* last_writer(const void* address) noexcept {
  State& s = state();
  const std::unique_lock lock(s.mutex, std::try_to_lock);
  if (!lock) return nullptr;
  const auto write = s.shadow.last_write(reinterpret_cast<std::uintptr_t>(address));
  return write ? write->operation->c_str() : nullptr;
}

// Functions for tests (sim.h).

std::vector<std::string> take_races() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().races, {});
}

RankScope::RankScope(int rank) : before_(std::exchange(current_rank, rank)) {}
RankScope::~RankScope() { current_rank = before_; }

Counts take_counts() {
  const std::lock_guard lock(state().mutex);
  return take(std::nullopt);
}

Counts take_counts(const c10::Stream& launches_on) {
  const std::lock_guard lock(state().mutex);
  return take(state().clocks.slot_of(launches_on));
}

HeldStream::HeldStream(const c10::Stream& stream, int most_launches) : room_before_(state().room) {
  const Until until = until_now(stream);
  slot_ = until.stream;
  launch_ = until.launch;
  const std::lock_guard lock(state().mutex);
  state().held.push_back(until);
  if (most_launches != kAnyLaunches) state().room = most_launches;
}

HeldStream::~HeldStream() {
  const std::lock_guard lock(state().mutex);
  std::erase_if(state().held,
                [&](const Until& held) { return held.stream == slot_ && held.launch == launch_; });
  state().room = room_before_;
  state().released.notify_all();
}

void set_done(Done done) {
  const std::lock_guard lock(state().mutex);
  state().done = done;
}

}  // namespace tessera::sim
