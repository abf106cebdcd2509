#include "cli/option_values.h"

#include <cctype>
#include <charconv>
#include <limits>
#include <system_error>
#include <vector>

#include "base/text/byte_size.h"
#include "base/text/printable.h"
#include "check/machine.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

constexpr double kMostTemperature = 1e6;
constexpr double kMostCost = 1e9;
constexpr int kMostExchangesOfALayer = 64;
constexpr double kMostRate = 1e21;

/// "" for a number that `holds`, else what was expected. Range lets "nan" through: it is neither
/// below nor above.
std::string unless_number(const std::string& text, bool (*holds)(double),
                          const std::string& expected) {
  double value = 0.0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed == std::errc{} && rest == text.data() + text.size() && holds(value)) return "";
  return concat("found ", printable(text), ", expected a number ", expected);
}

std::string not_a_cost(const std::string& text) {
  return unless_number(
      text, [](double value) { return value >= 0.0 && value <= kMostCost; },
      concat("from 0 to ", kMostCost));
}

std::string not_a_count(const std::string& text) {
  int value = -1;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = failed == std::errc{} && rest == text.data() + text.size();
  if (is_number && value >= 0 && value <= kMostExchangesOfALayer) return "";
  return concat("found ", printable(text), ", expected a whole number from 0 to ",
                kMostExchangesOfALayer);
}

/// Between commas.
std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

/// How many numbers an option takes, and what is wrong with one ("" where nothing is).
struct Numbers {
  std::size_t fewest = 1;
  std::size_t most = 1;
  std::string (*wrong)(const std::string&) = nullptr;
};

/// Adds an option whose value is one word, so that no word behind it is taken for a number of it.
template <class Number>
::CLI::Option* add_numbers(::CLI::App& verb, const std::string& name, std::vector<Number>& numbers,
                           const Numbers& expected, const std::string& what) {
  const auto read = [&numbers](const std::string& text) {
    for (const std::string& part : parts_of(text)) {
      std::from_chars(part.data(), part.data() + part.size(), numbers.emplace_back());
    }
  };
  const auto check = [expected](const std::string& text) {
    const std::vector<std::string> parts = parts_of(text);
    if (parts.size() < expected.fewest || parts.size() > expected.most) {
      const std::string few =
          expected.fewest == expected.most ? "" : concat(expected.fewest, " or ");
      return concat("found ", printable(text), ", expected ", few, expected.most,
                    " numbers with commas between them");
    }
    for (const std::string& part : parts) {
      if (std::string found = expected.wrong(part); !found.empty()) return found;
    }
    return std::string();
  };
  return verb.add_option_function<std::string>(name, read, what)
      ->type_name("FLOAT")
      ->check(check, "");
}

}  // namespace

::CLI::Validator whole_number(std::int64_t most) {
  const auto check = [most](std::string& text) -> std::string {
    std::int64_t value = 0;
    const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failed == std::errc{} && rest == text.data() + text.size() && value >= 1 && value <= most) {
      text = std::to_string(value);
      return "";
    }
    return concat("found ", printable(text), ", expected a whole number from 1 to ", most);
  };
  return {check, concat("from 1 to ", most), "whole number"};
}

std::string not_a_size(const std::string& text) {
  constexpr std::int64_t kLeastAlone = 1 << 20;
  const auto bytes = byte_size(text);
  if (!bytes) return concat("found ", printable(text), ", expected a size as 80GiB or 80GB");
  const bool has_unit = std::isdigit(static_cast<unsigned char>(text.back())) == 0;
  if (has_unit || *bytes >= kLeastAlone) return "";
  return concat("found ", printable(text), ", expected a unit, as ", text, "GiB or ", text,
                "GB: a number alone is bytes");
}

std::string not_a_bandwidth(std::string& text) {
  std::string size = text;
  if (size.ends_with("/s")) size.resize(size.size() - 2);
  if (size.size() > 1 && size.ends_with('b')) {
    return concat("found ", printable(text),
                  ", expected bytes a second, as 50GB: a small b may stand for bits");
  }
  std::string wrong = not_a_size(size);
  if (wrong.empty()) text = size;
  return wrong;
}

std::string not_a_rate(const std::string& text) {
  return unless_number(
      text, [](double value) { return value >= 1.0 && value <= kMostRate; },
      concat("from 1 to ", kMostRate));
}

std::string not_a_temperature(const std::string& text) {
  return unless_number(
      text, [](double value) { return value >= 0.0 && value <= kMostTemperature; },
      concat("from 0 to ", kMostTemperature));
}

std::string not_a_share(const std::string& text) {
  return unless_number(
      text, [](double value) { return value > 0.0 && value <= 1.0; }, "above 0, at most 1");
}

std::string not_a_seed(const std::string& text) {
  std::uint64_t value = 0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed == std::errc{} && rest == text.data() + text.size()) return "";
  return concat("found ", printable(text), ", expected a whole number from 0 to ",
                std::numeric_limits<std::uint64_t>::max());
}

::CLI::Option* add_described(::CLI::App& verb, PlannedMachine& machine) {
  const std::string shipped = joined(check::shipped_machines());
  return verb.add_option("--machine", machine.machine,
                         concat("Memory and rates of a rank: a file of tessera measure, or ",
                                shipped, " as published. Other options override it."));
}

::CLI::Option* add_flops(::CLI::App& verb, PlannedMachine& machine, const std::string& what) {
  return verb.add_option("--flops", machine.flops, what)->check(not_a_rate, "FLOAT from 1");
}

void add_machine(::CLI::App& verb, PlannedMachine& machine) {
  add_described(verb, machine);
  verb.add_option("--device-memory", machine.device_memory,
                  "Memory of each rank's device, as 80GiB or 80GB (80G), to say whether a rank "
                  "fits; shares count from it; default: this machine's.")
      ->check(not_a_size, "SIZE");
  verb.add_option("--ranks-per-host", machine.ranks_per_host,
                  "Ranks that share the memory of a host; default: all.")
      ->transform(whole_number(kMostRanks));
  add_flops(verb, machine,
            "Operations a second of a rank, as 4e14; with --bandwidth or --machine shows the time "
            "of a step.");
  verb.add_option("--bandwidth", machine.bandwidth,
                  "Bytes a second that a rank sends, within its host and beyond, as 50GB/s.")
      ->transform(::CLI::Validator(not_a_bandwidth, "SIZE"));
}

::CLI::Option* add_costs(::CLI::App& verb, std::vector<double>& costs) {
  return add_numbers(verb, "--costs", costs, {3, 4, not_a_cost},
                     "F,I,W[,FB]: cost of a slot of each kind, FB of an F paired with a B; default "
                     "1,1,1, a B I + W, FB F + I + W or, with --exchanges, what its turns take.");
}

void add_exchanges(::CLI::App& verb, ScheduleArguments& schedule) {
  constexpr int kMostLayers = 4096;
  ::CLI::Option* exchanges =
      add_numbers(verb, "--exchanges", schedule.exchanges, {2, 2, not_a_count},
                  "F,B: exchanges with other ranks in the forward and backward of a layer, as 3,2 "
                  "for experts: F and B take longer, and a pair takes turns.");
  verb.add_option("--layers", schedule.layers, "Layers of a stage that have exchanges; default 1.")
      ->transform(whole_number(kMostLayers))
      ->needs(exchanges);
  ::CLI::Option* cost = verb.add_option("--exchange-cost", schedule.exchange_cost,
                                        "Time of one exchange, from its issue on.");
  cost->check(not_a_cost, "FLOAT")->needs(exchanges);
  exchanges->needs(cost);
}

::CLI::Option* add_expert_loads(::CLI::App& verb, std::optional<std::string>& file) {
  return verb.add_option("--expert-loads", file, "JSON file with the shares of the experts.");
}

void check_rates(const std::string& verb, const PlannedMachine& machine) {
  if (machine.machine || machine.flops.has_value() == machine.bandwidth.has_value()) return;
  const bool has_flops = machine.flops.has_value();
  throw Error(ErrorKind::kUsage,
              concat(verb, ": found ", has_flops ? "--flops" : "--bandwidth", " without ",
                     has_flops ? "--bandwidth" : "--flops",
                     ", expected both, or --machine with it; see tessera ", verb, " --help"));
}

}  // namespace tessera::cli
