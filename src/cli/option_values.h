// Checks of the values of options: each returns "" for one that is right, else what was found and
// what is expected. Then the options of several verbs, what a rank has of its machine, and those
// that are several numbers. Pure.
#pragma once

#include <CLI/App.hpp>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/arguments.h"

namespace tessera::cli {

/// From 1 on, written in decimal. Range says of "two" that it is not in the range, and not what was
/// found; and the parser would read 010 as 8.
::CLI::Validator whole_number(std::int64_t most);
/// A size with a unit, or a number that can be one of bytes.
std::string not_a_size(const std::string& text);
/// A size with or without "/s", which is taken off.
std::string not_a_bandwidth(std::string& text);
/// Operations a second.
std::string not_a_rate(const std::string& text);
std::string not_a_temperature(const std::string& text);
/// Above 0, at most 1.
std::string not_a_share(const std::string& text);
/// The parser itself reads any larger number as the largest one.
std::string not_a_seed(const std::string& text);

/// The most ranks that are started, or share a host.
inline constexpr int kMostRanks = 4096;

::CLI::Option* add_described(::CLI::App& verb, PlannedMachine& machine);  ///< --machine
::CLI::Option* add_flops(::CLI::App& verb, PlannedMachine& machine, const std::string& what);
/// All of kMachineOptions.
void add_machine(::CLI::App& verb, PlannedMachine& machine);
inline constexpr std::array kMachineOptions{"--machine", "--device-memory", "--ranks-per-host",
                                            "--flops", "--bandwidth"};
::CLI::Option* add_costs(::CLI::App& verb, std::vector<double>& costs);  ///< --costs
/// --exchanges, --layers, --exchange-cost.
void add_exchanges(::CLI::App& verb, ScheduleArguments& schedule);
::CLI::Option* add_expert_loads(::CLI::App& verb, std::optional<std::string>& file);
/// A rate alone gives no time. Errors: kUsage for one without the other and without --machine.
void check_rates(const std::string& verb, const PlannedMachine& machine);

}  // namespace tessera::cli
