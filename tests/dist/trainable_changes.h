// The two changes of set_trainable, by name.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/trainable.h"

namespace tessera::test {

inline TrainableChange freeze(std::vector<std::string> names) { return {std::move(names), false}; }
inline TrainableChange unfreeze(std::vector<std::string> names) { return {std::move(names), true}; }

}  // namespace tessera::test
