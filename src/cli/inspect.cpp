#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/printable.h"
#include "cli/exit_code.h"
#include "cli/verbs.h"
#include "io/hf_folder.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

std::int64_t total_numel(const HfFolder& folder) {
  std::int64_t total = 0;
  for (const auto& [name, tensor] : folder.tensors()) total += tensor.info->numel();
  return total;
}

// Without the quotes of a message: a table has its own borders.
std::string shown_name(std::string_view name) {
  const std::string quoted = printable(name);
  return quoted.substr(1, quoted.size() - 2);
}

void print_table(const HfFolder& folder) {
  std::size_t widest = 0;
  for (const auto& [name, tensor] : folder.tensors()) {
    widest = std::max(widest, shown_name(name).size());
  }
  for (const auto& [name, tensor] : folder.tensors()) {
    const TensorInfo& info = *tensor.info;
    std::cout << std::left << std::setw(static_cast<int>(widest) + 2) << shown_name(name)
              << std::setw(10) << to_string(info.dtype) << std::setw(20) << shape_text(info.shape)
              << std::right << std::setw(14) << info.size_bytes() << " bytes\n";
  }
  std::cout << folder.tensors().size() << " tensors, " << total_numel(folder) << " elements, "
            << folder.total_bytes() << " bytes in " << folder.num_files() << " file(s)\n";
}

void print_json(const HfFolder& folder) {
  nlohmann::ordered_json tensors = nlohmann::ordered_json::object();
  for (const auto& [name, tensor] : folder.tensors()) {
    const TensorInfo& info = *tensor.info;
    tensors[name] = {{"dtype", to_string(info.dtype)},
                     {"shape", info.shape},
                     {"bytes", info.size_bytes()},
                     {"file", folder.file(tensor.file).path().filename().string()}};
  }
  const nlohmann::ordered_json whole = {{"tensors", tensors},
                                        {"total",
                                         {{"tensors", folder.tensors().size()},
                                          {"elements", total_numel(folder)},
                                          {"bytes", folder.total_bytes()},
                                          {"files", folder.num_files()}}}};
  std::cout << whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
}

}  // namespace

int run_inspect(const InspectArguments& arguments) {
  if (!arguments.contract_file.empty()) {
    inspect_contract(arguments);
    return kDone;
  }
  TESSERA_CHECK(arguments.overrides.empty(), ErrorKind::kUsage, "--",
                arguments.overrides.empty() ? "" : arguments.overrides.front().first,
                ": found beside a folder, expected it beside --contract only");
  const bool is_file = std::string_view(arguments.folder).ends_with(".safetensors") &&
                       !std::filesystem::is_directory(arguments.folder);
  const HfFolder folder =
      is_file ? HfFolder::of_file(arguments.folder) : HfFolder::open(arguments.folder);
  arguments.json ? print_json(folder) : print_table(folder);
  return kDone;
}

}  // namespace tessera::cli
