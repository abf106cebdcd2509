#include "train/report/progress.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <utility>

#include "base/log.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kRedraw{100};

template <class... Args>
std::string formatted_line(const char* format, Args... args) {
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), format, args...);
  return text.data();
}

}  // namespace

std::string duration_text(std::chrono::seconds time) {
  const long long all = std::max<long long>(0, time.count());
  const long long seconds = all % 60;
  const long long minutes = all / 60 % 60;
  const long long hours = all / 3600 % 24;
  const long long days = all / 86400;
  if (days > 0) return formatted_line("%lld d %lld:%02lld:%02lld", days, hours, minutes, seconds);
  if (hours > 0) return formatted_line("%lld:%02lld:%02lld", hours, minutes, seconds);
  return formatted_line("%lld:%02lld", minutes, seconds);
}

std::string loading_text(const std::string& what, std::int64_t done_bytes,
                         std::int64_t total_bytes) {
  constexpr double kMib = 1024.0 * 1024.0;
  const auto done = static_cast<double>(done_bytes);
  const auto total = static_cast<double>(total_bytes);
  return what + formatted_line("  %3.0f %%  %.0f of %.0f MiB",
                               total_bytes > 0 ? std::min(100.0, 100.0 * done / total) : 100.0,
                               done / kMib, total / kMib);
}

std::string training_text(const StepMetrics& metrics, std::int64_t steps,
                          std::optional<std::chrono::seconds> left) {
  std::string text =
      formatted_line("step %lld of %lld  %3.0f %%", static_cast<long long>(metrics.step),
                     static_cast<long long>(steps),
                     100.0 * static_cast<double>(metrics.step) / static_cast<double>(steps));
  if (!std::isnan(metrics.loss)) {
    text += formatted_line("  loss %.4f", metrics.loss) + "  tps " + with_thousands(metrics.tps);
  }
  if (left) text += "  " + duration_text(*left) + " left";
  return text;
}

LoadingProgress::LoadingProgress(std::string what, std::int64_t total_bytes, Shown shown)
    : what_(std::move(what)),
      total_bytes_(total_bytes),
      shown_(shown == Shown::kYes && terminal_line::is_possible()),
      next_(Clock::now() + kRedraw) {}

LoadingProgress::~LoadingProgress() {
  if (shown_) terminal_line::clear();
}

void LoadingProgress::add(std::int64_t bytes) {
  done_bytes_ += bytes;
  if (!shown_ || Clock::now() < next_) return;
  next_ = Clock::now() + kRedraw;
  terminal_line::show(loading_text(what_, done_bytes_, total_bytes_));
}

TrainingProgress::TrainingProgress(std::int64_t first_step, std::int64_t steps)
    : first_step_(first_step), steps_(steps) {}

TrainingProgress::~TrainingProgress() { terminal_line::clear(); }

void TrainingProgress::show(const StepMetrics& metrics) {
  const auto now = Clock::now();
  const std::int64_t timed = metrics.step - first_step_;
  if (timed <= 0) first_done_ = now;
  if (!terminal_line::is_possible()) return;
  std::optional<std::chrono::seconds> left;
  if (timed > 0) {
    left = std::chrono::duration_cast<std::chrono::seconds>((now - first_done_) / timed *
                                                            (steps_ - metrics.step));
  }
  terminal_line::show(training_text(metrics, steps_, left));
}

void StepLines::print(const std::string& line) {
  terminal_line::clear();
  std::cout.clear();  // a disk may have space again
  errno = 0;
  std::cout << line << std::endl;
  const int why = errno;
  if (std::cout.good() || warned_) return;
  warned_ = true;
  log::warn("stdout: found that a step line cannot be written", why == 0 ? "" : ": ",
            why == 0 ? "" : std::strerror(why),
            "; the run continues, and metrics.jsonl has all steps");
}

}  // namespace tessera::train
