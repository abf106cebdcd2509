// What a model family keeps in fp32, laid onto the parameters of one model. Pure.
#pragma once

#include <vector>

#include "models/family.h"
#include "tessera/contract.h"

namespace tessera::train {

/// Sets strict_pin and pin16 of the parameters that the family's patterns match. Errors: kContract
/// for a pattern that matches none: the family's table does not fit its own models.
void apply_pins(const models::FamilyTraits& family, std::vector<ParameterMeta>& parameters);

}  // namespace tessera::train
