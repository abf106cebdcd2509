// CheckpointValues: names and values of the program that a checkpoint keeps in addition to tensors,
// such as "epoch" or a path. No torch in this header. Next: checkpoint.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <variant>

namespace tessera {

/// Integers and texts by name. Names are not empty; names and texts are UTF-8, together at most
/// 1 MiB.
using CheckpointValues =
    std::map<std::string, std::variant<std::int64_t, std::string>, std::less<>>;

}  // namespace tessera
