// A leaf of a sharded module, which knows the parameter that it shows.
//
// Next: ../grad/leaf.h.
#pragma once

#include <memory>

#include "grad/leaf.h"

namespace tessera::fsdp {

struct Parameter;

struct Leaf : grad::Leaf {
  Parameter* owner = nullptr;
};

/// The leaf that a tensor already is, or null.
inline std::shared_ptr<Leaf> find_leaf(const at::Tensor& tensor) {
  return std::static_pointer_cast<Leaf>(grad::find_leaf(tensor));
}

}  // namespace tessera::fsdp
