#include "train/profile.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

struct Frame {
  Clock::time_point begin;
  double inner_ms = 0;  // of the calls inside
};

// RecordFunction's callbacks are plain functions: what they write to belongs to the thread, as the
// rank does.
struct Times {
  std::vector<Frame> stack;
  std::map<std::string, double, std::less<>> self_ms;
};
thread_local Times* t_times = nullptr;

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction&) {
  if (t_times != nullptr) t_times->stack.push_back({Clock::now(), 0});
  return nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext*) {
  if (t_times == nullptr || t_times->stack.empty()) return;
  const auto frame = t_times->stack.back();
  t_times->stack.pop_back();
  const std::chrono::duration<double, std::milli> total = Clock::now() - frame.begin;
  const std::string_view name = function.name();
  auto found = t_times->self_ms.find(name);
  if (found == t_times->self_ms.end()) found = t_times->self_ms.emplace(name, 0.0).first;
  found->second += total.count() - frame.inner_ms;
  if (!t_times->stack.empty()) t_times->stack.back().inner_ms += total.count();
}

const char* kind_of(std::string_view name) {
  for (const auto* product : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
                              "aten::mkldnn_linear", "aten::mm_out", "tessera::product"}) {
    if (name == product) return "products";
  }
  if (name == "tessera::wait") return "waiting for communication";
  if (name == "tessera::optimizer" || name.find("_fused_adamw") != std::string_view::npos)
    return "optimizer";
  return "other kernels";
}

}  // namespace

struct StepProfile::State {
  Times times;
  at::CallbackHandle handle = 0;
  Clock::time_point begin;
  double steps_ms = 0;
  std::int64_t steps = 0;
  std::map<std::string, double, std::less<>> before;
};

StepProfile::StepProfile() : state_(std::make_unique<State>()) {
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
  t_times = &state_->times;
  state_->begin = Clock::now();
}

void StepProfile::end_step() {
  t_times = nullptr;
  const std::chrono::duration<double, std::milli> elapsed = Clock::now() - state_->begin;
  state_->steps_ms += elapsed.count();
  ++state_->steps;
}

std::string StepProfile::to_json() const {
  nlohmann::ordered_json json;
  const auto steps = static_cast<double>(std::max<std::int64_t>(1, state_->steps));
  const auto total = std::max(state_->steps_ms, 1e-9);
  std::map<std::string, double> kinds;
  double seen = 0;
  for (const auto& [name, ms] : state_->times.self_ms) {
    kinds[kind_of(name)] += ms;
    seen += ms;
  }
  for (const auto* kind : {"products", "other kernels", "waiting for communication", "optimizer"}) {
    json[kind] = kinds[kind] / total;
  }
  json["own code"] = (total - seen) / total;
  json["step_ms"] = total / steps;
  std::vector<std::pair<double, std::string>> names;
  for (const auto& [name, ms] : state_->times.self_ms) names.emplace_back(ms, name);
  std::sort(names.rbegin(), names.rend());
  if (names.size() > 12) names.resize(12);
  for (const auto& [ms, name] : names) json["ms " + name] = ms / steps;
  return json.dump(2);
}

}  // namespace tessera::train
