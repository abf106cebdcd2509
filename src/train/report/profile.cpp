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

#include "base/pass_local.h"
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
  if (name == "tessera::turn") return kOwnCode;
  if (name == "tessera::host_read") return kOwnCode;  // on a device the host stands still there
  // The time of a node without that of the kernels that it calls.
  if (name.starts_with("autograd::")) return kOwnCode;
  return name == "tessera::optimizer" ? kOptimizer : kOtherKernels;
}

struct Frame {
  Kind kind;
  double self_ms = 0;    // without the calls inside, nor what another pass did meanwhile
  std::size_t call = 0;  // on a device: of StreamTimes
};

/// Calls on the stream on which a step computes, timed by what the stream does, which is known once
/// it is through: work on streams of groups overlaps it.
class StreamTimes {
 public:
  explicit StreamTimes(at::Device device) : device_(device) {}

  void begin_step() {
    calls_.clear();
    owners_.clear();
    stream_ = current();
  }
  static constexpr std::size_t kNone = ~std::size_t{0};
  /// The call; its caller where it launches on another stream.
  std::size_t begin(std::string_view name, Kind kind, std::size_t caller) {
    if (current() != *stream_) return caller;
    mark(caller);
    calls_.push_back({std::string(name), kind});
    return calls_.size() - 1;
  }
  void end(std::size_t call) {
    if (current() == *stream_) mark(call);
  }
  /// The host waits until the stream is through.
  void wait() const {
    comm::Event through;
    through.record(comm::Stream(*stream_), comm::EventSite::kHostRead);
    comm::wait_on_host(through, "profile of a step");
  }
  /// Behind wait(): add(name, kind, ms without the calls inside) for each call.
  template <class Add>
  void for_each(const Add& add) const {
    std::vector<double> self(calls_.size(), 0.0);
    for (std::size_t i = 1; i < owners_.size(); ++i) {
      if (owners_[i] != kNone) self[owners_[i]] += events_[i - 1].elapsedTime(events_[i]);
    }
    for (std::size_t i = 0; i < calls_.size(); ++i) add(calls_[i].name, calls_[i].kind, self[i]);
  }

 private:
  struct Call {
    std::string name;
    Kind kind;
  };

  c10::Stream current() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }
  /// Gives what the stream did since the last mark to `owner`.
  void mark(std::size_t owner) {
    if (owners_.size() == events_.size()) {
      events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    }
    events_[owners_.size()].record(*stream_);
    owners_.push_back(owner);
  }

  at::Device device_;
  std::optional<c10::Stream> stream_;
  std::vector<Call> calls_;
  std::vector<std::size_t> owners_;  // a mark; of the last one's end
  std::vector<c10::Event> events_;   // of the marks; made once, for all steps
};

// RecordFunction's callbacks are plain functions: what they write to belongs to the thread, as the
// rank does.
struct Times {
  std::array<std::vector<Frame>, base::kPasses> stacks;
  Clock::time_point counted_until;
  std::map<std::string, double, std::less<>> self_ms;
  std::array<double, kKinds.size()> kind_ms{};
  std::optional<StreamTimes> on_device;

  std::vector<Frame>& stack() { return stacks[base::pass_here()]; }
  /// The time since the last call began or ended belongs to the innermost one of the pass that
  /// runs.
  void count() {
    const auto now = Clock::now();
    const std::chrono::duration<double, std::milli> since = now - counted_until;
    if (!stack().empty()) stack().back().self_ms += since.count();
    counted_until = now;
  }
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
  t_times->count();
  auto& stack = t_times->stack();
  Kind kind = kind_of(function.name());
  // Kernels of the optimizer's scope are its own; its waits are not.
  if (!stack.empty() && stack.back().kind == kOptimizer && kind != kWaiting) kind = kOptimizer;
  Frame frame{kind};
  if (auto& device = t_times->on_device) {
    frame.call = device->begin(function.name(), kind,
                               stack.empty() ? StreamTimes::kNone : stack.back().call);
  }
  stack.push_back(frame);
  return nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext*) {
  if (t_times == nullptr || t_times->stack().empty() || function.isAsync()) return;
  t_times->count();
  const auto frame = t_times->stack().back();
  t_times->stack().pop_back();
  if (auto& device = t_times->on_device) return device->end(frame.call);
  t_times->add(function.name(), frame.kind, frame.self_ms);
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
  state_->times.stacks = {};
  if (auto& device = state_->times.on_device) device->begin_step();
  t_times = &state_->times;
  state_->begin = Clock::now();
  state_->times.counted_until = state_->begin;
}

void StepProfile::end_step() {
  t_times = nullptr;
  const auto& device = state_->times.on_device;
  if (device) device->wait();
  const std::chrono::duration<double, std::milli> elapsed = Clock::now() - state_->begin;
  if (device) {
    device->for_each(
        [&](std::string_view name, Kind kind, double ms) { state_->times.add(name, kind, ms); });
  }
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
