#include "train/report/metrics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "io/atomic_file.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

constexpr auto kStepsWithoutLabels = "steps_without_labels";

template <class... Args>
std::string formatted(const char* format, Args... args) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, args...);
  return text.data();
}

}  // namespace

std::string with_thousands(double value) {
  if (std::isnan(value)) return "nan";  // with either sign
  if (!std::isfinite(value)) return formatted("%f", value);
  std::string digits = formatted("%.0f", value);
  for (std::size_t at = digits.size(); at > 3 && digits[at - 4] != '-'; at -= 3) {
    digits.insert(at - 3, ",");
  }
  return digits;
}

std::vector<Scalar> without_nan(std::vector<Scalar> values) {
  std::erase_if(values, [](const Scalar& scalar) { return std::isnan(scalar.value); });
  return values;
}

std::vector<Scalar> named_values(const StepMetrics& m) {
  if (m.step == 0) return {{"val_loss", m.val_loss.value_or(NAN)}};
  std::vector<Scalar> values{{"loss", m.loss},     {"grad_norm", m.grad_norm},
                             {"lr", m.lr},         {"step_ms", m.step_ms},
                             {"tps", m.tps},       {"tps_global", m.tps_global},
                             {"tflops", m.tflops}, {"peak_rss_mib", m.peak_rss_mib}};
  if (m.peak_device_mib) values.push_back({"peak_device_mib", *m.peak_device_mib});
  if (m.peak_device_reserved_mib) {
    values.push_back({"peak_device_reserved_mib", *m.peak_device_reserved_mib});
  }
  if (m.mfu) values.push_back({"mfu", *m.mfu});
  if (m.val_loss) values.push_back({"val_loss", *m.val_loss});
  if (m.steps_without_labels) {
    values.push_back({kStepsWithoutLabels, static_cast<double>(*m.steps_without_labels)});
  }
  for (std::size_t i = 0; i < m.sources.size(); ++i) {
    values.push_back({concat("source/", i + 1, "/share"), m.sources[i].share});
    values.push_back({concat("source/", i + 1, "/loss"), m.sources[i].loss});
  }
  if (m.loss_scale) values.push_back({"loss_scale", *m.loss_scale});
  if (m.skipped_steps) values.push_back({"skipped_steps", static_cast<double>(*m.skipped_steps)});
  if (m.aux_loss) values.push_back({"aux_loss", *m.aux_loss});
  if (m.exchange_ms) values.push_back({"exchange_ms", *m.exchange_ms});
  if (m.exchange_hidden_ms) values.push_back({"exchange_hidden_ms", *m.exchange_hidden_ms});
  if (m.regions) {
    values.push_back({"replayed_calls", static_cast<double>(m.regions->replayed)});
    values.push_back({"recorded_calls", static_cast<double>(m.regions->recorded)});
    std::int64_t eager = 0;
    for (const auto& [why, calls] : m.regions->eager) eager += calls;
    values.push_back({"eager_calls", static_cast<double>(eager)});
  }
  for (const ExpertLoad& load : m.expert_loads) {
    values.push_back({"moe/load_max_over_mean/" + std::to_string(load.layer), load.max_over_mean});
  }
  return values;
}

namespace {

/// Why calls were eager, each reason with its calls, that of most of them first.
nlohmann::ordered_json eager_reason(const ReplayCalls& calls) {
  std::vector<std::pair<std::int64_t, std::string>> sorted;
  for (const auto& [why, count] : calls.eager) sorted.emplace_back(-count, why);
  std::ranges::sort(sorted);
  std::string text;
  for (const auto& [count, why] : sorted) {
    text += concat(text.empty() ? "" : "; ", why, " (", -count, ")");
  }
  return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
}

}  // namespace

std::string to_json_line(const StepMetrics& m) {
  nlohmann::ordered_json line;
  line["step"] = m.step;
  for (const Scalar& metric : named_values(m)) line[metric.tag] = metric.value;
  if (m.regions) line["eager_reason"] = eager_reason(*m.regions);
  // Null for what is not finite.
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

namespace {

/// A part of a step's line. A line that is too long loses the parts with the highest ranks first.
struct LinePart {
  std::string text;
  int rank = 0;  ///< 0 stays
};

std::string fitted(std::vector<LinePart> parts) {
  const auto columns = [&] {
    std::size_t sum = 0;
    for (const LinePart& part : parts) sum += part.text.size();
    return sum;
  };
  while (columns() > kStepLineColumns) {
    const auto next = std::ranges::max_element(parts, {}, &LinePart::rank);
    if (next->rank == 0) break;
    parts.erase(next);
  }
  std::string line;
  for (const LinePart& part : parts) line += part.text;
  return line;
}

/// A very large loss takes no more columns than others.
std::string short_number(double value) {
  if (std::isnan(value)) return formatted("%7s", "nan");  // with either sign
  return formatted(std::abs(value) < 1e6 ? "%7.4f" : "%7.1e", value);
}

/// "65536", "2^24", "1.7e+07".
std::string scale_text(double scale) {
  constexpr std::size_t kMostDigits = 6;
  std::string digits = formatted("%g", scale);
  if (digits.size() <= kMostDigits) return digits;
  int exponent = 0;
  if (std::frexp(scale, &exponent) == 0.5) return formatted("2^%d", exponent - 1);
  return formatted("%.1e", scale);
}

std::string gib_text(double mib) {
  constexpr double kMibPerGib = 1024.0;
  const double gib = mib / kMibPerGib;
  return formatted(gib < 9.995 ? "%.2fGiB" : "%.1fGiB", gib);
}

}  // namespace

std::string to_step_line(const StepMetrics& m) {
  const std::string step = formatted("step: %2lld", static_cast<long long>(m.step));
  if (m.step == 0) return step + "  val_loss: " + short_number(m.val_loss.value_or(NAN));
  const bool ran = !std::isnan(m.loss);
  const std::string none = formatted("%7s", "-");
  std::vector<LinePart> parts{{step}};
  parts.push_back({"  loss: " + (ran ? short_number(m.loss) : none)});
  parts.push_back({"  grad_norm: " + (ran ? short_number(m.grad_norm) : none), 1});
  parts.push_back({"  memory: " + gib_text(m.peak_device_mib.value_or(m.peak_rss_mib)), 8});
  parts.push_back({"  tps: " + (ran ? with_thousands(m.tps) : "-"), 6});
  if (m.mfu && std::isfinite(*m.mfu)) parts.push_back({formatted("  mfu: %.2f", *m.mfu), 7});
  parts.push_back({formatted("  lr: %.2e", m.lr), 4});
  if (m.val_loss) parts.push_back({"  val_loss: " + short_number(*m.val_loss)});
  if (m.steps_without_labels) {
    const auto steps = static_cast<long long>(*m.steps_without_labels);
    parts.push_back({formatted("  without labels: %lld", steps), 3});
  }
  if (m.loss_scale) parts.push_back({"  loss_scale: " + scale_text(*m.loss_scale), 5});
  if (m.skipped_steps) {
    parts.push_back({formatted("  skipped: %lld", static_cast<long long>(*m.skipped_steps)), 2});
  }
  return fitted(std::move(parts));
}

namespace {

struct KeptLines {
  std::string text;
  std::int64_t steps_without_labels = 0;  // of the last one
};

/// The lines up to step `done`, in order; a line that a crash tore ends them.
KeptLines lines_up_to(const std::filesystem::path& path, std::int64_t done) {
  std::istringstream file(read_no_link(path));
  KeptLines kept;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto step = json.is_object() ? json.find("step") : json.end();
    if (step == json.end() || !step->is_number_integer() || step->get<std::int64_t>() > done) break;
    kept.text += line + '\n';
    const auto count = json.find(kStepsWithoutLabels);
    if (count != json.end() && count->is_number()) {
      kept.steps_without_labels = static_cast<std::int64_t>(count->get<double>());
    }
  }
  return kept;
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& folder, std::int64_t done) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TESSERA_CHECK(!error, ErrorKind::kIo, folder.string(), ": cannot be made (", error.message(),
                ")");
  const auto path = folder / "metrics.jsonl";
  if (done > 0) {
    const KeptLines kept = lines_up_to(path, done);
    write_atomically(path, kept.text);  // in one go: a crash in between leaves the file as it was
    steps_without_labels_ = kept.steps_without_labels;
  }
  file_.emplace(path, done > 0 ? AppendedFile::From::kEnd : AppendedFile::From::kEmpty);
}

void MetricsFile::append(const StepMetrics& metrics) {
  file_->append(to_json_line(metrics) + '\n');
}

double flops_per_token(const ModelSize& size, std::int64_t seq_len) {
  const auto products = 6.0 * static_cast<double>(size.active_parameters);
  const auto attention = 12.0 * static_cast<double>(size.layers) * static_cast<double>(size.heads) *
                         static_cast<double>(size.head_dim) * static_cast<double>(seq_len);
  return products + attention;
}

}  // namespace tessera::train
