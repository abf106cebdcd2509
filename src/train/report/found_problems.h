// FoundProblems: a check that was asked for looked, and found something. Not a refusal of what was
// asked for and not a failure of the run: the program ends with a code of its own. Pure.
#pragma once

#include "tessera/error.h"

namespace tessera::train {

class FoundProblems : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera::train
