#include "launch/rank_variables.h"

#include <algorithm>
#include <string>

#include "base/threads/cores.h"
#include "tessera/error.h"

namespace tessera::comm {

void set_spin_variable(base::Environment& variables) {
  const bool said = std::ranges::any_of(variables, [](const auto& variable) {
    return says_how_threads_wait(concat(variable.first, "=", variable.second));
  });
  if (said) return;
  const std::string_view entry = kShortSpins;
  const auto equals = entry.find('=');
  variables[std::string(entry.substr(0, equals))] = entry.substr(equals + 1);
}

void set_thread_variables(base::Environment& variables, int threads) {
  std::string& given = variables["OMP_NUM_THREADS"];
  if (!base::gives_threads(given)) given = std::to_string(threads);
  set_spin_variable(variables);
}

}  // namespace tessera::comm
