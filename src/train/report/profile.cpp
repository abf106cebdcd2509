#include "train/report/profile.h"

#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "comm/host_read.h"
#include "comm/stream.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostNames = 12;
constexpr std::array<const char*, 5> kKinds{"products", "other kernels",
                                            "waiting for communication", "optimizer", "own code"};
enum Kind : std::uint8_t { kProducts, kOtherKernels, kWaiting, kOptimizer, kOwnCode };

Kind kind_of(std::string_view name) {
  for (const auto* product :
       {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_linear",
        "aten::mm_out", "aten::_grouped_mm", "tessera::product"}) {
    if (name == product) return kProducts;
  }
  if (name == "tessera::wait") return kWaiting;
  if (name == "tessera::host_read") return kOwnCode;  // on a device the host stands still there
  // What a node takes beside the kernels that it calls.
  if (name.starts_with("autograd::")) return kOwnCode;
  return name == "tessera::optimizer" ? kOptimizer : kOtherKernels;
}

struct Frame {
  Clock::time_point begin;
  Kind kind;
  double inner_ms = 0;   // of the calls inside
  std::size_t call = 0;  // on a device: of StreamTimes
};

/// Calls on the stream on which a step computes, timed by what the stream does, which is known once
/// it is through: what runs on streams of groups runs beside it.
class StreamTimes {
 public:
  explicit StreamTimes(at::Device device) : device_(device) {}

  void begin_step() {
    calls_.clear();
    used_ = 0;
    stream_ = current();
  }
  static constexpr std::size_t kElsewhere = ~std::size_t{0};
  std::size_t begin(std::string_view name, Kind kind, std::size_t caller) {
    if (current() != *stream_) return kElsewhere;
    calls_.push_back({std::string(name), kind, caller, mark(), 0});
    return calls_.size() - 1;
  }
  void end(std::size_t call) {
    if (call != kElsewhere && current() == *stream_) calls_[call].end = mark();
  }
  /// add(name, kind, ms without the calls inside) for each call. The host waits.
  template <class Add>
  void end_step(const Add& add) {
    comm::Event through;
    through.record(comm::Stream(*stream_), comm::EventSite::kHostRead);
    comm::wait_on_host(through, "profile of a step");
    std::vector<double> self(calls_.size(), 0.0);
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      const Call& call = calls_[i];
      if (call.end == 0) continue;
      const double ms = events_[call.begin].elapsedTime(events_[call.end]);
      self[i] += ms;
      if (call.caller != kElsewhere) self[call.caller] -= ms;
    }
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      if (calls_[i].end != 0) add(calls_[i].name, calls_[i].kind, self[i]);
    }
  }

 private:
  struct Call {
    std::string name;
    Kind kind;
    std::size_t caller;
    std::size_t begin, end;  // among the events; end 0: an exception left it
  };

  c10::Stream current() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }
  std::size_t mark() {
    if (used_ == events_.size()) {
      events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    }
    events_[used_].record(*stream_);
    return used_++;
  }

  at::Device device_;
  std::optional<c10::Stream> stream_;
  std::vector<Call> calls_;
  std::vector<c10::Event> events_;  // made once, for all steps
  std::size_t used_ = 0;
};

// RecordFunction's callbacks are plain functions: what they write to belongs to the thread, as the
// rank does.
struct Times {
  std::vector<Frame> stack;
  std::map<std::string, double, std::less<>> self_ms;
  std::array<double, kKinds.size()> kind_ms{};
  std::optional<StreamTimes> on_device;

  void add(std::string_view name, Kind kind, double self) {
    auto found = self_ms.find(name);
    if (found == self_ms.end()) found = self_ms.emplace(name, 0.0).first;
    found->second += self;
    kind_ms[kind] += self;
  }
};
thread_local Times* t_times = nullptr;

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& function) {
  // c10d's transfers begin and end as they please; the wait for them counts.
  if (t_times == nullptr || function.isAsync()) return nullptr;
  auto& stack = t_times->stack;
  Kind kind = kind_of(function.name());
  // Kernels of the optimizer's scope are its own; its waits are not.
  if (!stack.empty() && stack.back().kind == kOptimizer && kind != kWaiting) kind = kOptimizer;
  Frame frame{Clock::now(), kind};
  if (auto& device = t_times->on_device) {
    frame.call = device->begin(function.name(), kind,
                               stack.empty() ? StreamTimes::kElsewhere : stack.back().call);
  }
  stack.push_back(frame);
  return nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext*) {
  if (t_times == nullptr || t_times->stack.empty() || function.isAsync()) return;
  const auto frame = t_times->stack.back();
  t_times->stack.pop_back();
  if (auto& device = t_times->on_device) return device->end(frame.call);
  const std::chrono::duration<double, std::milli> total = Clock::now() - frame.begin;
  t_times->add(function.name(), frame.kind, total.count() - frame.inner_ms);
  if (!t_times->stack.empty()) t_times->stack.back().inner_ms += total.count();
}

std::string row(const std::string& name, double ms, double step_ms) {
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(), "  %-50.50s %9.2f ms %6.1f %%\n", name.c_str(), ms,
                100.0 * ms / step_ms);
  return text.data();
}

/// A node of the graph by its own name, without the engine's and without namespaces.
std::string shown_name(const std::string& name) {
  constexpr std::string_view kEngine = "autograd::engine::evaluate_function: ";
  if (!name.starts_with(kEngine)) return name;
  const std::size_t last = name.rfind(':');
  return concat("backward of ", name.substr(last + (name[last + 1] == ' ' ? 2 : 1)));
}

}  // namespace

struct StepProfile::State {
  Times times;
  at::CallbackHandle handle = 0;
  Clock::time_point begin;
  double steps_ms = 0;
  std::int64_t steps = 0;
};

/// All in ms a step.
struct StepProfile::Summary {
  std::int64_t steps = 0;
  double step_ms = 0;
  std::array<double, kKinds.size()> kinds{};
  std::vector<std::pair<double, std::string>> names;  // the most expensive first
};

StepProfile::StepProfile(c10::Device device) : state_(std::make_unique<State>()) {
  if (!device.is_cpu()) state_->times.on_device.emplace(device);
  state_->handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(on_begin, on_end)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
}

StepProfile::~StepProfile() {
  t_times = nullptr;
  at::removeCallback(state_->handle);
}

void StepProfile::begin_step() {
  state_->times.stack.clear();
  if (auto& device = state_->times.on_device) device->begin_step();
  t_times = &state_->times;
  state_->begin = Clock::now();
}

void StepProfile::end_step() {
  t_times = nullptr;
  if (auto& device = state_->times.on_device) {
    device->end_step(
        [&](std::string_view name, Kind kind, double ms) { state_->times.add(name, kind, ms); });
  }
  const std::chrono::duration<double, std::milli> elapsed = Clock::now() - state_->begin;
  state_->steps_ms += elapsed.count();
  ++state_->steps;
}

StepProfile::Summary StepProfile::summary() const {
  Summary result;
  result.steps = state_->steps;
  const auto steps = static_cast<double>(std::max<std::int64_t>(1, state_->steps));
  result.step_ms = std::max(state_->steps_ms, 1e-9) / steps;
  result.kinds[kOwnCode] = result.step_ms;
  for (const Kind kind : {kProducts, kOtherKernels, kWaiting, kOptimizer}) {
    result.kinds[kind] = state_->times.kind_ms[kind] / steps;
    result.kinds[kOwnCode] -= result.kinds[kind];
  }
  for (const auto& [name, ms] : state_->times.self_ms) result.names.emplace_back(ms / steps, name);
  std::sort(result.names.rbegin(), result.names.rend());
  if (result.names.size() > kMostNames) result.names.resize(kMostNames);
  return result;
}

std::string StepProfile::to_json() const {
  const Summary sum = summary();
  nlohmann::ordered_json json;
  for (std::size_t kind = 0; kind < kKinds.size(); ++kind) {
    json[kKinds[kind]] = sum.kinds[kind] / sum.step_ms;
  }
  json["step_ms"] = sum.step_ms;
  for (const auto& [ms, name] : sum.names) json["ms " + name] = ms;
  return json.dump(2);
}

std::string StepProfile::to_table() const {
  const Summary sum = summary();
  if (sum.steps == 0) return "profile: no step ran\n";
  std::string text = concat("where a step goes (rank 0, mean of ", sum.steps,
                            " step(s), with the profiler's own cost)\n");
  for (std::size_t kind = 0; kind < kKinds.size(); ++kind) {
    text += row(kKinds[kind], sum.kinds[kind], sum.step_ms);
  }
  text += row("a step", sum.step_ms, sum.step_ms) + "most expensive, without what they call\n";
  for (const auto& [ms, name] : sum.names) text += row(shown_name(name), ms, sum.step_ms);
  return text;
}

}  // namespace tessera::train
