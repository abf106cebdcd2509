// Runs a Python program of this repository with the packages that the tests install.
#pragma once

#include "cli/program.h"

namespace tessera::cli {

/// `script` is relative to the root of the repository.
inline Outcome run_python(const TemporaryFolder& folder, const std::string& script,
                          const std::vector<std::string>& words,
                          const std::string& environment = "") {
  std::string command = "cd '" + folder.path().string() + "' && env " + environment +
                        " timeout 120 '" TESSERA_PYTHON "' '" TESSERA_SOURCE "/" + script + "'";
  for (const std::string& word : words) command += " '" + word + "'";
  command += " > python_out.txt 2> python_err.txt < /dev/null";
  const int status = std::system(command.c_str());
  Outcome outcome;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  outcome.out = read_file(folder / "python_out.txt");
  outcome.err = read_file(folder / "python_err.txt");
  return outcome;
}

}  // namespace tessera::cli
