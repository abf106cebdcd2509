// The list of injected faults. Next: faulty_run.h, docs/layouts.md.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "golden/faulty_run.h"

namespace tessera::golden {

enum class CaughtBy : std::uint8_t {
  kSharding,    ///< refused when the model is sharded, naming the parameter
  kInvariance,  ///< check_invariant_gradients, on the first step
  kGradients,   ///< the comparison with the unsharded model alone
  kNorm,        ///< the same of the gradient norm; every gradient is right
  kNothing,     ///< does no harm here
};

struct Fault {
  std::string test;  ///< its name
  std::string what;
  std::string seen;  ///< where somebody had it
  std::string folder;
  Degrees degrees;
  Changes changes;
  CaughtBy caught_by = CaughtBy::kGradients;
  std::string named;       ///< in the refusal, or part of a name that is found
  bool auxiliary = false;  ///< on top of a run with the auxiliary loss
};
/// Its line of docs/layouts.md.
std::string table_row(const Fault& fault);
std::ostream& operator<<(std::ostream& out, const Fault& fault);

void with_auxiliary_loss(train::Config& config);

const std::vector<Fault>& all_faults();
// Its parts, by what is wrong.
std::vector<Fault> faults_of_declarations();
std::vector<Fault> faults_of_transitions();
std::vector<Fault> faults_of_sums();

}  // namespace tessera::golden
