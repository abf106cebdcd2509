// tessera VERB: reads the command line, hands it to the verb, turns errors into one line and a
// code.
#include <torch/version.h>

#include <iostream>

#include "base/mapped_file.h"
#include "cli/arguments.h"
#include "cli/program_end.h"
#include "cli/program_start.h"
#include "cli/version.h"
#include "comm/backends/backend.h"
#include "comm/failure_report.h"
#include "tessera/error.h"
#include "tessera/log_level.h"

namespace tessera::cli {
namespace {

std::string version_text() {
  std::string text = concat("tessera ", kProjectVersion, " (git ", kGitHash, "), torch ",
                            TORCH_VERSION, ", backends:");
  for (const comm::BackendRow& backend : comm::backends()) {
    if (backend.connects_processes() && backend.built_in()) text += concat(" ", backend.name);
  }
  return text;
}

struct RunVerb {
  int operator()(const TrainArguments& arguments) const {
    if (!arguments.print_config) return run_train(arguments);
    return run_for_output([&] { return run_train(arguments); });
  }
  int operator()(const GradientsArguments& arguments) const { return run_gradients(arguments); }
  int operator()(const InspectArguments& arguments) const {
    return run_for_output([&] { return run_inspect(arguments); });
  }
  int operator()(const GenerateArguments& arguments) const {
    return run_for_output([&] { return run_generate(arguments); });
  }
  int operator()(const ConvertArguments& arguments) const {
    const int code = run_convert(arguments);
    if (code == kDone) check_standard_output();
    return code;
  }
  int operator()(const ScheduleArguments& arguments) const {
    return run_for_output([&] { return run_schedule(arguments); });
  }
  int operator()(const PlanArguments& arguments) const {
    return run_for_output([&] { return run_plan(arguments); });
  }
  int operator()(const CheckArguments& arguments) const { return run_check(arguments); }
  int operator()(const MeasureArguments& arguments) const { return run_measure(arguments); }
  int operator()(const ShowText& show) const {
    return run_for_output([&] {
      std::cout << show.text;
      return kDone;
    });
  }
};

int run(int argc, char** argv) {
  try {
    return std::visit(RunVerb{}, parse_arguments({argv + 1, argv + argc}, version_text));
  } catch (const OutputLost& error) {
    return report(error, Phase::kStepping);
  } catch (const std::exception& error) {
    // Under a launcher every rank comes to the same error here.
    const int code = exit_code(error, Phase::kPreparing);
    comm::refuse_once(error, code, [&] { report(error, Phase::kPreparing); });
    return code;
  }
}

}  // namespace
}  // namespace tessera::cli

/// Runs the program; the executable calls it (loader/main.cpp).
extern "C" [[gnu::visibility("default")]] int tessera_main(int argc, char** argv) {
  if (argc < 1) return tessera::cli::kRefused;
  tessera::cli::name_process();
  tessera::cli::keep_standard_descriptors();
  tessera::cli::ignore_signals_of_writes();
  tessera::report_cut_files();
  tessera::set_log_level(tessera::LogLevel::kInfo);
  return tessera::cli::run(argc, argv);
}
